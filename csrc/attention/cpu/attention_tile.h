// One tile of attention in fp32, the keys in blocks. Any cache type.
#pragma once
#include "few_rows.h"
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

// out [rows, 16 NP] += weights [rows, kKeyBlock] * values [panels, kKeyBlock, 16], over some keys of a widened block.
struct WeightedSumArgs {
  const float* weights;
  const float* values;
  KeyRange keys;
  const int* panels;  // [panels], of 16 columns each
  float* out;
  int ld_out;
};

struct WeightedSum {
  template <int MR, int NP>
  static void run(const WeightedSumArgs& args) {
    Accumulators<MR, NP * kPanelVecs> acc;
    load_tile(acc, args.out, args.ld_out);
    const float* b[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) b[p] = args.values + args.panels[p] * kPanel * kKeyBlock + args.keys.begin * kPanel;
    accumulate<MR, NP>(acc, FixedRows<kKeyBlock>{args.weights + args.keys.begin}, b, kPanel, args.keys.end - args.keys.begin);
    store_tile(acc, args.out, args.ld_out);
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
        few_(sizeof(T) > 1 && pages_.direct(num_rows_)),
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

  // The state of all rows after partition `index` alone. Meanwhile, with a few rows, the first of `next` are fetched.
  void run_partition(int64_t index, const SoftmaxState& state, const NextKeys& next) const {
    state.clear(num_rows_);
    const int64_t first = index * kPartition, limit = first + kPartition < tile_.end ? first + kPartition : tile_.end;
    const int64_t first_block = tile_.begin > first ? tile_.begin / kKeyBlock * kKeyBlock : first;
    KeysAhead<T> ahead(p_, {tile_.seq, tile_.kv_head, first_block + kKeyBlock, limit}, next);
    for (int64_t start = first_block; start < limit; start += kKeyBlock) {
      const int begin = tile_.begin > start ? static_cast<int>(tile_.begin - start) : 0;
      const int end = tile_.end - start < kKeyBlock ? static_cast<int>(tile_.end - start) : kKeyBlock;
      if constexpr (sizeof(T) > 1) {
        if (few_) {
          run_block(start, pages_.view(start, begin, end, [&] { return ahead.take(); }), state);
          continue;
        }
      }
      run_block(start, pages_.widened(start, begin, end, memory_.keys, memory_.values), state);
    }
  }

 private:
  template <class Q>
  void widen_query() const {
    const int head_dim = p_.head_dim;
    float* to = memory_.query;
    rows_.each(static_cast<const Q*>(p_.query), p_.query_token_stride, [&](int, int, int64_t, const Q* from) {
      for (int d = 0; d < head_dim; d += kLanes) store(to + d, load_partial(from + d, head_dim - d));
      to += shape_.ld_value;
    });
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
      add_values(block, rows, state);
    }
  }

  // logits [rows, kKeyBlock] = query * keys, in whole panels that hold a key which some row sees; the other columns hold
  // anything.
  template <class B>
  void multiply_keys(const KeyBlock<B>& block, const RowBlock& rows) const {
    if (few_) {
      for (int tile = rows.first_tile; tile < rows.end_tile; tile++)
        multiply_keys(block, rows, tile, tile + 1, few_row_panels(row_tiles_.rows_of(tile)));
    } else {
      multiply_keys(block, rows, rows.first_tile, rows.end_tile, panels_for(row_tiles_.max_rows()));
    }
  }

  template <class B>
  void multiply_keys(const KeyBlock<B>& block, const RowBlock& rows, int first_tile, int end_tile, int panels) const {
    const int first = rows.any.begin / kPanel, last = (rows.any.end - 1) / kPanel;
    for (int group = first / panels * panels; group <= last; group += panels) {
      const B *keys[kMostPanels], *values[kMostPanels];
      for (int i = 0; i < panels; i++) {
        const int source = group + i < first ? first : group + i > last ? last : group + i;
        keys[i] = block.groups[source];
        if (few_) values[i] = block.value_groups[source];
      }
      for (int tile = first_tile; tile < end_tile; tile++) {
        const int row = row_tiles_.first_row(tile), count = row_tiles_.rows_of(tile);
        const float* query = memory_.query + row * shape_.ld_value;
        float* logits = logits_of(rows, row) + group * kPanel;
        if (few_) {
          with_row_panels<KeyProduct>(
              count, KeyProductArgs<B>{query, shape_.ld_value, keys, block.key_stride, p_.head_dim, logits, values});
        } else {
          with_tile_shape<GemmTile>(
              count, row_tiles_.max_rows(),
              GemmTileArgs<B>{query, shape_.ld_value, keys, block.key_stride, p_.head_dim, logits, kKeyBlock, false});
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

  // The rows of a tile share the keys that all of them see; what only some see, before and after, goes by themselves. So a row
  // never touches a value that it must not see, and each row's chain of fma is the same in any company.
  template <class B>
  void add_values(const KeyBlock<B>& block, const RowBlock& rows, const SoftmaxState& state) const {
    for (int tile = rows.first_tile; tile < rows.end_tile; tile++) {
      const KeyRange shared = shared_keys(rows, tile);
      each_group(rows, tile, [&](int row, int count, KeyRange keys) {
        add_range(block, rows, row, count, {keys.begin, shared.begin < keys.end ? shared.begin : keys.end}, state);
      });
      add_range(block, rows, row_tiles_.first_row(tile), row_tiles_.rows_of(tile), shared, state);
      each_group(rows, tile,
                 [&](int row, int count, KeyRange keys) { add_range(block, rows, row, count, {shared.end, keys.end}, state); });
    }
  }

  // What all rows of a tile see; if that is nothing, an empty range after all keys.
  KeyRange shared_keys(const RowBlock& rows, int tile) const {
    const int first = row_tiles_.first_row(tile), last = first + row_tiles_.rows_of(tile);
    int begin = 0, end = kKeyBlock;
    for (int row = first; row < last; row++) {
      const KeyRange keys = rows.keys_of(row);
      begin = keys.begin > begin ? keys.begin : begin;
      end = keys.end < end ? keys.end : end;
    }
    return begin < end ? KeyRange{begin, end} : KeyRange{kKeyBlock, kKeyBlock};
  }

  // fn(first row, number of rows, keys) for neighbours in a tile that see the same keys.
  template <class Fn>
  void each_group(const RowBlock& rows, int tile, const Fn& fn) const {
    const int last = row_tiles_.first_row(tile) + row_tiles_.rows_of(tile);
    for (int row = row_tiles_.first_row(tile), next; row < last; row = next) {
      const KeyRange keys = rows.keys_of(row);
      for (next = row + 1; next < last && rows.keys_of(next) == keys;) next++;
      fn(row, next - row, keys);
    }
  }

  template <class B>
  void add_range(const KeyBlock<B>& block, const RowBlock& rows, int row, int count, KeyRange keys,
                 const SoftmaxState& state) const {
    if (keys.empty()) return;
    const int panels = few_ ? few_row_panels(count) : panels_for(count), total = shape_.ld_value / kPanel;
    const float* weights = logits_of(rows, row);
    float* out = state.out + row * state.ld;
    for (int panel = 0; panel < total; panel += panels) {
      int sources[kMostPanels];
      for (int i = 0; i < panels; i++) sources[i] = panel + i < total ? panel + i : total - 1;
      if (few_) {
        with_row_panels<ValueSum>(count, ValueSumArgs<B>{weights, &block, keys, sources, out, state.ld});
      } else {
        with_tile_shape<WeightedSum>(count, count,
                                     WeightedSumArgs{weights, memory_.values, keys, sources, out + panel * kPanel, state.ld});
      }
    }
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
  bool few_;  // rows: pages feed the products as they are
  LogitOptions options_;
  LogitForm form_;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
