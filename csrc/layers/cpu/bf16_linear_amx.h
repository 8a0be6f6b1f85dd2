// out = input * weight^T + bias in bf16 on AMX.
//
// A product of tiles sums 32 values of k in fp32: 16 in one chain of fma, 16 in a second, then both are added up and to what
// there was, subnormal numbers being zero (Intel's manual, TDPBF16PS). So a result's bits do not depend on the other rows.
//
// Tiles want both operands pair by pair (bf16_pairs.h). The rows are paired once for all, the panels as they come from memory:
// a block of k of a group of panels is paired beside the products of the block before it, for tiles and vectors are units of
// their own. Up to 16 rows, one tile, meet four panels at a time; more rows meet two panels, two tiles at a time, whose sums
// are stored between blocks of k where there are further tiles.
#pragma once
#include <cstring>
#include <utility>

#include "../../cpu/amx.h"
#include "../../cpu/bf16_pairs.h"
#include "../../cpu/parallel.h"
#include "linear_output.h"

namespace pyengine::cpu {
namespace PE_ISA {

struct Bf16LinearShape {
  static constexpr int kStep = 32, kHalfStep = kStep / 2;  // values of k that a product sums over, and a chain of it
  static constexpr int kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;
  static constexpr int kMaxPanels = 4;                    // of a group
  static constexpr int64_t kRowBlockBytes = 1024 * 1024;  // of a unit's rows: half of a 2 MB cache
  static constexpr int kUnitsPerThread = 8;               // enough to even out threads of different speeds
  static constexpr int64_t kSerialPairLimit = 32 * 1024;  // values; below, waking threads costs more than pairing them
  static constexpr int kBlockSteps = 2;                   // of k, whose panels are paired at a time

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
};

// All row tiles have the same number of rows; the last ones of the last tile may be padding.
struct Bf16LinearPlan : Bf16LinearShape {
  int num_tiles, tile_rows, num_steps;
  int block_tiles, num_blocks;  // row tiles of a unit of work
  int panels;                   // of a group
  int num_panels, num_groups, unit_groups, units_per_block;

  explicit Bf16LinearPlan(const LinearParams& p) {
    num_tiles = static_cast<int>(ceil_div(p.num_tokens, kTileRows));
    tile_rows = static_cast<int>(ceil_div(p.num_tokens, num_tiles));
    num_tiles = static_cast<int>(ceil_div(p.num_tokens, tile_rows));
    num_steps = static_cast<int>(ceil_div(p.in_features, kStep));
    const int64_t fit = max_of(2, kRowBlockBytes / max_of(1, tile_bytes()) / 2 * 2);
    num_blocks = static_cast<int>(ceil_div(num_tiles, fit));
    block_tiles = static_cast<int>(ceil_div(ceil_div(num_tiles, num_blocks), 2) * 2);
    num_blocks = static_cast<int>(ceil_div(num_tiles, block_tiles));
    panels = num_tiles == 1 ? kMaxPanels : 2;
    num_panels = static_cast<int>(ceil_div(p.out_features, kLinearPanel));
    num_groups = static_cast<int>(ceil_div(num_panels, panels));
    const int64_t fair = max_of(1, int64_t{num_groups} * num_blocks / (int64_t{kUnitsPerThread} * get_num_threads()));
    units_per_block = static_cast<int>(ceil_div(num_groups, fair));
    unit_groups = static_cast<int>(ceil_div(num_groups, units_per_block));
  }
  int64_t row_step_bytes() const { return int64_t{tile_rows} * kTileRowBytes; }
  int64_t tile_bytes() const { return num_steps * row_step_bytes(); }
  int64_t num_units() const { return int64_t{units_per_block} * num_blocks; }
};

inline __attribute__((always_inline)) void store_pairs(const BFloat16* first, const BFloat16* second, uint8_t* to) {
  _mm512_store_si512(to, pair_words(load_32_bytes(first), load_32_bytes(second)));
}

// The input as tiles [num_tiles, num_steps, tile_rows, 32].
inline void pair_rows(const LinearParams& p, const Bf16LinearPlan& plan, uint8_t* pairs) {
  constexpr int kStep = Bf16LinearPlan::kStep, kHalf = Bf16LinearPlan::kHalfStep;
  const auto pair_row = [&](const BFloat16* x, uint8_t* to) {
    for (int k = 0; k < p.in_features; k += kStep, to += plan.row_step_bytes()) {
      if (k + kStep <= p.in_features) {
        store_pairs(x + k, x + k + kHalf, to);
      } else {
        BFloat16 rest[kStep] = {};
        for (int i = 0; k + i < p.in_features; i++) rest[i] = x[k + i];
        store_pairs(rest, rest + kHalf, to);
      }
    }
  };
  const auto pair_tile = [&](int64_t tile, int) {
    uint8_t* to = pairs + tile * plan.tile_bytes();
    const int64_t first = tile * plan.tile_rows, rows = Bf16LinearPlan::min_of(plan.tile_rows, p.num_tokens - first);
    if (rows < plan.tile_rows) memset(to, 0, static_cast<size_t>(plan.tile_bytes()));
    for (int row = 0; row < rows; row++) {
      pair_row(static_cast<const BFloat16*>(p.input) + (first + row) * p.input_stride, to + row * plan.kTileRowBytes);
    }
  };
  if (int64_t{p.num_tokens} * p.in_features <= plan.kSerialPairLimit) {
    for (int tile = 0; tile < plan.num_tiles; tile++) pair_tile(tile, 0);
  } else {
    parallel_for(plan.num_tiles, pair_tile);
  }
}

// Pairs the panels of a range of groups, block by block, a few rows of k at a time.
class PanelPairing : Bf16LinearShape {
 public:
  // buffers: two of buffer_bytes(plan)
  PanelPairing(const LinearParams& p, const Bf16LinearPlan& plan, int first_group, int end_group, uint8_t* buffers)
      : p_(p), plan_(plan), group_(first_group), end_group_(end_group), buffers_(buffers) {
    find_block();
  }
  static int64_t buffer_bytes(const Bf16LinearPlan& plan) { return int64_t{kBlockSteps} * plan.panels * kTileBytes; }

  // Finishes the block that is being paired and begins with the next. Returns it, [kBlockSteps, panels] tiles.
  const uint8_t* next_block() {
    advance(kBlockSteps * plan_.panels * kHalfStep);
    const uint8_t* ready = buffers_ + turn_ * buffer_bytes(plan_);
    turn_ ^= 1;
    first_step_ += kBlockSteps;
    if (first_step_ >= plan_.num_steps) {
      first_step_ = 0;
      group_++;
    }
    find_block();
    return ready;
  }

  // `count` more pairs of rows of k of the block, as far as there are.
  inline __attribute__((always_inline)) void advance(int count) {
    while (count > 0 && step_ < end_step_) {
      const int end = static_cast<int>(min_of(kHalfStep, pair_ + count));
      count -= end - pair_;
      pair_until(end);
      if (pair_ < kHalfStep) return;
      pair_ = 0;
      to_ += kTileBytes;
      if (++panel_ < plan_.panels) continue;
      panel_ = 0;
      step_++;
    }
  }

 private:
  const BFloat16* panel_of(int group, int index) const {
    // Past the last panel: that one again, its result unused.
    const int64_t panel = min_of(int64_t{group} * plan_.panels + index, plan_.num_panels - 1);
    return static_cast<const BFloat16*>(p_.weight) + panel * p_.in_features * kLinearPanel;
  }

  void find_block() {
    to_ = buffers_ + turn_ * buffer_bytes(plan_);
    step_ = first_step_;
    panel_ = pair_ = 0;
    end_step_ = group_ < end_group_ ? static_cast<int>(min_of(first_step_ + kBlockSteps, plan_.num_steps)) : step_;
    if (group_ == end_group_) return;
    // The block after this one comes nearer meanwhile.
    const bool same = first_step_ + kBlockSteps < plan_.num_steps;
    const int ahead_group = same ? group_ : static_cast<int>(min_of(group_ + 1, end_group_ - 1));
    const int64_t ahead_step = same ? kBlockSteps : -first_step_;
    for (int i = 0; i < plan_.panels; i++) {
      panels_[i] = panel_of(group_, i);
      ahead_[i] = panel_of(ahead_group, i) + ahead_step * kStep * kLinearPanel;
    }
  }

  // Pairs [pair_, end) of a panel's step.
  inline __attribute__((always_inline)) void pair_until(int end) {
    const int k0 = step_ * kStep;
    const BFloat16* from = panels_[panel_] + int64_t{k0} * kLinearPanel;
    const BFloat16* ahead = ahead_[panel_] + int64_t{k0} * kLinearPanel;
    constexpr int kRow = kLinearPanel, kHalf = kHalfStep * kLinearPanel;
    if (k0 + kStep <= p_.in_features) {
      for (; pair_ < end; pair_++) {
        // One cache line holds two rows, and there are two rows to a pair.
        __builtin_prefetch(ahead + 2 * pair_ * kRow, 0, 2);
        store_pairs(from + pair_ * kRow, from + kHalf + pair_ * kRow, to_ + pair_ * kTileRowBytes);
      }
      return;
    }
    static constexpr BFloat16 kNone[kLinearPanel] = {};
    for (; pair_ < end; pair_++) {
      const auto row = [&](int k) { return k0 + k < p_.in_features ? from + k * kRow : kNone; };
      store_pairs(row(pair_), row(kHalfStep + pair_), to_ + pair_ * kTileRowBytes);
    }
  }

  const LinearParams& p_;
  const Bf16LinearPlan& plan_;
  int group_, end_group_, first_step_ = 0;  // of the block
  uint8_t* buffers_;
  int turn_ = 0;
  const BFloat16 *panels_[kMaxPanels], *ahead_[kMaxPanels];
  uint8_t* to_;                         // where the panel's step goes
  int step_, end_step_, panel_, pair_;  // what is next
};

// Sums of ROW_TILES x PANELS tiles in registers 0 .. 3; rows in 4 and 5, columns in 6 and 7.
template <int ROW_TILES, int PANELS>
class Bf16TileSums : Bf16LinearShape {
 public:
  static inline __attribute__((always_inline)) void zero() {
    each([](auto s) { zero_tile_register<decltype(s)::value>(); });
  }
  // c [ROW_TILES * tile_rows, 16 PANELS], rows ldc apart, the second row tile tile_floats further on.
  static inline __attribute__((always_inline)) void load(const float* c, int64_t ldc, int64_t tile_floats) {
    each([&](auto s) { load_tile_register<decltype(s)::value>(c + at(s, tile_floats), ldc * 4); });
  }
  static inline __attribute__((always_inline)) void store(float* c, int64_t ldc, int64_t tile_floats) {
    each([&](auto s) { store_tile_register<decltype(s)::value>(c + at(s, tile_floats), ldc * 4); });
  }
  // rows: a step's tile, the second row tile's row_tile_bytes further on; columns: [PANELS] tiles
  static inline __attribute__((always_inline)) void add_step(const uint8_t* rows, [[maybe_unused]] int64_t row_tile_bytes,
                                                             const uint8_t* columns) {
    load_tile_register<4>(rows, kTileRowBytes);
    if constexpr (ROW_TILES == 2) load_tile_register<5>(rows + row_tile_bytes, kTileRowBytes);
    add_panels(columns, std::make_integer_sequence<int, PANELS>());
  }

 private:
  static constexpr int kSums = ROW_TILES * PANELS;
  static_assert(kSums <= 4 && ROW_TILES <= 2);

  static constexpr int64_t at(int sum, int64_t tile_floats) { return sum / PANELS * tile_floats + sum % PANELS * kLinearPanel; }
  template <class Fn>
  static inline __attribute__((always_inline)) void each(const Fn& fn) {
    call_each(fn, std::make_integer_sequence<int, kSums>());
  }
  template <class Fn, int... S>
  static inline __attribute__((always_inline)) void call_each(const Fn& fn, std::integer_sequence<int, S...>) {
    (fn(std::integral_constant<int, S>()), ...);
  }
  template <int... P>
  static inline __attribute__((always_inline)) void add_panels(const uint8_t* columns, std::integer_sequence<int, P...>) {
    (add_panel<P>(columns + P * kTileBytes), ...);
  }
  template <int P>
  static inline __attribute__((always_inline)) void add_panel(const uint8_t* columns) {
    load_tile_register<6 + P % 2>(columns, kTileRowBytes);
    multiply_bf16_tiles<P, 4, 6 + P % 2>();
    if constexpr (ROW_TILES == 2) multiply_bf16_tiles<PANELS + P, 5, 6 + P % 2>();
  }
};

class Bf16LinearUnit : Bf16LinearShape {
 public:
  Bf16LinearUnit(const LinearParams& params, const Bf16LinearPlan& plan, const uint8_t* rows)
      : p_(params), plan_(plan), rows_(rows) {}

  template <class Out>
  void run(int64_t unit) const {
    const int first_group = static_cast<int>(unit % plan_.units_per_block) * plan_.unit_groups;
    const int end_group = static_cast<int>(min_of(first_group + plan_.unit_groups, plan_.num_groups));
    const int first_tile = static_cast<int>(unit / plan_.units_per_block) * plan_.block_tiles;
    const int tiles = static_cast<int>(min_of(plan_.block_tiles, plan_.num_tiles - first_tile));
    const int64_t c_bytes = int64_t{plan_.block_tiles} * plan_.tile_rows * ldc() * static_cast<int64_t>(sizeof(float));
    uint8_t* memory =
        static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(c_bytes + 2 * PanelPairing::buffer_bytes(plan_))));
    float* c = reinterpret_cast<float*>(memory);
    PanelPairing pairing(p_, plan_, first_group, end_group, memory + c_bytes);
    TileConfig config;
    for (int i = 0; i < 6; i++) config.set(i, plan_.tile_rows, kTileRowBytes);
    for (int i = 6; i < 8; i++) config.set(i, kTileRows, kTileRowBytes);
    configure_tiles(config);
    for (int group = first_group; group < end_group; group++) {
      for (int step = 0; step < plan_.num_steps; step += kBlockSteps) {
        const uint8_t* columns = pairing.next_block();
        const int steps = static_cast<int>(min_of(kBlockSteps, plan_.num_steps - step));
        multiply_block({first_tile, tiles, step, steps, columns, c}, pairing);
      }
      write<Out>(group, first_tile, tiles, c);
    }
    release_tiles();
  }

 private:
  static constexpr int kWriteAhead = 8;  // rows

  // A block of k of a group's panels, for a unit's row tiles.
  struct Block {
    int first_tile, tiles, first_step, steps;
    const uint8_t* columns;  // [steps, panels] tiles
    float* c;                // [tiles * tile_rows, ldc]
  };
  int64_t ldc() const { return int64_t{plan_.panels} * kLinearPanel; }

  void multiply_block(const Block& block, PanelPairing& pairing) const {
    // The next block's pairs, evenly over this one's steps.
    const int64_t calls = int64_t{(block.tiles + 1) / 2} * block.steps;
    const int share = static_cast<int>(ceil_div(int64_t{kBlockSteps} * plan_.panels * kHalfStep, calls));
    if (plan_.panels == kMaxPanels) return multiply_tiles<1, kMaxPanels>(block, 0, pairing, share);
    int tile = 0;
    for (; tile + 2 <= block.tiles; tile += 2) multiply_tiles<2, 2>(block, tile, pairing, share);
    if (tile < block.tiles) multiply_tiles<1, 2>(block, tile, pairing, share);
  }

  template <int ROW_TILES, int PANELS>
  void multiply_tiles(const Block& block, int tile, PanelPairing& pairing, int share) const {
    using Sums = Bf16TileSums<ROW_TILES, PANELS>;
    const int64_t tile_floats = plan_.tile_rows * ldc();
    float* c = block.c + tile * tile_floats;
    // A unit's only tiles stay in the registers from its first block of k to its last.
    const bool only = block.tiles <= ROW_TILES, last = block.first_step + block.steps == plan_.num_steps;
    if (block.first_step == 0) {
      Sums::zero();
    } else if (!only) {
      Sums::load(c, ldc(), tile_floats);
    }
    const uint8_t* rows = rows_ + (block.first_tile + tile) * plan_.tile_bytes() + block.first_step * plan_.row_step_bytes();
    for (int step = 0; step < block.steps; step++, rows += plan_.row_step_bytes()) {
      Sums::add_step(rows, plan_.tile_bytes(), block.columns + step * PANELS * kTileBytes);
      pairing.advance(share);
    }
    if (last || !only) Sums::store(c, ldc(), tile_floats);
  }

  template <class Out>
  void write(int group, int first_tile, int tiles, const float* c) const {
    const int64_t first_row = int64_t{first_tile} * plan_.tile_rows;
    const int64_t rows = min_of(int64_t{tiles} * plan_.tile_rows, p_.num_tokens - first_row);
    const int first_column = group * plan_.panels * kLinearPanel;
    const int columns = static_cast<int>(min_of(ldc(), p_.out_features - first_column));
    Out* out = static_cast<Out*>(p_.out) + first_row * p_.out_stride;
    for (int64_t row = 0; row < rows; row++, out += p_.out_stride, c += ldc()) {
      // Rows lie far apart, often in a page each: they are on their way before their turn.
      const Out* ahead = out + kWriteAhead * p_.out_stride + first_column;
      for (int j = 0; j < columns; j += 64 / static_cast<int>(sizeof(Out))) __builtin_prefetch(ahead + j, 1, 3);
      for (int j = 0; j < columns; j += kLinearPanel) {
        write_row(c + j, static_cast<const BFloat16*>(p_.bias), first_column + j, p_.out_features, out);
      }
    }
  }

  const LinearParams& p_;
  const Bf16LinearPlan& plan_;
  const uint8_t* rows_;  // see pair_rows
};

// Input and weight of bf16; the output of bf16 or fp32.
inline const char* bf16_linear(const LinearParams& p) {
  const Bf16LinearPlan plan(p);
  uint8_t* rows = static_cast<uint8_t*>(shared_scratch(static_cast<size_t>(plan.num_tiles * plan.tile_bytes())));
  pair_rows(p, plan, rows);
  const Bf16LinearUnit unit(p, plan, rows);
  switch (p.out_dtype) {
    case DType::kF32:
      parallel_for(plan.num_units(), [&](int64_t i, int) { unit.run<float>(i); });
      return nullptr;
    case DType::kBF16:
      parallel_for(plan.num_units(), [&](int64_t i, int) { unit.run<BFloat16>(i); });
      return nullptr;
    default:
      return "linear's output must have the input's type or fp32";
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
