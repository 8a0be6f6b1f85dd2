// out = input * weight^T + bias with weights of 8 bits and the input rounded to 16.
//
// A unit of work is some panels times a block of row tiles. Of the panels, a few at a time see all the tiles pass by, group of
// k by group: a tile's group stays in the first-level cache for all of them, their own group in the second. Meanwhile what is
// multiplied next comes near, evenly over the tiles, for memory is as slow as the products of some 40 rows.
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../../layers/cpu/activations.h"
#include "w8a16_tile.h"
#if defined(PE_SIMD_AMX)
#include "w8a16_tile_amx.h"
#endif

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kRowBlockBytes = 768 * 1024;  // records of a unit's rows
constexpr int64_t kSerialLimit = 16 * 1024;     // values; below, waking threads costs more than rounding them
constexpr int64_t kUnitProducts = 32 << 20;     // a unit of work has about so many at least
constexpr int kUnitsPerThread = 8;              // and there are about so many for each thread
constexpr int kPanels = 4;                      // at a time
constexpr int kStepLines = kW8A16StepBytes / 64;
constexpr int kFetchAhead = 16 * 1024;  // bytes, of weights that are read in one stream
constexpr int kWriteAhead = 8;          // rows

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(PE_SIMD_AMX)
// One or two rows are too little for a tile of weights to be loaded for them.
constexpr int kVectorTokens = 2;
int max_tile_rows(int num_tokens) { return num_tokens > kVectorTokens ? kW8A16TileRows : kW8A16VectorRows; }
#else
constexpr int kVectorTokens = INT32_MAX;
int max_tile_rows(int) { return kW8A16VectorRows; }
#endif

// All row tiles have the same number of rows, the last rows of the last one may be padding.
struct Plan {
  int num_tokens, tile_rows, num_tiles;
  int block_tiles, num_blocks;             // row tiles of a unit of work
  int num_steps, num_groups, group_steps;  // of k
  int num_panels, unit_panels, num_panel_units;

  explicit Plan(const W8A16LinearParams& p) : num_tokens(p.num_tokens) {
    num_tiles = static_cast<int>(ceil_div(num_tokens, max_tile_rows(num_tokens)));
    tile_rows = static_cast<int>(ceil_div(num_tokens, num_tiles));
    num_tiles = static_cast<int>(ceil_div(num_tokens, tile_rows));
    num_steps = w8a16_steps(p.in_features);
    num_groups = w8a16_groups(p.in_features);
    group_steps = w8a16_group_steps(p.in_features);
    num_blocks = static_cast<int>(ceil_div(num_tiles, max_of(1, kRowBlockBytes / max_of(1, tile_bytes()))));
    block_tiles = static_cast<int>(ceil_div(num_tiles, num_blocks));
    num_blocks = static_cast<int>(ceil_div(num_tiles, block_tiles));
    num_panels = static_cast<int>(ceil_div(p.out_features, kW8A16Panel)) * (p.gated ? 2 : 1);
    const int64_t products = int64_t{block_tiles} * tile_rows * p.in_features * kW8A16Panel;
    const int64_t enough = ceil_div(kUnitProducts, max_of(1, products));
    const int64_t even = ceil_div(int64_t{num_panels} * num_blocks, int64_t{kUnitsPerThread} * get_num_threads());
    unit_panels = static_cast<int>(min_of(num_panels, min_of(enough, even)));
    const int together = num_panels >= kPanels ? kPanels : p.gated ? 2 : 1;
    unit_panels = static_cast<int>(ceil_div(unit_panels, together)) * together;
    num_panel_units = static_cast<int>(ceil_div(num_panels, unit_panels));
  }
  int64_t tile_bytes() const { return w8a16_record_bytes(tile_rows) * num_steps; }
  bool in_vectors() const { return num_tokens <= kVectorTokens; }
  int64_t num_units() const { return int64_t{num_panel_units} * num_blocks; }
  int real_rows(int tile) const { return static_cast<int>(min_of(tile_rows, num_tokens - int64_t{tile} * tile_rows)); }
};

// Copied to each thread: see run_restartable_tiles.
template <class In, class Out>
class Multiplication {
 public:
  Multiplication(const W8A16LinearParams& p, const Plan& plan, void* memory)
      : p_(p),
        plan_(plan),
        row_scales_(static_cast<float*>(memory)),
        records_(static_cast<uint8_t*>(memory) + ceil_div(p.num_tokens * sizeof(float), 64) * 64) {}

  static int64_t bytes(const Plan& plan) {
    return ceil_div(plan.num_tokens * sizeof(float), 64) * 64 + plan.tile_bytes() * plan.num_tiles;
  }

  void quantize() const {
    const int bias = plan_.in_vectors() ? kVectorHighBias : 0;
    const auto quantize_tile = [&](int64_t tile, int) {
      const int first = static_cast<int>(tile) * plan_.tile_rows, rows = plan_.real_rows(static_cast<int>(tile));
      uint8_t* records = records_ + tile * plan_.tile_bytes();
      if (rows < plan_.tile_rows) memset(records, 0, static_cast<size_t>(plan_.tile_bytes()));
      for (int r = 0; r < rows; r++) {
        const In* x = static_cast<const In*>(p_.input) + (first + r) * p_.input_stride;
        row_scales_[first + r] = quantize_row_16(x, p_.in_features, r, plan_.tile_rows, bias, records);
      }
    };
    if (int64_t{p_.num_tokens} * p_.in_features <= kSerialLimit) {
      for (int tile = 0; tile < plan_.num_tiles; tile++) quantize_tile(tile, 0);
    } else {
      parallel_for(plan_.num_tiles, quantize_tile);
    }
  }

  void run(int64_t unit, TileGuard& guard) const {
#if defined(PE_SIMD_AMX)
    if (!plan_.in_vectors()) {
      W8A16TileProducts products(plan_.tile_rows);
      run_panels(unit, guard, [&](const W8A16TileArgs& args) { products.run(args); }, [&] { products.finish(); });
      return products.release();
    }
#endif
    run_panels(unit, guard, [](const W8A16TileArgs& args) { W8A16VectorProducts::run(args); }, [] {});
  }

 private:
  static constexpr int64_t kSumsLd = kPanels * kW8A16Panel;

  // Returns early where another thread took the unit over.
  template <class Multiply, class Finish>
  void run_panels(int64_t unit, TileGuard& guard, const Multiply& multiply, const Finish& finish) const {
    const int block = static_cast<int>(unit / plan_.num_panel_units), part = static_cast<int>(unit % plan_.num_panel_units);
    const int first_tile = block * plan_.block_tiles;
    const int end_tile = static_cast<int>(min_of(plan_.num_tiles, int64_t{first_tile} + plan_.block_tiles));
    const int end_panel = static_cast<int>(min_of(plan_.num_panels, int64_t{part + 1} * plan_.unit_panels));
    const int64_t sums_bytes = int64_t{plan_.block_tiles} * plan_.tile_rows * kSumsLd * static_cast<int64_t>(sizeof(float));
    float* sums = static_cast<float*>(thread_scratch(static_cast<size_t>(sums_bytes)));
    const Rows rows{first_tile, end_tile, sums};
    for (int panel = part * plan_.unit_panels; panel < end_panel; panel += kPanels) {
      const Panels panels{panel, static_cast<int>(min_of(end_panel, panel + kPanels)), end_panel};
      end_tile - first_tile == 1 ? multiply_tile(rows, panels, multiply) : multiply_tiles(rows, panels, multiply);
      finish();
      if (!write(rows, panels, guard)) return;
    }
  }

  // Row tiles of a unit of work, and their sums.
  struct Rows {
    int first_tile, end_tile;
    float* sums;  // [tiles * tile_rows, kSumsLd]
  };
  // Panels at a time, and the end of the unit's.
  struct Panels {
    int first, end, unit_end;
  };

  // There is little arithmetic: weights are best read in one stream.
  template <class Multiply>
  void multiply_tile(const Rows& rows, const Panels& panels, const Multiply& multiply) const {
    for (int panel = panels.first; panel < panels.end; panel++) {
      for (int group = 0; group < plan_.num_groups; group++) {
        W8A16TileArgs args = tile_args(rows.first_tile, panel, group, rows, panels);
        if (panel + 1 < panels.unit_end) {
          args.fetch = args.weight + kFetchAhead;
          args.fetch_lines = kStepLines;
        }
        multiply(args);
      }
    }
  }

  template <class Multiply>
  void multiply_tiles(const Rows& rows, const Panels& panels, const Multiply& multiply) const {
    for (int group = 0; group < plan_.num_groups; group++) {
      const bool last = group + 1 == plan_.num_groups;
      for (int tile = rows.first_tile; tile < rows.end_tile; tile++) {
        for (int panel = panels.first; panel < panels.end; panel++) {
          W8A16TileArgs args = tile_args(tile, panel, group, rows, panels);
          if (!last || panel + kPanels < panels.unit_end) {
            fetch_share(tile, rows, last ? weight(panel + kPanels, 0) : weight(panel, group + 1), &args);
          }
          multiply(args);
        }
      }
    }
  }

  const int8_t* weight(int panel, int group) const {
    return p_.weight + (int64_t{panel} * plan_.num_steps + group * plan_.group_steps) * kW8A16StepBytes;
  }

  W8A16TileArgs tile_args(int tile, int panel, int group, const Rows& rows, const Panels& panels) const {
    const int first_step = group * plan_.group_steps;
    return {records_ + tile * plan_.tile_bytes() + first_step * w8a16_record_bytes(plan_.tile_rows),
            weight(panel, group),
            p_.factors + (int64_t{panel} * plan_.num_groups + group) * kW8A16Factors,
            rows.sums + int64_t{tile - rows.first_tile} * plan_.tile_rows * kSumsLd + (panel - panels.first) * kW8A16Panel,
            kSumsLd,
            plan_.tile_rows,
            static_cast<int>(min_of(plan_.group_steps, plan_.num_steps - first_step)),
            group == 0,
            nullptr,
            0};
  }

  // A tile's part in bringing a group of a panel near.
  static void fetch_share(int tile, const Rows& rows, const int8_t* next, W8A16TileArgs* args) {
    const int turn = tile - rows.first_tile, lines = static_cast<int>(ceil_div(kStepLines, rows.end_tile - rows.first_tile));
    if (turn * lines >= kStepLines) return;
    args->fetch = next + turn * lines * args->num_steps * 64;
    args->fetch_lines = lines;
  }

  bool write(const Rows& rows, const Panels& panels, TileGuard& guard) const {
    if (!guard.begin_write()) return false;
    if (p_.gated) {
      const auto activate = [this](VecF gate, VecF up) {
        return (p_.activation == GatedActivation::kSilu ? Silu::apply(gate) : GeluTanh::apply(gate)) * up;
      };
      write_rows<true>(rows, panels, activate);
    } else {
      write_rows<false>(rows, panels, [](VecF value, VecF) { return value; });
    }
    guard.end_write();
    return true;
  }

  template <bool kGated, class Activate>
  void write_rows(const Rows& rows, const Panels& panels, const Activate& activate) const {
    constexpr int kPerOutput = kGated ? 2 : 1;
    const int column = panels.first / kPerOutput * kW8A16Panel;
    const int whole = (panels.end - panels.first) / kPerOutput * kW8A16Panel;
    const int columns = static_cast<int>(min_of(whole, p_.out_features - column));
    const In* bias = p_.bias != nullptr ? static_cast<const In*>(p_.bias) + column : nullptr;
    const int end_row = static_cast<int>(min_of(plan_.num_tokens, int64_t{rows.end_tile} * plan_.tile_rows));
    const float* sums = rows.sums;
    for (int row = rows.first_tile * plan_.tile_rows; row < end_row; row++, sums += kSumsLd) {
      Out* out = static_cast<Out*>(p_.out) + row * p_.out_stride + column;
      // Rows lie far apart, often in a page each: they are on their way before their turn.
      for (int j = 0; j < columns; j += 64 / static_cast<int>(sizeof(Out))) {
        __builtin_prefetch(out + kWriteAhead * p_.out_stride + j, 1, 3);
      }
      const VecF scale = set1(row_scales_[row]);
      for (int j = 0; j < columns; j += kLanes) {
        const float* products = sums + j / kW8A16Panel * kPerOutput * kW8A16Panel + j % kW8A16Panel;
        VecF value = load(products) * scale, up = kGated ? load(products + kW8A16Panel) * scale : value;
        if (bias != nullptr) {
          value += load_partial(bias + j, columns - j);
          if constexpr (kGated) up += load_partial(bias + p_.out_features + j, columns - j);
        }
        store_partial(out + j, activate(value, up), columns - j);
      }
    }
  }

  W8A16LinearParams p_;
  Plan plan_;
  float* row_scales_;  // [num_tokens]
  uint8_t* records_;
};

template <class In, class Out>
void multiply(const W8A16LinearParams& p) {
  const Plan plan(p);
  const Multiplication<In, Out> work(p, plan, shared_scratch(static_cast<size_t>(Multiplication<In, Out>::bytes(plan))));
  work.quantize();
  parallel_for_restartable(plan.num_units(), [work](int64_t unit, TileGuard& guard) { work.run(unit, guard); });
}

}  // namespace

const char* w8a16_linear(const W8A16LinearParams& p) {
  if (p.num_tokens == 0 || p.out_features == 0) return nullptr;
  return with_float_type(p.dtype, [&](auto in) -> const char* {
    using In = decltype(in);
    if (p.out_dtype == DType::kF32) {
      multiply<In, float>(p);
    } else if (p.out_dtype == p.dtype) {
      multiply<In, In>(p);
    } else {
      return "w8a16_linear's output must have the input's type or fp32";
    }
    return nullptr;
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
