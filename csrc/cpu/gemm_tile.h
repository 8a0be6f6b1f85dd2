// The micro-kernel that linear and attention share: C (a few rows x whole panels of 16 columns) += A * B, with C in registers.
//
// Every element of C is one chain of fma over k = 0, 1, 2, ..., so its bits depend neither on the number of rows of the tile
// nor on where k is interrupted to store C and load it again.
#pragma once
#include "simd.h"

#define PE_ALWAYS_INLINE inline __attribute__((always_inline))

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kPanel = 16;
constexpr int kPanelVecs = kPanel / kLanes;

// What fits into the registers: rows x panels of accumulators, a vector of B for each column, and one element of A. Wide tiles
// need fewer loads for each fma than tall ones do.
constexpr int kMaxRows = kLanes == 4 ? 2 : 6;
constexpr int kPanels = kLanes == 16 ? 4 : 1;
// With fewer rows, more panels: enough independent chains to hide the latency of fma.
constexpr int kFewRows = kLanes == 16 ? 6 : kLanes == 8 ? 2 : 1;
constexpr int kWidePanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
constexpr int panels_for(int max_rows) { return max_rows <= kFewRows ? kWidePanels : kPanels; }

// `total` rows (at least one) cut into even tiles of at most kMaxRows.
struct RowTiles {
  int count, rows, larger;  // the first `larger` tiles have rows + 1 rows, the others `rows`

  explicit RowTiles(int total) : count((total + kMaxRows - 1) / kMaxRows), rows(total / count), larger(total % count) {}
  int rows_of(int tile) const { return rows + (tile < larger); }
  int max_rows() const { return rows + (larger > 0); }
  int first_row(int tile) const { return tile * rows + (tile < larger ? tile : larger); }
};

template <int MR, int NV>
struct Accumulators {
  VecF v[MR][NV];
};

// Rows of A, any stride apart.
template <int MR>
struct StridedRows {
  const float* row[MR];

  PE_ALWAYS_INLINE StridedRows(const float* a, int64_t lda) {
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) row[r] = a + r * lda;
  }
  PE_ALWAYS_INLINE float at(int r, int k) const { return row[r][k]; }
};

// Rows of A, LDA apart: one address, and constants.
template <int LDA>
struct FixedRows {
  const float* a;
  PE_ALWAYS_INLINE float at(int r, int k) const { return a[r * LDA + k]; }
};

// What to bring closer while the fma keep the core busy: at each step of k, LINES cache lines from each of COUNT addresses on.
template <int COUNT, int LINES>
struct Prefetch {
  const char* next[COUNT];
  int64_t stride;  // bytes from one step to the next; 0: the same line again, which costs next to nothing

  PE_ALWAYS_INLINE void step() {
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) {
#pragma GCC unroll 4
      for (int j = 0; j < LINES; j++) __builtin_prefetch(next[i] + 64 * j, 0, 2);
      next[i] += stride;
    }
  }
};
struct NoPrefetch {
  PE_ALWAYS_INLINE void step() {}
};

// The same for a number of panels known at run time only, up to kMaxAhead, a cache line of each.
constexpr int kMaxAhead = 4;
struct PanelsAhead {
  const char* next[kMaxAhead];
  int count;  // of next
  int64_t stride;

  template <int COUNT>
  PE_ALWAYS_INLINE Prefetch<COUNT, 1> prefetch() const {
    Prefetch<COUNT, 1> result;
    result.stride = stride;
    for (int i = 0; i < COUNT; i++) result.next[i] = next[i < count ? i : 0];
    return result;
  }
};

// acc[r] += sum over k < count of a(r, k) * b[p][k * ldb .. + 16]
template <int MR, int NP, class Rows, class T, class Ahead = NoPrefetch>
PE_ALWAYS_INLINE void accumulate(Accumulators<MR, NP * kPanelVecs>& acc, const Rows& a, const T* const (&b)[NP], int64_t ldb,
                                 int count, Ahead ahead = {}) {
  for (int k = 0; k < count; k++) {
    ahead.step();
    VecF columns[NP * kPanelVecs];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) {
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVecs; j++) columns[p * kPanelVecs + j] = load(b[p] + k * ldb + j * kLanes);
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) {
      const VecF x = set1(a.at(r, k));
#pragma GCC unroll 8
      for (int j = 0; j < NP * kPanelVecs; j++) acc.v[r][j] = fma(x, columns[j], acc.v[r][j]);
    }
  }
}

template <int MR, int NV>
PE_ALWAYS_INLINE void load_tile(Accumulators<MR, NV>& acc, const float* c, int64_t ldc) {
#pragma GCC unroll 6
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc.v[r][j] = load(c + r * ldc + j * kLanes);
  }
}

template <int MR, int NV>
PE_ALWAYS_INLINE void zero_tile(Accumulators<MR, NV>& acc) {
#pragma GCC unroll 6
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc.v[r][j] = zero();
  }
}

template <int MR, int NV>
PE_ALWAYS_INLINE void store_tile(const Accumulators<MR, NV>& acc, float* c, int64_t ldc) {
#pragma GCC unroll 6
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) store(c + r * ldc + j * kLanes, acc.v[r][j]);
  }
}

// Op::run<rows, NP>(args) for a number of rows known at run time only, MIN .. MAX.
template <class Op, int NP, int MIN, int MAX, class Args>
PE_ALWAYS_INLINE void with_rows(int rows, const Args& args) {
  switch (rows) {
#define PE_ROWS(R) \
  case R:          \
    if constexpr (MIN <= R && R <= MAX) return Op::template run<R, NP>(args);
    PE_ROWS(1)
    PE_ROWS(2)
    PE_ROWS(3)
    PE_ROWS(4)
    PE_ROWS(5)
    PE_ROWS(6)
#undef PE_ROWS
  }
}

// The same with as many panels as panels_for says. max_rows is the largest of the caller's tiles, and `rows` at most one less.
template <class Op, class Args>
PE_ALWAYS_INLINE void with_tile_shape(int rows, int max_rows, const Args& args) {
  if (max_rows <= kFewRows) {
    with_rows<Op, kWidePanels, 1, kFewRows>(rows, args);
  } else {
    with_rows<Op, kPanels, kFewRows, kMaxRows>(rows, args);
  }
}

// c [rows, 16 NP], rows ldc apart; a [rows, k], rows lda apart; panels[p]'s k-th row is at panels[p] + k * ldb.
template <class T>
struct GemmTileArgs {
  const float* a;
  int64_t lda;
  const T* const* panels;
  int64_t ldb;
  int k;
  float* c;
  int64_t ldc;
  bool add;  // to c, or overwrite it
  PanelsAhead ahead = {};
};

struct GemmTile {
  template <int MR, int NP, class T>
  static void run(const GemmTileArgs<T>& args) {
    Accumulators<MR, NP * kPanelVecs> acc;
    const T* b[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) b[p] = args.panels[p];
    if (args.add) {
      load_tile(acc, args.c, args.ldc);
    } else {
      zero_tile(acc);
    }
    const auto multiply = [&](auto ahead) {
      accumulate<MR, NP>(acc, StridedRows<MR>(args.a, args.lda), b, args.ldb, args.k, ahead);
    };
    switch (args.ahead.count) {
      case 0:
        multiply(NoPrefetch{});
        break;
      case 1:
        multiply(args.ahead.template prefetch<1>());
        break;
      case 2:
        multiply(args.ahead.template prefetch<2>());
        break;
      default:
        multiply(args.ahead.template prefetch<kMaxAhead>());
    }
    store_tile(acc, args.c, args.ldc);
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
