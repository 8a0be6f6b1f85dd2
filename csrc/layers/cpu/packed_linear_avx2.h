// linear on AVX2 where there are more than a few rows: what limits the products is how many instructions there are beside the
// fma.
//
// Rows are brought into the order in which a tile reads them, step by step of k: one address serves all rows, and loads that
// fall into the same bank of the cache are rare, which rows a multiple of 64 bytes apart make the rule. One unit of work is a
// group of panels times a block of row tiles. k is walked in blocks, for each of which a panel's part stays in the caches while
// the row tiles pass by, and meanwhile the next part is fetched: from several places at once, for memory gives more that way.
#pragma once
#include <type_traits>

#include "../../cpu/gemm_tile.h"
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../params.h"
#include "linear_output.h"

namespace pyengine::cpu {
namespace PE_ISA {

// acc[r][j] += a * columns[j]. A row's instructions are kept together: compilers bring forward what all rows load, more than
// the registers hold, and the fma then wait for each other.
PE_ALWAYS_INLINE void multiply_row(VecF (&acc)[2], const VecF (&columns)[2], const float& a) {
#if defined(PE_SIMDE)
  for (int j = 0; j < 2; j++) acc[j] = fma(set1(a), columns[j], acc[j]);
#else
  __m256 x;
  __asm__ volatile("vbroadcastss %5, %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
                   : "+x"(acc[0].v), "+x"(acc[1].v), "=&x"(x)
                   : "x"(columns[0].v), "x"(columns[1].v), "m"(a));
#endif
}

PE_ALWAYS_INLINE VecF load_columns(const float* b) {
#if defined(PE_SIMDE)
  return load(b);
#else
  VecF result;
  __asm__ volatile("vmovups %1, %0" : "=x"(result.v) : "m"(*reinterpret_cast<const __m256*>(b)));
  return result;
#endif
}

struct PackedRowsArgs {
  const float* a;  // [k, rows]
  const float* b;  // [k, 16]
  int k;
  float* c;          // [rows, 16]
  bool add;          // to c, or overwrite it
  const char* next;  // what to bring closer meanwhile, for each kSteps of k a cache line at each of `places` places
  int64_t apart;     // bytes from a place to the next one
  int places;        // 0, 2, 3 or 4
};

struct PackedRowsTile {
  static constexpr int kSteps = 8;

  template <int MR, int NP>
  static void run(const PackedRowsArgs& args) {
    Accumulators<MR, kPanelVecs> acc;
    if (args.add) {
      load_tile(acc, args.c, kPanel);
    } else {
      zero_tile(acc);
    }
    switch (args.places) {
      case 0:
        accumulate<MR, 0>(acc, args);
        break;
      case 2:
        accumulate<MR, 2>(acc, args);
        break;
      case 3:
        accumulate<MR, 3>(acc, args);
        break;
      default:
        accumulate<MR, 4>(acc, args);
    }
    store_tile(acc, args.c, kPanel);
  }

 private:
  template <int MR>
  static PE_ALWAYS_INLINE void step(Accumulators<MR, kPanelVecs>& acc, const float* a, const float* b) {
    const VecF columns[kPanelVecs] = {load_columns(b), load_columns(b + kLanes)};
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) multiply_row(acc.v[r], columns, a[r]);
  }

  template <int MR, int PLACES>
  static PE_ALWAYS_INLINE void accumulate(Accumulators<MR, kPanelVecs>& acc, const PackedRowsArgs& args) {
    const float *a = args.a, *b = args.b;
    const char* next = args.next;
    int left = args.k;
#pragma GCC unroll 1
    for (; left >= kSteps; left -= kSteps, a += kSteps * MR, b += kSteps * kPanel) {
#pragma GCC unroll 8
      for (int i = 0; i < PLACES; i++) __builtin_prefetch(next + args.apart * i, 0, 2);
      if (PLACES > 0) next += 64;
#pragma GCC unroll 8
      for (int i = 0; i < kSteps; i++) step<MR>(acc, a + i * MR, b + i * kPanel);
    }
#pragma GCC unroll 1
    for (; left > 0; left--, a += MR, b += kPanel) step<MR>(acc, a, b);
  }
};

// The transpose of 8 x 8 floats, in place.
inline void transpose(__m256 (&rows)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

// out [count, num_rows] = rows [num_rows, count], at most kMaxRows of them and `stride` apart, as fp32.
template <class In>
void pack_rows(const In* rows, int64_t stride, int num_rows, int count, float* out) {
  int k = 0;
  // Eight values are written where num_rows are meant, and the others after them: not so at the end.
  for (; k + 2 * kLanes <= count; k += kLanes) {
    __m256 v[kLanes];
    for (int r = 0; r < kLanes; r++) v[r] = load(rows + (r < num_rows ? r : 0) * stride + k).v;
    transpose(v);
    for (int i = 0; i < kLanes; i++, out += num_rows) _mm256_storeu_ps(out, v[i]);
  }
  for (; k < count; k++) {
    for (int r = 0; r < num_rows; r++) *out++ = to_float(rows[r * stride + k]);
  }
}

// out: the row tiles of the input after one another, each [in_features, rows]
template <class In>
void pack_input(const Product& p, const RowTiles& tiles, float* out) {
  constexpr int64_t kSerialLimit = 16 * 1024;  // values; below, a second thread would be no faster
  const auto pack_tile = [&](int64_t tile, int) {
    const int64_t row = tiles.first_row(static_cast<int>(tile));
    pack_rows(static_cast<const In*>(p.input) + row * p.input_stride, p.input_stride, tiles.rows_of(static_cast<int>(tile)),
              p.in_features, out + row * p.in_features);
  };
  if (int64_t{p.num_tokens} * p.in_features <= kSerialLimit) {
    for (int tile = 0; tile < tiles.count; tile++) pack_tile(tile, 0);
  } else {
    parallel_for(tiles.count, pack_tile);
  }
}

// How rows and columns are cut.
struct PackedPlan {
  static constexpr int kDepth = 576;                  // of k, at most
  static constexpr int kTiles = 24;                   // row tiles of a unit of work, at most
  static constexpr int64_t kBlockFloats = 96 * 1024;  // of input that a unit of work walks: most of a 512 KB cache
  static constexpr int kUnitsPerThread = 8;

  RowTiles tiles;
  int num_threads = get_num_threads();
  int depth;                    // of a block of k
  int block_tiles, num_blocks;  // row tiles of a unit of work
  int num_panels, unit_panels, units_per_block;

  explicit PackedPlan(const Product& p) : tiles(p.num_tokens) {
    depth = divide_up(p.in_features, divide_up(p.in_features, kDepth));
    const int64_t fit = kBlockFloats / (int64_t{p.in_features} * tiles.max_rows());
    num_blocks = divide_up(tiles.count, fit < 2 ? 2 : fit < kTiles ? static_cast<int>(fit) : kTiles);
    block_tiles = divide_up(tiles.count, num_blocks);
    const int together = p.panels_per_output();
    num_panels = divide_up(p.out_features, kPanel) * together;
    const int64_t fair = int64_t{num_panels} * num_blocks / (kUnitsPerThread * num_threads) / together * together;
    unit_panels = static_cast<int>(fair < together ? together : fair < num_panels ? fair : num_panels);
    units_per_block = divide_up(num_panels, unit_panels);
  }
  int64_t num_units() const { return int64_t{units_per_block} * num_blocks; }

 private:
  static int divide_up(int a, int b) { return (a + b - 1) / b; }
};

template <class W>
class PackedUnit {
 public:
  // a: row tiles after one another, each [in_features, rows]
  PackedUnit(const Product& params, const PackedPlan& plan, const float* a) : p_(params), plan_(plan), a_(a) {}

  template <class Out, class In>
  void run(int64_t unit) const {
    const RowBlock rows = row_block(static_cast<int>(unit / plan_.units_per_block));
    const int first = first_panel(unit), end = first + plan_.unit_panels;
    // The next unit of this thread is likely to be the one after those that the others have taken meanwhile.
    const int64_t next_unit = unit + plan_.num_threads;
    for (int panel = first; panel < end && panel < plan_.num_panels; panel++) {
      const bool last = panel + 1 == end || panel + 1 == plan_.num_panels;
      const int next = !last ? panel + 1 : next_unit < plan_.num_units() ? first_panel(next_unit) : -1;
      multiply_panel<Out, In>(panel, next, rows);
    }
  }

 private:
  struct RowBlock {
    int first_tile, end_tile;
    float* c;  // [rows, 16]; gated: [2, rows, 16], the gate's first
    int num_rows;
    float* wide;  // [depth, 16]: a part of a panel of half precision, widened
  };

  RowBlock row_block(int block) const {
    const int first_tile = block * plan_.block_tiles, end = first_tile + plan_.block_tiles;
    const int end_tile = end < plan_.tiles.count ? end : plan_.tiles.count;
    const int rows = plan_.tiles.first_row(end_tile) - plan_.tiles.first_row(first_tile);
    const int sums = rows * p_.panels_per_output();
    float* c = static_cast<float*>(thread_scratch((sums + plan_.depth) * kPanel * sizeof(float)));
    return {first_tile, end_tile, c, rows, c + sums * kPanel};
  }

  int first_panel(int64_t unit) const { return static_cast<int>(unit % plan_.units_per_block) * plan_.unit_panels; }
  const W* panel_at(int panel, int k) const {
    return static_cast<const W*>(p_.weight) + (int64_t{panel} * p_.in_features + k) * kPanel;
  }

  template <class Out, class In>
  void multiply_panel(int panel, int next_panel, const RowBlock& rows) const {
    // A gate's sums wait for those of the panel that follows it.
    const bool gates = p_.gated && panel % 2 == 0;
    const int column = panel / p_.panels_per_output() * kPanel;
    for (int k0 = 0; k0 < p_.in_features; k0 += plan_.depth) {
      const int k = p_.in_features - k0 < plan_.depth ? p_.in_features - k0 : plan_.depth;
      const W* next = k0 + k < p_.in_features ? panel_at(panel, k0 + k) : next_panel >= 0 ? panel_at(next_panel, 0) : nullptr;
      const float* b = widened(panel_at(panel, k0), k, rows.wide);
      const float* gate = rows.c;
      float* c = rows.c + (p_.gated && !gates ? rows.num_rows * kPanel : 0);
      for (int tile = rows.first_tile; tile < rows.end_tile; tile++) {
        const int row = plan_.tiles.first_row(tile), count = plan_.tiles.rows_of(tile);
        const bool finished = k0 + k == p_.in_features && !gates;
        if (finished) fetch_output<Out>(row, count, column);
        PackedRowsArgs args = {a_ + int64_t{row} * p_.in_features + int64_t{k0} * count, b, k, c, k0 > 0, nullptr, 0, 0};
        fetch_next(next, tile - rows.first_tile, rows.end_tile - rows.first_tile, args);
        with_rows<PackedRowsTile, 1, 1, kMaxRows>(count, args);
        if (finished) write_tile<Out, In>(c, gate, row, count, column);
        c += count * kPanel, gate += count * kPanel;
      }
    }
  }

  static const float* widened(const W* panel, int k, float* wide) {
    if constexpr (std::is_same_v<W, float>) {
      return panel;
    } else {
      for (int i = 0; i < k * kPanel; i += kLanes) store(wide + i, load(panel + i));
      return wide;
    }
  }

  // A tile's share of the next part of a panel, which is cut into as many runs as there are places: the few first tiles fetch
  // all of it. A tile alone fetches the first half of each run, and leaves the others to the processor, which fetches what is
  // read in order: the two together give more than either.
  static void fetch_next(const W* next, int tile, int num_tiles, PackedRowsArgs& args) {
    const int places = num_tiles >= 4 ? 2 : num_tiles == 3 ? 3 : 4;
    const int run_lines = args.k * kPanel * static_cast<int>(sizeof(W)) / 64 / places;
    const int first = tile * (args.k / PackedRowsTile::kSteps);
    if (next == nullptr || first >= run_lines) return;
    args.next = reinterpret_cast<const char*>(next) + 64 * first;
    args.apart = int64_t{64} * run_lines;
    args.places = places;
  }

  template <class Out>
  void fetch_output(int row, int count, int column) const {
    const Out* out = static_cast<const Out*>(p_.out) + row * p_.out_stride + column;
    for (int r = 0; r < count; r++, out += p_.out_stride) __builtin_prefetch(out, 1, 3);
  }

  // c, and where gated the gate's sums: [count, 16]
  template <class Out, class In>
  void write_tile(const float* c, const float* gate, int row, int count, int column) const {
    Out* out = static_cast<Out*>(p_.out) + row * p_.out_stride;
    for (int r = 0; r < count; r++, c += kPanel, gate += kPanel, out += p_.out_stride) {
      if constexpr (std::is_same_v<Out, float> && std::is_same_v<In, float>) {
        if (p_.gated) {
          write_gated_row(p_, gate, c, column, out);
          continue;
        }
      }
      write_row(c, static_cast<const In*>(p_.bias), column, p_.out_features, out);
    }
  }

  const Product& p_;
  const PackedPlan& plan_;
  const float* a_;
};

// For more than kFewRows rows.
inline const char* packed_linear(const Product& p) {
  const PackedPlan plan(p);
  float* packed = static_cast<float*>(shared_scratch(int64_t{p.num_tokens} * p.in_features * sizeof(float)));
  return with_float_type(p.dtype, [&](auto in) -> const char* {
    using In = decltype(in);
    pack_input<In>(p, plan.tiles, packed);
    return with_float_type(p.weight_dtype, [&](auto w) -> const char* {
      const PackedUnit<decltype(w)> unit(p, plan, packed);
      if (p.out_dtype == DType::kF32) {
        parallel_for(plan.num_units(), [&](int64_t i, int) { unit.template run<float, In>(i); });
      } else if (p.out_dtype == p.dtype) {
        parallel_for(plan.num_units(), [&](int64_t i, int) { unit.template run<In, In>(i); });
      } else {
        return "linear's output must have the input's type or fp32";
      }
      return nullptr;
    });
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
