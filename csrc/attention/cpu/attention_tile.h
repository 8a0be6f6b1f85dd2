// One tile of attention in fp32, the keys in blocks. Any cache type.
#pragma once
#include "key_block.h"
#include "softmax_rows.h"
#include "tile_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

// Row tiles that go from keys to values together: their logits, and a panel of keys or values, stay in the first-level cache.
constexpr int kLogitTiles = 4;
constexpr bool kWeighsInPowersOf2 = kLanes == 8;  // else in e^x, block by block
constexpr int kLogitRows = kLogitTiles * kMaxRows;
constexpr int kWidePanelColumns = kPanel * (kWidePanels > kPanels ? kWidePanels : kPanels);

// A tile's working memory, cut from one allocation.
struct TileMemory {
  float* query;   // [rows, ld_value], fp32
  float* logits;  // [kLogitRows, kKeyBlock]
  float* keys;    // [kGroups, head_dim, 16]
  float* values;  // [ld_value / 16, kKeyBlock, 16]
  float* states;  // two of [rows]

  static int64_t floats(const TileShape& shape, int head_dim) {
    return int64_t{shape.max_rows} * shape.ld_value + int64_t{kKeyBlock} * (kLogitRows + head_dim + shape.ld_value) +
           2 * shape.state_floats(shape.max_rows);
  }
  TileMemory(float* memory, const TileShape& shape, int head_dim)
      : query(memory),
        logits(query + shape.max_rows * shape.ld_value),
        keys(logits + kLogitRows * kKeyBlock),
        values(keys + head_dim * kKeyBlock),
        states(values + kKeyBlock * shape.ld_value) {}
};

// Products [rows, 16 NP] of query rows and NP groups of keys, as GemmTile; meanwhile the same tokens' values are fetched.
template <class T>
struct KeyProductArgs {
  GemmTileArgs<T> gemm;
  const T* const* values;  // [panels]
};

struct KeyProduct {
  template <int MR, int NP, class T>
  static void run(const KeyProductArgs<T>& args) {
    Accumulators<MR, NP * kPanelVecs> acc;
    zero_tile(acc);
    const T* b[NP];
    Prefetch<NP, 1> ahead;
    ahead.stride = kPanel * sizeof(T);
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) {
      b[p] = args.gemm.panels[p];
      ahead.next[p] = reinterpret_cast<const char*>(args.values[p]);
    }
    accumulate<MR, NP>(acc, StridedRows<MR>(args.gemm.a, args.gemm.lda), b, args.gemm.ldb, args.gemm.k, ahead);
    store_tile(acc, args.gemm.c, args.gemm.ldc);
  }
};

// out [rows, 16 NP] += weights [rows, kKeyBlock] * values, over tokens [begin, end) of a block.
template <class T>
struct WeightedSumArgs {
  const float* weights;
  const KeyBlock<T>* block;
  int begin, end;
  const int* panels;  // [panels], of 16 columns each
  float* out;
  int ld_out;
};

// With AHEAD, the next block's keys are fetched meanwhile: for decodes, which wait for memory.
template <bool AHEAD>
struct WeightedSum {
  template <int MR, int NP, class T>
  static void run(const WeightedSumArgs<T>& args) {
    Accumulators<MR, NP * kPanelVecs> acc;
    load_tile(acc, args.out, args.ld_out);
    for (int i = 0; i < args.block->num_runs; i++) {
      const ValueRun<T>& values = args.block->runs[i];
      const int begin = values.offset > args.begin ? values.offset : args.begin;
      const int run_end = values.offset + values.count, end = run_end < args.end ? run_end : args.end;
      if (begin >= end) continue;
      const T* b[NP];
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++)
        b[p] = values.values + (begin - values.offset) * args.block->value_stride + args.panels[p] * args.block->panel_stride;
      accumulate<MR, NP>(acc, FixedRows<kKeyBlock>{args.weights + begin}, b, args.block->value_stride, end - begin,
                         ahead<NP>(args, begin / kPanel));
    }
    store_tile(acc, args.out, args.ld_out);
  }

 private:
  // 16 steps of this many lines fetch what the panels' share of a dense key page is.
  template <int NP, class T>
  static PE_ALWAYS_INLINE auto ahead(const WeightedSumArgs<T>& args, int group) {
    if constexpr (AHEAD) {
      constexpr int kLines = NP * sizeof(T) < 4 ? 1 : NP * sizeof(T) / 4;
      const T* next = args.block->next_keys[group];
      if (next == nullptr) return Prefetch<1, kLines>{{reinterpret_cast<const char*>(args.block->groups[group])}, 0};
      return Prefetch<1, kLines>{{reinterpret_cast<const char*>(next + args.panels[0] * kPanel * kPanel)}, 64 * kLines};
    } else {
      return NoPrefetch();
    }
  }
};

template <class T>
class TileRunner {
 public:
  static constexpr int kTileRows = 96;                   // query rows of a prefill tile
  static constexpr int kOutColumns = kWidePanelColumns;  // a state's rows are multiples of it
  static int64_t memory_floats(const TileShape& shape, int head_dim) { return TileMemory::floats(shape, head_dim); }

  TileRunner(const PagedAttentionParams& p, const TileShape& shape, const AttentionTile& tile, const LaneIndices& indices,
             float* memory)
      : p_(p),
        shape_(shape),
        tile_(tile),
        rows_(p, shape, tile),
        indices_(indices),
        memory_(memory, shape, p.head_dim),
        pages_(p, tile.seq, tile.kv_head),
        num_rows_(rows_.count()),
        row_tiles_(num_rows_),
        options_{p.scale, p.logit_softcap, p.alibi_slopes != nullptr},
        form_(options_) {
    with_float_type(p.dtype, [&](auto type) {
      widen_query<decltype(type)>();
      return nullptr;
    });
  }

  const TileRows& rows() const { return rows_; }
  SoftmaxState scratch_state(int i) const {
    return shape_.state(memory_.states + i * shape_.state_floats(shape_.max_rows), num_rows_);
  }

  // The state of all rows after partition `index` alone. What to fetch ahead is seen from the tile.
  void run_partition(int64_t index, const SoftmaxState& state, const NextKeys& /*next*/) const {
    state.clear(num_rows_);
    const int64_t first = index * kPartition;
    for (int64_t start = first; start < first + kPartition && start < tile_.end; start += kKeyBlock) {
      if (start + kKeyBlock <= tile_.begin) continue;
      const int begin = tile_.begin > start ? static_cast<int>(tile_.begin - start) : 0;
      const int end = tile_.end - start < kKeyBlock ? static_cast<int>(tile_.end - start) : kKeyBlock;
      if constexpr (sizeof(T) > 1) {
        if (pages_.direct(num_rows_)) {
          run_block(start, pages_.view(start, begin, end, tile_.end), state);
          continue;
        }
      }
      run_block(start, pages_.widened(start, begin, end, memory_.keys, memory_.values), state);
    }
  }

 private:
  template <class Q>
  void widen_query() const {
    for (int row = 0; row < num_rows_; row++) {
      const Q* from = rows_.query<Q>(row);
      float* to = memory_.query + row * shape_.ld_value;
      for (int d = 0; d < p_.head_dim; d += kLanes) store(to + d, load_partial(from + d, p_.head_dim - d));
    }
  }

  // Some of the row tiles, and what each row sees of a block that starts at position `start`.
  struct RowBlock {
    int first_tile, end_tile, first, end;
    int64_t start;
    KeyRange visible[kLogitRows], any;

    RowBlock(const TileRunner& tile, int first_row_tile, int64_t first_position, KeyRange in_use)
        : first_tile(first_row_tile), start(first_position), any{kKeyBlock, 0} {
      const RowTiles& tiles = tile.row_tiles_;
      end_tile = first_tile + kLogitTiles < tiles.count ? first_tile + kLogitTiles : tiles.count;
      first = tiles.first_row(first_tile), end = tiles.first_row(end_tile);
      for (int row = first; row < end; row++) {
        const KeyRange keys = tile.rows_.visible(row, start, in_use);
        visible[row - first] = keys;
        if (keys.empty()) continue;
        any.begin = keys.begin < any.begin ? keys.begin : any.begin;
        any.end = keys.end > any.end ? keys.end : any.end;
      }
    }
    KeyRange keys_of(int row) const { return visible[row - first]; }
  };
  float* logits_of(const RowBlock& rows, int row) const { return memory_.logits + (row - rows.first) * kKeyBlock; }

  template <class B>
  void run_block(int64_t start, const KeyBlock<B>& block, const SoftmaxState& state) const {
    for (int tile = 0; tile < row_tiles_.count; tile += kLogitTiles) {
      const RowBlock rows(*this, tile, start, {block.begin, block.end});
      if (rows.any.empty()) continue;
      multiply_keys(block, rows);
      weigh(rows, state);
      for (int i = rows.first_tile; i < rows.end_tile; i++) add_values(block, rows, i, state);
    }
  }

  // logits [rows, kKeyBlock] = query * keys, in whole panels that hold a key which some row sees; the other columns hold
  // anything.
  template <class B>
  void multiply_keys(const KeyBlock<B>& block, const RowBlock& rows) const {
    const int panels = panels_for(row_tiles_.max_rows());
    const int first = rows.any.begin / kPanel, last = (rows.any.end - 1) / kPanel;
    for (int group = first / panels * panels; group <= last; group += panels) {
      const B* keys[kWidePanelColumns / kPanel];
      const B* values[kWidePanelColumns / kPanel];
      for (int i = 0; i < panels; i++) {
        const int source = group + i < first ? first : group + i > last ? last : group + i;
        keys[i] = block.groups[source];
        values[i] = block.value_groups[source];
      }
      for (int tile = rows.first_tile; tile < rows.end_tile; tile++) {
        const int row = row_tiles_.first_row(tile), count = row_tiles_.rows_of(tile);
        const GemmTileArgs<B> args{memory_.query + row * shape_.ld_value, shape_.ld_value, keys, block.key_stride, p_.head_dim,
                                   logits_of(rows, row) + group * kPanel, kKeyBlock,       false};
        if (fetches_ahead(block)) {
          with_tile_shape<KeyProduct>(count, count, KeyProductArgs<B>{args, values});
        } else {
          with_tile_shape<GemmTile>(count, row_tiles_.max_rows(), args);
        }
      }
    }
  }

  // From logits to weights.
  void weigh(const RowBlock& rows, const SoftmaxState& all) const {
    const SoftmaxState state = {all.out + rows.first * all.ld, all.max + rows.first, all.sum + rows.first, all.ld};
    for (int r = 0; r < rows.end - rows.first; r++) {
      const KeyRange keys = rows.visible[r];
      if (keys.empty()) continue;
      const int row = rows.first + r;
      const float slope = rows_.alibi_slope(row), distance = static_cast<float>(rows.start - rows_.position(row));
      if constexpr (kWeighsInPowersOf2) {
        if (form_.transformed) transform_logits(logits_of(rows, row), keys, options_, slope, distance, indices_);
      } else {
        softmax_row(logits_of(rows, row), keys.begin, keys.end, options_, slope, distance, indices_, state.out + r * state.ld,
                    state.ld, state.max + r, state.sum + r);
      }
    }
    if constexpr (kWeighsInPowersOf2)
      weigh_rows<kLogitRows>(memory_.logits, rows.end - rows.first, rows.visible, form_, indices_, state);
  }

  // The rows of a tile share the keys that all of them see; what only some see, before and after, goes row by row. So a row
  // never touches a value that it must not see, and each row's chain of fma is the same in any company.
  template <class B>
  void add_values(const KeyBlock<B>& block, const RowBlock& rows, int tile, const SoftmaxState& state) const {
    const int first = row_tiles_.first_row(tile), count = row_tiles_.rows_of(tile);
    int begin = 0, end = kKeyBlock;
    for (int row = first; row < first + count; row++) {
      const KeyRange keys = rows.keys_of(row);
      begin = keys.begin > begin ? keys.begin : begin;
      end = keys.end < end ? keys.end : end;
    }
    if (begin >= end) {
      for (int row = first; row < first + count; row++) add_range(block, rows, row, 1, rows.keys_of(row), state);
      return;
    }
    for (int row = first; row < first + count; row++) add_range(block, rows, row, 1, {rows.keys_of(row).begin, begin}, state);
    add_range(block, rows, first, count, {begin, end}, state);
    for (int row = first; row < first + count; row++) add_range(block, rows, row, 1, {end, rows.keys_of(row).end}, state);
  }

  template <class B>
  void add_range(const KeyBlock<B>& block, const RowBlock& rows, int row, int count, KeyRange keys,
                 const SoftmaxState& state) const {
    if (keys.empty()) return;
    const int panels = panels_for(count), total = shape_.ld_value / kPanel;
    for (int panel = 0; panel < total; panel += panels) {
      int sources[kWidePanelColumns / kPanel];
      for (int i = 0; i < panels; i++) sources[i] = panel + i < total ? panel + i : total - 1;
      const WeightedSumArgs<B> args{
          logits_of(rows, row), &block, keys.begin, keys.end, sources, state.out + row * state.ld + panel * kPanel, state.ld};
      if (fetches_ahead(block)) {
        with_tile_shape<WeightedSum<true>>(count, count, args);
      } else {
        with_tile_shape<WeightedSum<false>>(count, count, args);
      }
    }
  }

  // A single row tile does too little with each key to be busy: it waits for memory.
  template <class B>
  bool fetches_ahead(const KeyBlock<B>& block) const {
    return row_tiles_.count == 1 && block.value_groups[block.begin / kPanel] != nullptr;
  }

  const PagedAttentionParams& p_;
  const TileShape& shape_;
  const AttentionTile& tile_;
  TileRows rows_;
  const LaneIndices& indices_;
  TileMemory memory_;
  SequencePages<T> pages_;
  int num_rows_;
  RowTiles row_tiles_;
  LogitOptions options_;
  LogitForm form_;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
