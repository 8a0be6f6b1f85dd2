// out = input * weight^T + bias on packed panels of 16 output columns.
//
// Rows are cut into even tiles of at most kMaxRows and packed as fp32; one unit of work is a group of panels times a block of
// row tiles. k is walked in blocks so that a group's panels stay in the first-level cache while the row tiles pass by.
#include <type_traits>

#include "../../cpu/gemm_tile.h"
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../params.h"
#if defined(PE_SIMD_AMX)
#include "bf16_linear_amx.h"
#elif defined(PE_SIMD_AVX2)
#include "packed_linear_avx2.h"
#endif
#include "linear_output.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

static_assert(kPanel == kLinearPanel, "the packed layout's panel");
constexpr int kDepthBlock = 128;           // of k
constexpr int kBlockTiles = 12;            // row tiles of a unit of work, at most: their results stay in the first-level cache
constexpr int64_t kRowBlock = 128 * 1024;  // floats of input that a unit of work walks: a quarter of a 2 MB cache
constexpr int kUnitsPerThread = 8;         // enough to even out threads of different speeds
constexpr int kStreamAhead = 4096;         // bytes that a single row tile fetches of each panel ahead of its products
constexpr int64_t kSerialWidenLimit = 64 * 1024;  // floats; below, waking threads costs more than widening

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the rows and columns are cut.
struct LinearPlan {
  RowTiles tiles;
  int block_tiles, num_blocks;  // row tiles of a unit of work
  int panels_per_group, num_panels, num_groups;
  int written_groups;                // that are written together: two where a gate and what it gates are in two groups
  int unit_groups, units_per_block;  // groups of a unit of work, a multiple of written_groups
  int depth_block;                   // of k; everything when there is a single row tile, which has nothing to reuse

  explicit LinearPlan(const Product& p) : tiles(p.num_tokens) {
    depth_block = tiles.count == 1 ? p.in_features : kDepthBlock;
    const int64_t fit = kRowBlock / (int64_t{p.in_features} * tiles.max_rows());
    num_blocks = static_cast<int>(ceil_div(tiles.count, fit < 2 ? 2 : fit < kBlockTiles ? fit : kBlockTiles));
    block_tiles = static_cast<int>(ceil_div(tiles.count, num_blocks));
    panels_per_group = panels_for(tiles.max_rows());
    num_panels = static_cast<int>(ceil_div(p.out_features, kPanel)) * p.panels_per_output();
    num_groups = static_cast<int>(ceil_div(num_panels, panels_per_group));
    written_groups = p.gated && panels_per_group % 2 != 0 ? 2 : 1;
    const int64_t written = num_groups / written_groups, fair = written * num_blocks / (kUnitsPerThread * get_num_threads());
    units_per_block = static_cast<int>(ceil_div(written, fair < 1 ? 1 : fair));
    unit_groups = static_cast<int>(ceil_div(written, units_per_block)) * written_groups;
  }
  int written_panels() const { return written_groups * panels_per_group; }
};

// input [num_tokens, in_features] as fp32, dense.
template <class T>
const char* widen_input(const Product& p, float* wide) {
  const auto widen_row = [&](int64_t row, int) {
    const T* from = static_cast<const T*>(p.input) + row * p.input_stride;
    float* to = wide + row * p.in_features;
    int k = 0;
    for (; k + kLanes <= p.in_features; k += kLanes) store(to + k, load(from + k));
    for (; k < p.in_features; k++) to[k] = to_float(from[k]);
  };
  if (int64_t{p.num_tokens} * p.in_features <= kSerialWidenLimit) {
    for (int row = 0; row < p.num_tokens; row++) widen_row(row, 0);
  } else {
    parallel_for(p.num_tokens, widen_row);
  }
  return nullptr;
}

template <class Out, class In>
void write_block(const Product& p, const float* c, int ldc, int first_row, int rows, int first_panel, int panels) {
  Out* out = static_cast<Out*>(p.out) + first_row * p.out_stride;
  for (int r = 0; r < rows; r++) {
    if constexpr (std::is_same_v<Out, float> && std::is_same_v<In, float>) {
      for (int i = 0; p.gated && i < panels; i += 2) {
        const float* gate = c + r * ldc + i * kPanel;
        write_gated_row(p, gate, gate + kPanel, (first_panel + i) / 2 * kPanel, out + r * p.out_stride);
      }
    }
    for (int i = 0; !p.gated && i < panels; i++) {
      write_row(c + r * ldc + i * kPanel, static_cast<const In*>(p.bias), (first_panel + i) * kPanel, p.out_features,
                out + r * p.out_stride);
    }
  }
}

template <class W>
class LinearUnit {
 public:
  // a [num_tokens, in_features], rows lda apart
  LinearUnit(const Product& params, const LinearPlan& plan, const float* a, int64_t lda)
      : p_(params), plan_(plan), a_(a), lda_(lda) {}

  template <class Out, class In>
  void run(int64_t unit) const {
    const int first_group = static_cast<int>(unit % plan_.units_per_block) * plan_.unit_groups;
    const int end_group =
        first_group + plan_.unit_groups < plan_.num_groups ? first_group + plan_.unit_groups : plan_.num_groups;
    RowBlock rows = row_block(static_cast<int>(unit / plan_.units_per_block));
    const int ldc = plan_.written_panels() * kPanel;
    float* c = static_cast<float*>(thread_scratch((rows.count + kDepthBlock) * ldc * sizeof(float)));
    rows.wide = c + rows.count * ldc;
    for (int group = first_group; group < end_group; group += plan_.written_groups) {
      const int first_panel = group * plan_.panels_per_group, panels = plan_.num_panels - first_panel;
      rows.first_column = first_panel / p_.panels_per_output() * kPanel;
      for (int i = 0; i < plan_.written_groups; i++) {
        rows.c = c + i * plan_.panels_per_group * kPanel;
        multiply_group(first_panel + i * plan_.panels_per_group, rows, group + i + 1 < end_group);
      }
      write_block<Out, In>(p_, c, ldc, rows.first, rows.count, first_panel,
                           panels < plan_.written_panels() ? panels : plan_.written_panels());
    }
  }

 private:
  static constexpr int kMostPanels = kWidePanels > kPanels ? kWidePanels : kPanels;

  struct RowBlock {
    int first_tile, end_tile, first, count;  // rows [first, first + count)
    int first_column;
    float* c;     // [count, 16 * panels_per_group], rows 16 * written_panels apart
    float* wide;  // [panels_per_group, kDepthBlock, 16]: panels, widened
  };
  RowBlock row_block(int block) const {
    const int first_tile = block * plan_.block_tiles, end = first_tile + plan_.block_tiles;
    const int end_tile = end < plan_.tiles.count ? end : plan_.tiles.count, first = plan_.tiles.first_row(first_tile);
    return {first_tile, end_tile, first, plan_.tiles.first_row(end_tile) - first, 0, nullptr, nullptr};
  }

  // A group's panels from k0 on. Past the last panel: that one again, its result unused.
  void find_panels(int first_panel, int k0, const W** panels) const {
    for (int i = 0; i < plan_.panels_per_group; i++) {
      const int panel = first_panel + i < plan_.num_panels ? first_panel + i : plan_.num_panels - 1;
      panels[i] = static_cast<const W*>(p_.weight) + (int64_t{panel} * p_.in_features + k0) * kPanel;
    }
  }

  void multiply_group(int first_panel, const RowBlock& rows, bool more_groups) const {
    const W* panels[kMostPanels] = {};
    find_panels(first_panel, 0, panels);
    for (int k0 = 0; k0 < p_.in_features; k0 += plan_.depth_block) {
      const int k = p_.in_features - k0 < plan_.depth_block ? p_.in_features - k0 : plan_.depth_block;
      const W* next[kMostPanels] = {};
      if (k0 + k < p_.in_features) {
        find_panels(first_panel, k0 + k, next);
      } else if (more_groups) {
        find_panels(first_panel + plan_.panels_per_group, 0, next);
      }
      multiply(panels, next, rows, k0, k);
      for (int i = 0; i < plan_.panels_per_group; i++) panels[i] = next[i];
    }
  }

  // With several row tiles, half-precision panels are widened once for all of them.
  void multiply(const W* const* panels, const W* const* next, const RowBlock& rows, int k0, int k) const {
    if (sizeof(W) < sizeof(float) && rows.end_tile - rows.first_tile > 1) {
      float* wide = rows.wide;
      const float* widened[kMostPanels] = {};
      for (int i = 0; i < plan_.panels_per_group; i++, wide += kDepthBlock * kPanel) {
        for (int j = 0; j < k * kPanel; j += kLanes) store(wide + j, load(panels[i] + j));
        widened[i] = wide;
      }
      multiply_tiles(widened, next, rows, k0, k);
    } else {
      multiply_tiles(panels, next, rows, k0, k);
    }
  }

  template <class T>
  void multiply_tiles(const T* const* panels, const W* const* next, const RowBlock& rows, int k0, int k) const {
    const int ldc = plan_.written_panels() * kPanel;
    for (int tile = rows.first_tile; tile < rows.end_tile; tile++) {
      const int row = plan_.tiles.first_row(tile);
      if (k0 + k == p_.in_features) fetch_output(rows, row, plan_.tiles.rows_of(tile));
      with_tile_shape<GemmTile>(
          plan_.tiles.rows_of(tile), plan_.tiles.max_rows(),
          GemmTileArgs<T>{a_ + row * lda_ + k0, lda_, panels, kPanel, k, rows.c + (row - rows.first) * ldc, ldc, k0 > 0,
                          panels_ahead(tile, rows, panels, next)});
    }
  }

  // What a row tile fetches meanwhile: its share of the panels' next blocks or, alone, what follows in each panel.
  template <class T>
  PanelsAhead panels_ahead(int tile, const RowBlock& rows, const T* const* panels, const W* const* next) const {
    const int tiles = rows.end_tile - rows.first_tile, num_panels = plan_.panels_per_group;
    PanelsAhead ahead = {};
    ahead.stride = kPanel * static_cast<int64_t>(sizeof(W));
    if (tiles == 1) {
      // For one or two rows the loads themselves are as much as the memory gives.
      for (int i = 0; rows.count > 2 && i < num_panels && i < kMaxAhead; i++) {
        ahead.next[ahead.count++] = reinterpret_cast<const char*>(panels[i]) + kStreamAhead;
      }
    } else if (next[0] != nullptr) {
      const int share = static_cast<int>(ceil_div(num_panels, tiles));
      const int first = (tile - rows.first_tile) * share;
      for (int i = first; i < num_panels && i < first + share && ahead.count < kMaxAhead; i++) {
        ahead.next[ahead.count++] = reinterpret_cast<const char*>(next[i]);
      }
    }
    return ahead;
  }

  void fetch_output(const RowBlock& rows, int row, int count) const {
    const int64_t size = dtype_size(p_.out_dtype);
    const char* out = static_cast<const char*>(p_.out) + (row * p_.out_stride + rows.first_column) * size;
    const int64_t width = plan_.written_panels() / p_.panels_per_output() * kPanel * size;
    for (int r = 0; r < count; r++, out += p_.out_stride * size) {
      for (int64_t i = 0; i < width; i += 64) __builtin_prefetch(out + i, 1, 3);
    }
  }

  const Product& p_;
  const LinearPlan& plan_;
  const float* a_;
  int64_t lda_;
};

const char* multiply(const Product& p) {
  if (p.num_tokens == 0 || p.out_features == 0) return nullptr;
#if defined(PE_SIMD_AMX)
  if (p.dtype == DType::kBF16 && p.weight_dtype == DType::kBF16) return bf16_linear(p);
#elif defined(PE_SIMD_AVX2)
  if (p.num_tokens > kFewRows) return packed_linear(p);
#endif
  const LinearPlan plan(p);
  const float* a = static_cast<const float*>(p.input);
  int64_t lda = p.input_stride;
  if (p.dtype != DType::kF32) {
    float* wide = static_cast<float*>(shared_scratch(int64_t{p.num_tokens} * p.in_features * sizeof(float)));
    const char* error = with_float_type(p.dtype, [&](auto in) { return widen_input<decltype(in)>(p, wide); });
    if (error != nullptr) return error;
    a = wide;
    lda = p.in_features;
  }
  const int64_t units = int64_t{plan.units_per_block} * plan.num_blocks;
  return with_float_type(p.weight_dtype, [&](auto w) {
    const LinearUnit<decltype(w)> unit(p, plan, a, lda);
    return with_float_type(p.dtype, [&](auto in) -> const char* {
      using In = decltype(in);
      if (p.out_dtype == DType::kF32) {
        parallel_for(units, [&](int64_t i, int) { unit.template run<float, In>(i); });
      } else if (p.out_dtype == p.dtype) {
        parallel_for(units, [&](int64_t i, int) { unit.template run<In, In>(i); });
      } else {
        return "linear's output must have the input's type or fp32";
      }
      return nullptr;
    });
  });
}

}  // namespace

const char* linear(const LinearParams& p) { return multiply({{p, {}}, false}); }
#if !defined(PE_SIMD_AMX)
const char* gated_linear(const GatedLinearParams& p) { return multiply({p, true}); }
#endif

}  // namespace PE_ISA
}  // namespace pyengine::cpu
