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
constexpr int kChunk = 64;  // packed A is [k / 64][rows][64]: each row's address is a constant away from the first one's

// What fits into the registers: rows x panels of accumulators, a vector of B for each column, and one element of A.
constexpr int kMaxRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 2;
constexpr int kPanels = kLanes == 16 ? 2 : 1;
// With few rows, more panels: enough independent chains to hide the latency of fma.
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

// acc[r] += sum over k < count of a[r * LDA + k] * b[p][k * ldb .. + 16]
template <int MR, int NP, int LDA, class T>
PE_ALWAYS_INLINE void accumulate(Accumulators<MR, NP * kPanelVecs>& acc, const float* a, const T* const (&b)[NP], int64_t ldb,
                                 int count) {
  for (int k = 0; k < count; k++) {
    VecF columns[NP * kPanelVecs];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) {
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVecs; j++) columns[p * kPanelVecs + j] = load(b[p] + k * ldb + j * kLanes);
    }
#pragma GCC unroll 14
    for (int r = 0; r < MR; r++) {
      const VecF x = set1(a[r * LDA + k]);
#pragma GCC unroll 8
      for (int j = 0; j < NP * kPanelVecs; j++) acc.v[r][j] = fma(x, columns[j], acc.v[r][j]);
    }
  }
}

template <int MR, int NV>
PE_ALWAYS_INLINE void load_tile(Accumulators<MR, NV>& acc, const float* c, int64_t ldc) {
#pragma GCC unroll 14
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc.v[r][j] = load(c + r * ldc + j * kLanes);
  }
}

template <int MR, int NV>
PE_ALWAYS_INLINE void zero_tile(Accumulators<MR, NV>& acc) {
#pragma GCC unroll 14
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc.v[r][j] = zero();
  }
}

template <int MR, int NV>
PE_ALWAYS_INLINE void store_tile(const Accumulators<MR, NV>& acc, float* c, int64_t ldc) {
#pragma GCC unroll 14
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
    PE_ROWS(7)
    PE_ROWS(8)
    PE_ROWS(9)
    PE_ROWS(10)
    PE_ROWS(11)
    PE_ROWS(12)
    PE_ROWS(13)
    PE_ROWS(14)
#undef PE_ROWS
  }
}

// The same with as many panels as panels_for says. max_rows is the largest of the caller's tiles, and `rows` at most one less.
template <class Op, int MAX = kMaxRows, class Args>
PE_ALWAYS_INLINE void with_tile_shape(int rows, int max_rows, const Args& args) {
  if (max_rows <= kFewRows) {
    with_rows<Op, kWidePanels, 1, kFewRows>(rows, args);
  } else {
    with_rows<Op, kPanels, kFewRows, MAX>(rows, args);
  }
}

// Rows of length k to packed [ceil(k / 64)][rows][64], fp32. The last chunk's rest is left as it was: nothing reads it.
template <class T>
inline void pack_rows(const T* input, int64_t stride, int rows, int k, float* packed) {
  for (int k0 = 0; k0 < k; k0 += kChunk) {
    const int count = k - k0 < kChunk ? k - k0 : kChunk;
    for (int r = 0; r < rows; r++, packed += kChunk) {
      const T* row = input + r * stride + k0;
      int i = 0;
      for (; i + kLanes <= count; i += kLanes) store(packed + i, load(row + i));
      for (; i < count; i++) packed[i] = to_float(row[i]);
    }
  }
}

// c [rows, 16 NP], rows ldc apart; a packed in chunks; panels[p]'s k-th row is at panels[p] + k * ldb.
template <class T>
struct GemmTileArgs {
  const float* a;
  const T* const* panels;
  int64_t ldb;
  int k;
  float* c;
  int64_t ldc;
  bool add;  // to c, or overwrite it
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
    const float* a = args.a;
    for (int k = args.k; k > 0; k -= kChunk) {
      accumulate<MR, NP, kChunk>(acc, a, b, args.ldb, k < kChunk ? k : kChunk);
      a += MR * kChunk;
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) b[p] += kChunk * args.ldb;
    }
    store_tile(acc, args.c, args.ldc);
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
