// One tile of attention in fp32, the keys in blocks. Any cache type.
#pragma once
#include "key_block.h"
#include "tile_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kWidePanelColumns = kPanel * (kWidePanels > kPanels ? kWidePanels : kPanels);

// A tile's working memory, cut from one allocation.
struct TileMemory {
  float* query;       // [rows, ld_value], fp32
  float* logits;      // [rows, kKeyBlock]
  float* keys;        // [head_dim, kKeyBlock]
  float* values;      // [kKeyBlock, ld_value]
  float* states;      // two of [rows]
  KeyRange* visible;  // [rows], of a block

  static int64_t floats(const TileShape& shape, int head_dim) {
    return int64_t{shape.max_rows} * (shape.ld_value + kKeyBlock + 2) + int64_t{kKeyBlock} * (head_dim + shape.ld_value) +
           2 * shape.state_floats(shape.max_rows);
  }
  TileMemory(float* memory, const TileShape& shape, int head_dim)
      : query(memory),
        logits(query + shape.max_rows * shape.ld_value),
        keys(logits + shape.max_rows * kKeyBlock),
        values(keys + head_dim * kKeyBlock),
        states(values + kKeyBlock * shape.ld_value),
        visible(reinterpret_cast<KeyRange*>(states + 2 * shape.state_floats(shape.max_rows))) {}
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
  const int* columns;  // [panels], first column of each panel
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
      for (int p = 0; p < NP; p++) b[p] = values.values + (begin - values.offset) * args.block->value_stride + args.columns[p];
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
      return Prefetch<1, kLines>{{reinterpret_cast<const char*>(next + args.columns[0] * kPanel)}, 64 * kLines};
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
        options_{p.scale, p.logit_softcap, p.alibi_slopes != nullptr} {
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

  template <class B>
  void run_block(int64_t start, const KeyBlock<B>& block, const SoftmaxState& state) const {
    multiply_keys(block);
    for (int row = 0; row < num_rows_; row++) {
      const KeyRange keys = rows_.visible(row, start, {block.begin, block.end});
      memory_.visible[row] = keys;
      if (keys.empty()) continue;
      softmax_row(memory_.logits + row * kKeyBlock, keys.begin, keys.end, options_, rows_.alibi_slope(row),
                  static_cast<float>(start - rows_.position(row)), indices_, state.out + row * state.ld, state.ld,
                  state.max + row, state.sum + row);
    }
    for (int tile = 0; tile < row_tiles_.count; tile++) add_values(block, tile, state);
  }

  // logits [rows, kKeyBlock] = query * keys, in whole panels; columns outside the block's keys hold anything.
  template <class B>
  void multiply_keys(const KeyBlock<B>& block) const {
    const int panels = panels_for(row_tiles_.max_rows());
    const int first = block.begin / kPanel, last = (block.end - 1) / kPanel;
    for (int group = first / panels * panels; group <= last; group += panels) {
      const B* keys[kWidePanelColumns / kPanel];
      const B* values[kWidePanelColumns / kPanel];
      for (int i = 0; i < panels; i++) {
        const int source = group + i < first ? first : group + i > last ? last : group + i;
        keys[i] = block.groups[source];
        values[i] = block.value_groups[source];
      }
      for (int tile = 0; tile < row_tiles_.count; tile++) {
        const int row = row_tiles_.first_row(tile), rows = row_tiles_.rows_of(tile);
        const GemmTileArgs<B> args{memory_.query + row * shape_.ld_value,
                                   shape_.ld_value,
                                   keys,
                                   block.key_stride,
                                   p_.head_dim,
                                   memory_.logits + row * kKeyBlock + group * kPanel,
                                   kKeyBlock,
                                   false};
        if (fetches_ahead(block)) {
          with_tile_shape<KeyProduct>(rows, rows, KeyProductArgs<B>{args, values});
        } else {
          with_tile_shape<GemmTile>(rows, row_tiles_.max_rows(), args);
        }
      }
    }
  }

  // The rows of a tile share the keys that all of them see; what only some see, before and after, goes row by row. So a row
  // never touches a value that it must not see, and each row's chain of fma is the same in any company.
  template <class B>
  void add_values(const KeyBlock<B>& block, int tile, const SoftmaxState& state) const {
    const int first = row_tiles_.first_row(tile), rows = row_tiles_.rows_of(tile);
    int begin = 0, end = kKeyBlock;
    for (int row = first; row < first + rows; row++) {
      begin = memory_.visible[row].begin > begin ? memory_.visible[row].begin : begin;
      end = memory_.visible[row].end < end ? memory_.visible[row].end : end;
    }
    if (begin >= end) {
      for (int row = first; row < first + rows; row++)
        add_range(block, row, 1, memory_.visible[row].begin, memory_.visible[row].end, state);
      return;
    }
    for (int row = first; row < first + rows; row++) add_range(block, row, 1, memory_.visible[row].begin, begin, state);
    add_range(block, first, rows, begin, end, state);
    for (int row = first; row < first + rows; row++) add_range(block, row, 1, end, memory_.visible[row].end, state);
  }

  template <class B>
  void add_range(const KeyBlock<B>& block, int row, int rows, int begin, int end, const SoftmaxState& state) const {
    if (begin >= end) return;
    const int panels = panels_for(rows), total = shape_.ld_value / kPanel;
    for (int panel = 0; panel < total; panel += panels) {
      int columns[kWidePanelColumns / kPanel];
      for (int i = 0; i < panels; i++) columns[i] = kPanel * (panel + i < total ? panel + i : total - 1);
      const WeightedSumArgs<B> args{
          memory_.logits + row * kKeyBlock, &block, begin, end, columns, state.out + row * state.ld + panel * kPanel, state.ld};
      if (fetches_ahead(block)) {
        with_tile_shape<WeightedSum<true>>(rows, rows, args);
      } else {
        with_tile_shape<WeightedSum<false>>(rows, rows, args);
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
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
