// out = input * weight^T + bias on packed panels of 16 output columns.
//
// Rows are cut into even tiles of at most kMaxRows and packed as fp32; one unit of work is a group of panels times a block of
// row tiles. k is walked in blocks so that a group's panels stay in the first-level cache while the row tiles pass by.
#include "../../cpu/gemm_tile.h"
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

static_assert(kPanel == kLinearPanel, "the packed layout's panel");
constexpr int kDepthBlock = 192;                 // of k; a multiple of kChunk
constexpr int64_t kPackedRowBlock = 256 * 1024;  // floats of packed input that a unit of work walks: half of a 2 MB cache
constexpr int64_t kSerialPackLimit = 64 * 1024;  // floats; below, waking threads costs more than packing
static_assert(kDepthBlock % kChunk == 0);

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the rows and columns are cut.
struct LinearPlan {
  RowTiles tiles;
  int block_tiles, num_blocks;  // row tiles of a unit of work
  int panels_per_group, num_panels, num_groups;
  int64_t padded_k;  // packed input: a row takes this many floats

  explicit LinearPlan(const LinearParams& p) : tiles(p.num_tokens) {
    padded_k = ceil_div(p.in_features, kChunk) * kChunk;
    const int64_t fit = kPackedRowBlock / (padded_k * tiles.max_rows());
    num_blocks = static_cast<int>(ceil_div(tiles.count, fit < 2 ? 2 : fit));
    block_tiles = static_cast<int>(ceil_div(tiles.count, num_blocks));
    panels_per_group = panels_for(tiles.max_rows());
    num_panels = static_cast<int>(ceil_div(p.out_features, kPanel));
    num_groups = static_cast<int>(ceil_div(num_panels, panels_per_group));
  }
};

template <class T>
const char* pack_input(const LinearParams& p, const LinearPlan& plan, float* packed) {
  const T* input = static_cast<const T*>(p.input);
  const auto pack_tile = [&](int64_t tile, int) {
    const int first = plan.tiles.first_row(static_cast<int>(tile));
    pack_rows(input + first * p.input_stride, p.input_stride, plan.tiles.rows_of(static_cast<int>(tile)), p.in_features,
              packed + first * plan.padded_k);
  };
  if (p.num_tokens * plan.padded_k <= kSerialPackLimit) {
    for (int tile = 0; tile < plan.tiles.count; tile++) pack_tile(tile, 0);
  } else {
    parallel_for(plan.tiles.count, pack_tile);
  }
  return nullptr;
}

// One finished row of one panel: adds the bias, converts, writes columns [column, column + 16) as far as they exist.
template <class Out, class In>
void write_row(const float* c, const In* bias, int column, int out_features, Out* out) {
  for (int j = 0; j < kPanel; j += kLanes) {
    const int count = out_features - column - j;
    if (count <= 0) return;
    VecF value = load(c + j);
    if (bias != nullptr) value += load_partial(bias + column + j, count);
    store_partial(out + column + j, value, count);
  }
}

template <class Out, class In>
void write_block(const LinearParams& p, const float* c, int ldc, int first_row, int rows, int first_panel, int panels) {
  Out* out = static_cast<Out*>(p.out) + first_row * p.out_stride;
  for (int r = 0; r < rows; r++) {
    for (int i = 0; i < panels; i++) {
      write_row(c + r * ldc + i * kPanel, static_cast<const In*>(p.bias), (first_panel + i) * kPanel, p.out_features,
                out + r * p.out_stride);
    }
  }
}

template <class W>
class LinearUnit {
 public:
  LinearUnit(const LinearParams& params, const LinearPlan& plan, const float* packed)
      : p_(params), plan_(plan), packed_(packed) {}

  template <class Out, class In>
  void run(int64_t unit) const {
    const int group = static_cast<int>(unit % plan_.num_groups), block = static_cast<int>(unit / plan_.num_groups);
    const int first_tile = block * plan_.block_tiles;
    const int end = first_tile + plan_.block_tiles, end_tile = end < plan_.tiles.count ? end : plan_.tiles.count;
    const int first_row = plan_.tiles.first_row(first_tile), rows = plan_.tiles.first_row(end_tile) - first_row;
    const int ldc = plan_.panels_per_group * kPanel;
    float* c = static_cast<float*>(thread_scratch((rows * ldc + kDepthBlock * ldc) * sizeof(float)));
    float* wide = c + rows * ldc;  // [panels_per_group, kDepthBlock, 16]

    const int first_panel = group * plan_.panels_per_group;
    for (int k0 = 0; k0 < p_.in_features; k0 += kDepthBlock) {
      const int k = p_.in_features - k0 < kDepthBlock ? p_.in_features - k0 : kDepthBlock;
      const W* panels[kWidePanels > kPanels ? kWidePanels : kPanels];
      for (int i = 0; i < plan_.panels_per_group; i++) {  // past the end: the last panel again, its result unused
        const int panel = first_panel + i < plan_.num_panels ? first_panel + i : plan_.num_panels - 1;
        panels[i] = static_cast<const W*>(p_.weight) + (int64_t{panel} * p_.in_features + k0) * kPanel;
      }
      multiply(panels, first_tile, end_tile, k0, k, c, ldc, wide);
    }
    const int panels = plan_.num_panels - first_panel;
    write_block<Out, In>(p_, c, ldc, first_row, rows, first_panel,
                         panels < plan_.panels_per_group ? panels : plan_.panels_per_group);
  }

 private:
  // With several row tiles, half-precision panels are widened once for all of them.
  void multiply(const W* const* panels, int first_tile, int end_tile, int k0, int k, float* c, int ldc, float* wide) const {
    if (sizeof(W) < sizeof(float) && end_tile - first_tile > 1) {
      const float* widened[kWidePanels > kPanels ? kWidePanels : kPanels] = {};
      for (int i = 0; i < plan_.panels_per_group; i++, wide += kDepthBlock * kPanel) {
        for (int j = 0; j < k * kPanel; j += kLanes) store(wide + j, load(panels[i] + j));
        widened[i] = wide;
      }
      multiply_tiles(widened, first_tile, end_tile, k0, k, c, ldc);
    } else {
      multiply_tiles(panels, first_tile, end_tile, k0, k, c, ldc);
    }
  }

  template <class T>
  void multiply_tiles(const T* const* panels, int first_tile, int end_tile, int k0, int k, float* c, int ldc) const {
    for (int tile = first_tile; tile < end_tile; tile++) {
      const int rows = plan_.tiles.rows_of(tile);
      const float* a = packed_ + plan_.tiles.first_row(tile) * plan_.padded_k + int64_t{k0} * rows;
      with_tile_shape<GemmTile>(rows, plan_.tiles.max_rows(), GemmTileArgs<T>{a, panels, kPanel, k, c, ldc, k0 > 0});
      c += rows * ldc;
    }
  }

  const LinearParams& p_;
  const LinearPlan& plan_;
  const float* packed_;
};

}  // namespace

const char* linear(const LinearParams& p) {
  if (p.num_tokens == 0 || p.out_features == 0) return nullptr;
  const LinearPlan plan(p);
  const float* packed = static_cast<const float*>(p.input);  // one fp32 row is its own packed form
  if (p.num_tokens > 1 || p.dtype != DType::kF32) {
    float* buffer = static_cast<float*>(shared_scratch(p.num_tokens * plan.padded_k * sizeof(float)));
    const char* error = with_float_type(p.dtype, [&](auto in) { return pack_input<decltype(in)>(p, plan, buffer); });
    if (error != nullptr) return error;
    packed = buffer;
  }
  const int64_t units = int64_t{plan.num_groups} * plan.num_blocks;
  return with_float_type(p.weight_dtype, [&](auto w) {
    const LinearUnit<decltype(w)> unit(p, plan, packed);
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

}  // namespace PE_ISA
}  // namespace pyengine::cpu
