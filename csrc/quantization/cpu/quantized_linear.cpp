// out = input * weight^T + bias with a packed quantised weight and the input rounded to int8.
//
// Rows are cut into even tiles and quantised into records; one unit of work is a group of panels times a block of row tiles
// that stays in the second-level cache while the panels pass by. AMX and AVX2 unpack a panel once for all row tiles of the
// block, unless there are too few.
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../../layers/cpu/activations.h"
#include "quantized_tile.h"
#if defined(PE_SIMD_AMX)
#include "quantized_tile_amx.h"
#elif defined(PE_SIMD_AVX2)
#include "quantized_tile_avx2.h"
#endif

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kRowBlockBytes = 192 * 1024;  // records that a unit of work walks for each panel
constexpr int64_t kSerialLimit = 16 * 1024;     // values; below, waking threads costs more than quantising
// A unit of work has so many products at least, or, with few rows, so many panels, which memory gives in one stream, unless
// they are too little to wake a thread for.
constexpr int64_t kUnitProducts = 1024 * 1024, kFewestProducts = 128 * 1024;
constexpr int kUnitPanels = 8;
constexpr int kUnitsPerThread = 6;  // at most, apart from row blocks

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(PE_SIMD_AMX) || defined(PE_SIMD_AVX2)
#define PE_UNPACKED_TILES 1
constexpr bool kHasUnpacked = true;
#else
#define PE_UNPACKED_TILES 0
constexpr bool kHasUnpacked = false;
constexpr int kUnpackedRows = 0, kUnpackedRowStep = 0;  // never used
template <class F>
constexpr int kUnpackMinRows = 0;
template <class F>
using RowValue = int8_t;
#endif

// How the rows and columns are cut. Tiles of AMX have a multiple of kUnpackedRowStep rows, the last of which may be padding.
struct Plan {
  bool unpacked;
  int64_t row_bytes;  // of a row's records
  int num_tokens, padded_rows;
  int num_tiles, rows, larger, step;         // the first `larger` row tiles have rows + step rows, the others `rows`
  int block_tiles, num_blocks;               // row tiles of a unit of work
  int num_panels, group_panels, num_groups;  // gated: whole pairs of panels in a group

  template <class F>
  Plan(const QuantizedLinearParams& p, F)
      : unpacked(kHasUnpacked && p.num_tokens >= kUnpackMinRows<F>),
        row_bytes((unpacked ? record_bytes<F, RowValue<F>>(1) : record_bytes<F>(1)) * (p.in_features / kSubBlock)),
        num_tokens(p.num_tokens),
        step(unpacked ? kUnpackedRowStep : 1) {
    const int units = static_cast<int>(ceil_div(num_tokens, step));
    padded_rows = units * step;
    num_tiles = static_cast<int>(ceil_div(padded_rows, unpacked ? kUnpackedRows : kMaxRows));
    rows = units / num_tiles * step;
    larger = units % num_tiles;
    const int64_t fit = max_of(1, kRowBlockBytes / max_of(1, row_bytes * max_rows()));
    num_blocks = static_cast<int>(ceil_div(num_tiles, fit));
    block_tiles = static_cast<int>(ceil_div(num_tiles, num_blocks));
    const int together = p.gated ? 2 : 1;
    num_panels = together * static_cast<int>(ceil_div(p.out_features, kQuantPanel));
    const int64_t panel_products = max_of(1, ceil_div(num_tokens, num_blocks) * p.in_features * kQuantPanel);
    const int64_t few_rows = max_of(kUnitPanels, ceil_div(kFewestProducts, panel_products));
    const int64_t enough = min_of(ceil_div(kUnitProducts, panel_products), few_rows);
    const int64_t threads = get_num_threads(), most = ceil_div(kUnitsPerThread * threads, num_blocks);
    int64_t wanted = min_of(num_panels / enough, most);
    // As many for each thread, or one of them waits for another.
    wanted = wanted > 1 ? ceil_div(wanted, threads) * threads : 1;
    group_panels = together * static_cast<int>(ceil_div(num_panels / together, wanted));
    num_groups = static_cast<int>(ceil_div(num_panels, group_panels));
  }
  int max_rows() const { return rows + (larger > 0 ? step : 0); }
  int rows_of(int tile) const { return rows + (tile < larger ? step : 0); }
  int first_row(int tile) const { return tile * rows + (tile < larger ? tile : larger) * step; }
  // Without padding.
  int real_rows(int tile) const { return static_cast<int>(min_of(rows_of(tile), num_tokens - first_row(tile))); }
};

template <class F, int R = 1>
void run_tile(int rows, const QuantizedTileArgs& args) {
  if constexpr (R < kMaxRows) {
    if (rows > R) return run_tile<F, R + 1>(rows, args);
  }
#if defined(PE_SIMD_AVX2)
  if constexpr (R > kFewRows && !kWidened<F>) return PackedTile<F, R>::run(args);
#endif
  QuantizedTile<F>::template run<R>(args);
}

#if PE_UNPACKED_TILES
template <class F, int R = kUnpackedRowStep>
void run_unpacked_tile(int rows, const UnpackedTileArgs& args) {
  if constexpr (R < kUnpackedRows) {
    if (rows > R) return run_unpacked_tile<F, R + kUnpackedRowStep>(rows, args);
  }
  UnpackedTile<F, R>::run(args);
}
#endif

// write(j, n) for columns j on, kLanes or the n that are left at a time.
template <class Write>
PE_ALWAYS_INLINE void for_columns(int columns, const Write& write) {
  if (columns == kQuantPanel) {  // alone, so that it is short: it is called for every few hundred products
    for (int j = 0; j < kQuantPanel; j += kLanes) write(j, kLanes);
    return;
  }
  for (int j = 0; j < columns; j += kLanes) write(j, columns - j);
}

template <class Out, class In>
PE_ALWAYS_INLINE void write_row(const float* c, const In* bias, int columns, Out* out) {
  for_columns(columns, [=](int j, int n) {
    VecF value = load(c + j);
    if (bias != nullptr) value += load_partial(bias + j, n);
    store_partial(out + j, value, n);
  });
}

// out = act(gate) * up; up_bias where there is a gate_bias.
template <class Activation, class Out, class In>
PE_ALWAYS_INLINE void write_gated_row(const float* gate, const float* up, const In* gate_bias, const In* up_bias, int columns,
                                      Out* out) {
  for_columns(columns, [=](int j, int n) {
    VecF x = load(gate + j), y = load(up + j);
    if (gate_bias != nullptr) {
      x += load_partial(gate_bias + j, n);
      y += load_partial(up_bias + j, n);
    }
    store_partial(out + j, Activation::apply(x) * y, n);
  });
}

// Brings a panel closer while row tiles of the one before keep the core busy: an equal part of it at each tile, for memory
// gives a panel at once as slowly as a few tiles take.
class NextPanel {
 public:
  NextPanel(const uint8_t* panel, int64_t bytes, int num_tiles)
      : at_(panel), end_(panel != nullptr ? panel + bytes : panel), part_(ceil_div(ceil_div(bytes, 64), num_tiles) * 64) {}

  // Of the next tile, over `num_steps`.
  PE_ALWAYS_INLINE LinesAhead part(int num_steps) {
    const uint8_t* begin = at_;
    at_ += min_of(part_, end_ - at_);
    return {begin, at_, num_steps};
  }

 private:
  const uint8_t *at_, *end_;
  int64_t part_;
};

template <class F, class In>
class Multiplication {
 public:
  Multiplication(const QuantizedLinearParams& p, const Plan& plan, uint8_t* records) : p_(p), plan_(plan), records_(records) {}

  void quantize() const { plan_.unpacked ? quantize_to<RowValue<F>>() : quantize_to<int8_t>(); }

  template <class Out>
  void run(int64_t index) const {
    const int group = static_cast<int>(index % plan_.num_groups), block = static_cast<int>(index / plan_.num_groups);
    const Unit unit = {
        group * plan_.group_panels, static_cast<int>(min_of(plan_.num_panels, int64_t{group + 1} * plan_.group_panels)),
        block * plan_.block_tiles, static_cast<int>(min_of(plan_.num_tiles, int64_t{block + 1} * plan_.block_tiles))};
#if PE_UNPACKED_TILES
    if (plan_.unpacked) return run_unpacked<Out>(unit);
#endif
    if constexpr (kPairRows > 0) {
      if (plan_.num_tokens <= kPairRows) return run_pairs<Out>(unit);
    }
    float* gates = static_cast<float*>(thread_scratch(gate_bytes(unit)));
    alignas(64) float c[kMaxRows * kQuantPanel];
    for (int panel = unit.first_panel; panel < unit.end_panel; panel++) {
      for (int tile = unit.first_tile; tile < unit.end_tile; tile++) {
        const Sums sums = sums_of<Out>(unit, panel, tile, gates, c);
        run_tile<F>(plan_.rows_of(tile), QuantizedTileArgs{panel_data(panel), tile_records(tile), num_blocks(), sums.c});
        write<Out>(sums, panel, tile);
      }
    }
  }

 private:
  struct Unit {
    int first_panel, end_panel, first_tile, end_tile;
  };

  template <class Value>
  void quantize_to() const {
    const auto quantize_tile = [&](int64_t i, int) {
      const int tile = static_cast<int>(i), first = plan_.first_row(tile);
      quantize_rows<F, Value>(static_cast<const In*>(p_.input) + first * p_.input_stride, p_.input_stride,
                              plan_.real_rows(tile), plan_.rows_of(tile), p_.in_features, tile_records(tile));
    };
    if (int64_t{p_.num_tokens} * p_.in_features <= kSerialLimit) {
      for (int tile = 0; tile < plan_.num_tiles; tile++) quantize_tile(tile, 0);
    } else {
      parallel_for(plan_.num_tiles, quantize_tile);
    }
  }

  // The unit's first half of panels, and with each of them one of the second half.
  template <class Out>
  void run_pairs(const Unit& unit) const {
    alignas(64) float c[2][kPairRows * kQuantPanel], gates[2][kPairRows * kQuantPanel];
    const int together = p_.gated ? 2 : 1;
    const int half = static_cast<int>(ceil_div(unit.end_panel - unit.first_panel, 2 * together)) * together;
    const auto args_of = [&](int panel, const Sums& sums) {
      return QuantizedTileArgs{panel_data(panel), tile_records(0), num_blocks(), sums.c};
    };
    for (int panel = unit.first_panel; panel < unit.first_panel + half; panel++) {
      const Sums first = sums_of<Out>(unit, panel, 0, gates[0], c[0]);
      if (panel + half >= unit.end_panel) {
        run_tile<F>(plan_.rows_of(0), args_of(panel, first));
        write<Out>(first, panel, 0);
        continue;
      }
      const Sums second = sums_of<Out>(unit, panel + half, 0, gates[1], c[1]);
      QuantizedTile<F>::template run_pair<kPairRows>(args_of(panel, first), args_of(panel + half, second));
      write<Out>(first, panel, 0);
      write<Out>(second, panel + half, 0);
    }
  }

#if PE_UNPACKED_TILES
  template <class Out>
  void run_unpacked(const Unit& unit) const {
    const int num_sub_blocks = p_.in_features / kSubBlock;
    const int64_t unpacked_bytes = int64_t{num_sub_blocks} * UnpackedSubBlock<F>::kBytes;
    uint8_t* unpacked = static_cast<uint8_t*>(thread_scratch(unpacked_bytes + gate_bytes(unit)));
    float* gates = reinterpret_cast<float*>(unpacked + unpacked_bytes);
    alignas(64) float c[kUnpackedRows * kQuantPanel];
#if defined(PE_SIMD_AMX)
    configure_tiles(amx_tile_config<F>(plan_.max_rows()));
#endif
    for (int panel = unit.first_panel; panel < unit.end_panel; panel++) {
      PanelUnpacker<F>::run(panel_data(panel), num_blocks(), unpacked);
      NextPanel next(panel + 1 < plan_.num_panels ? panel_data(panel + 1) : nullptr, num_blocks() * F::kTileBytes,
                     unit.end_tile - unit.first_tile);
      for (int tile = unit.first_tile; tile < unit.end_tile; tile++) {
        const Sums sums = sums_of<Out>(unit, panel, tile, gates, c);
        run_unpacked_tile<F>(plan_.rows_of(tile),
                             UnpackedTileArgs{unpacked, tile_records(tile), num_sub_blocks, sums.c, next.part(num_sub_blocks)});
        write<Out>(sums, panel, tile);
      }
    }
#if defined(PE_SIMD_AMX)
    release_tiles();
#endif
  }
#endif

  int num_blocks() const { return p_.in_features / F::kBlockSize; }
  const uint8_t* panel_data(int panel) const {
    return static_cast<const uint8_t*>(p_.weight) + int64_t{panel} * num_blocks() * F::kTileBytes;
  }
  uint8_t* tile_records(int tile) const { return records_ + plan_.row_bytes * plan_.first_row(tile); }

  // Where a tile's sums go: gates wait, [rows of the unit, 16], for those that they gate.
  struct Sums {
    float* c;
    const float* gate;  // of the same rows, or null
    bool last;          // to be written: no gates
  };
  size_t gate_bytes(const Unit& unit) const {
    const int rows = unit.end_tile > unit.first_tile ? (unit.end_tile - unit.first_tile) * plan_.max_rows() : 0;
    return p_.gated ? rows * kQuantPanel * sizeof(float) : 0;
  }

  // Rows of the result lie far apart, often in a page each: they are on their way while their tile is computed.
  template <class Out>
  Sums sums_of(const Unit& unit, int panel, int tile, float* gates, float* c) const {
    const int first_row = plan_.first_row(tile);
    float* gate = p_.gated ? gates + int64_t{first_row - plan_.first_row(unit.first_tile)} * kQuantPanel : nullptr;
    if (p_.gated && panel % 2 == 0) return {gate, nullptr, false};
    const Out* out = static_cast<const Out*>(p_.out) + first_row * p_.out_stride + column_of(panel);
    for (int r = 0; r < plan_.real_rows(tile); r++) __builtin_prefetch(out + r * p_.out_stride, 1, 3);
    return {c, gate, true};
  }
  int column_of(int panel) const { return (p_.gated ? panel / 2 : panel) * kQuantPanel; }

  template <class Out>
  void write(const Sums& sums, int panel, int tile) const {
    if (!sums.last) return;
    if (sums.gate == nullptr) {
      write_rows<Out>(panel, tile, [&](int r, const In* bias, int columns, Out* out) {
        write_row(sums.c + r * kQuantPanel, bias, columns, out);
      });
    } else if (p_.activation == GatedActivation::kSilu) {
      write_gated<Silu, Out>(sums, panel, tile);
    } else {
      write_gated<GeluTanh, Out>(sums, panel, tile);
    }
  }
  template <class Activation, class Out>
  void write_gated(const Sums& sums, int panel, int tile) const {
    write_rows<Out>(panel, tile, [&](int r, const In* bias, int columns, Out* out) {
      const In* up_bias = bias != nullptr ? bias + p_.out_features : nullptr;
      write_gated_row<Activation>(sums.gate + r * kQuantPanel, sums.c + r * kQuantPanel, bias, up_bias, columns, out);
    });
  }
  // write(row of the tile, bias, columns, out) for each of its rows.
  template <class Out, class Write>
  PE_ALWAYS_INLINE void write_rows(int panel, int tile, const Write& write) const {
    const int rows = plan_.real_rows(tile), column = column_of(panel);
    const int columns = static_cast<int>(min_of(kQuantPanel, p_.out_features - column));
    const In* bias = p_.bias != nullptr ? static_cast<const In*>(p_.bias) + column : nullptr;
    Out* out = static_cast<Out*>(p_.out) + plan_.first_row(tile) * p_.out_stride + column;
    for (int r = 0; r < rows; r++) write(r, bias, columns, out + r * p_.out_stride);
  }

  const QuantizedLinearParams& p_;
  const Plan& plan_;
  uint8_t* records_;
};

template <class F, class In>
const char* multiply(const QuantizedLinearParams& p) {
  const Plan plan(p, F{});
  // A register of AMX is loaded with the largest tile's rows, past the end of a smaller one.
  const int64_t bytes = plan.row_bytes * plan.padded_rows + kUnpackedRows * kSubBlock;
  const Multiplication<F, In> work(p, plan, static_cast<uint8_t*>(shared_scratch(bytes)));
  work.quantize();
  const int64_t units = int64_t{plan.num_groups} * plan.num_blocks;
  if (p.out_dtype == DType::kF32) {
    parallel_for(units, [&](int64_t unit, int) { work.template run<float>(unit); });
  } else if (p.out_dtype == p.dtype) {
    parallel_for(units, [&](int64_t unit, int) { work.template run<In>(unit); });
  } else {
    return "quantized_linear's output must have the input's type or fp32";
  }
  return nullptr;
}

}  // namespace

const char* quantized_linear(const QuantizedLinearParams& p) {
  if (p.num_tokens == 0 || p.out_features == 0) return nullptr;
  return with_format(p.format, [&](auto format) {
    using F = decltype(format);
    return with_float_type(p.dtype, [&](auto in) { return multiply<F, decltype(in)>(p); });
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
