// Paged attention for batches of decodes, prefills and anything between: cuts the work into tiles, longest first, and runs
// them.
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#if defined(PE_SIMD_AMX)
#include "attention_tile_amx.h"
#else
#include "attention_tile.h"
#endif

namespace pyengine::cpu {
#if defined(PE_SIMD_AMX)
namespace avx512 {
const char* paged_attention(const PagedAttentionParams& p);
}
#endif
namespace PE_ISA {
namespace {

constexpr int kTilesPerThread =
    4;  // a tile that costs more than this fraction of a thread's share is split by partitions of keys
constexpr int64_t kMaxStateBytes = 64 * 1024 * 1024;  // of the partitions' results that await their merge
constexpr int kCostBuckets = 48;                      // of tiles, by the logarithm of rows * keys

// A run of one sequence's query tokens; each KV head makes a tile of it.
struct QueryRun {
  int32_t seq, first_token, num_tokens, num_keys;
  int64_t begin;  // first position that any row sees
};

int tokens_per_tile(const PagedAttentionParams& p, int max_rows) {
  const int group = p.num_heads / p.num_kv_heads;
  const int tokens = max_rows > group ? max_rows / group : 1;
  return tokens < p.max_query_len || p.max_query_len <= 0 ? tokens : p.max_query_len;
}

// fn(QueryRun) for each run of the batch.
template <class Fn>
void for_each_run(const PagedAttentionParams& p, int tokens, const Fn& fn) {
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int query_len = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    for (int first = 0; first < query_len; first += tokens) {
      const int count = query_len - first < tokens ? query_len - first : tokens;
      const int position = p.seq_lens[seq] - query_len + first;
      const int64_t begin = p.sliding_window > 0 ? int64_t{position} - p.sliding_window + 1 : 0;
      fn(QueryRun{seq, first, count, position + count, begin > 0 ? begin : 0});
    }
  }
}

// Query rows times keys, without the factors that all runs share.
int64_t cost(const QueryRun& run) { return int64_t{run.num_tokens} * (run.num_keys - run.begin); }

int cost_bucket(const QueryRun& run) {
  const int log2 = 63 - __builtin_clzll(static_cast<uint64_t>(cost(run)) + 1);
  return log2 < kCostBuckets ? kCostBuckets - 1 - log2 : 0;
}

// The batch's runs, long ones first, so that no thread is left alone with a long one at the end. `runs` has room for
// num_tokens.
int sorted_runs(const PagedAttentionParams& p, int tokens, QueryRun* runs) {
  int next[kCostBuckets + 1] = {};
  for_each_run(p, tokens, [&](const QueryRun& run) { next[cost_bucket(run) + 1]++; });
  for (int i = 0; i < kCostBuckets; i++) next[i + 1] += next[i];
  const int count = next[kCostBuckets];
  for_each_run(p, tokens, [&](const QueryRun& run) { runs[next[cost_bucket(run)]++] = run; });
  return count;
}

int64_t first_partition(const QueryRun& run) { return run.begin / kPartition; }
int64_t end_partition(const QueryRun& run) { return (int64_t{run.num_keys} + kPartition - 1) / kPartition; }
int64_t num_partitions(const QueryRun& run) { return end_partition(run) - first_partition(run); }

template <class Runner>
class Launch {
 public:
  explicit Launch(const PagedAttentionParams& p)
      : p_(p), tokens_(tokens_per_tile(p, Runner::kTileRows)), shape_(p, tokens_, Runner::kOutColumns) {}

  void run() {
    int64_t num_items, num_merges, num_states;
    plan(&num_items, &num_merges, &num_states);
    char* memory = static_cast<char*>(shared_scratch(num_states * shape_.state_floats(shape_.max_rows) * sizeof(float) +
                                                     num_items * sizeof(Item) + num_merges * sizeof(Merge) +
                                                     p_.num_tokens * sizeof(QueryRun)));
    states_ = reinterpret_cast<float*>(memory);
    items_ = reinterpret_cast<Item*>(states_ + num_states * shape_.state_floats(shape_.max_rows));
    merges_ = reinterpret_cast<Merge*>(items_ + num_items);
    runs_ = reinterpret_cast<QueryRun*>(merges_ + num_merges);
    fill_items(sorted_runs(p_, tokens_, runs_));
    parallel_for(num_items, [&](int64_t i, int) {
      if (items_[i].state < 0) {
        run_whole(items_[i].tile);
      } else {
        run_part(items_[i]);
      }
    });
    parallel_for(num_merges, [&](int64_t i, int) { merge_parts(merges_[i]); });
  }

 private:
  // A whole tile, or one partition of it.
  struct Item {
    int64_t tile, partition, state;  // state < 0: the whole tile
  };
  // The states of a tile's partitions, one after the other.
  struct Merge {
    int64_t tile, first_state, num_states;
  };

  // Splits what would leave threads idle. How the work is cut changes no result: run_whole merges the same partitions in the
  // same order.
  bool is_split(const QueryRun& run) const { return cost(run) > split_above_ && num_partitions(run) > 1; }

  void plan(int64_t* num_items, int64_t* num_merges, int64_t* num_states) {
    int64_t total = 0;
    for_each_run(p_, tokens_, [&](const QueryRun& run) { total += cost(run) * p_.num_kv_heads; });
    const int threads = get_num_threads();
    split_above_ = threads > 1 ? total / (int64_t{kTilesPerThread} * threads) : INT64_MAX;
    for (;;) {
      int64_t runs = 0, split_runs = 0, parts = 0;
      for_each_run(p_, tokens_, [&](const QueryRun& run) {
        runs++;
        if (is_split(run)) split_runs++, parts += num_partitions(run);
      });
      *num_merges = split_runs * p_.num_kv_heads;
      *num_states = parts * p_.num_kv_heads;
      *num_items = *num_states + (runs - split_runs) * p_.num_kv_heads;
      const int64_t bytes = *num_states * shape_.state_floats(shape_.max_rows) * static_cast<int64_t>(sizeof(float));
      if (bytes <= kMaxStateBytes) return;
      split_above_ = INT64_MAX;
    }
  }

  void fill_items(int num_runs) const {
    int64_t item = 0, merge = 0, state = 0;
    for (int64_t tile = 0; tile < int64_t{num_runs} * p_.num_kv_heads; tile++) {
      const QueryRun& run = runs_[tile / p_.num_kv_heads];
      if (!is_split(run)) {
        items_[item++] = {tile, 0, -1};
        continue;
      }
      merges_[merge++] = {tile, state, num_partitions(run)};
      for (int64_t i = first_partition(run); i < end_partition(run); i++) items_[item++] = {tile, i, state++};
    }
  }

  AttentionTile tile(int64_t index) const {
    const QueryRun& run = runs_[index / p_.num_kv_heads];
    return {run.seq,
            static_cast<int>(index % p_.num_kv_heads),
            run.first_token,
            run.num_tokens,
            run.num_keys - run.num_tokens,
            run.begin,
            run.num_keys};
  }
  float* tile_memory() const {
    return static_cast<float*>(thread_scratch(Runner::memory_floats(shape_, p_.head_dim) * sizeof(float)));
  }
  SoftmaxState state(int64_t index, int rows) const {
    return shape_.state(states_ + index * shape_.state_floats(shape_.max_rows), rows);
  }

  void run_whole(int64_t index) const {
    const AttentionTile work = tile(index);
    const QueryRun& run = runs_[index / p_.num_kv_heads];
    const Runner runner(p_, shape_, work, indices_, tile_memory());
    const SoftmaxState total = runner.scratch_state(0), part = runner.scratch_state(1);
    runner.run_partition(first_partition(run), total);
    for (int64_t i = first_partition(run) + 1; i < end_partition(run); i++) {
      runner.run_partition(i, part);
      merge_rows(total, part, runner.rows().count());
    }
    runner.rows().finish(total);
  }

  void run_part(const Item& item) const {
    const AttentionTile work = tile(item.tile);
    const Runner runner(p_, shape_, work, indices_, tile_memory());
    runner.run_partition(item.partition, state(item.state, runner.rows().count()));
  }

  void merge_parts(const Merge& merge) const {
    const AttentionTile work = tile(merge.tile);
    const TileRows rows(p_, shape_, work);
    const SoftmaxState total = state(merge.first_state, rows.count());
    for (int64_t i = 1; i < merge.num_states; i++) {
      merge_rows(total, state(merge.first_state + i, rows.count()), rows.count());
    }
    rows.finish(total);
  }

  const PagedAttentionParams& p_;
  int tokens_;
  TileShape shape_;
  LaneIndices indices_;
  int64_t split_above_ = INT64_MAX;
  float* states_ = nullptr;
  Item* items_ = nullptr;
  Merge* merges_ = nullptr;
  QueryRun* runs_ = nullptr;
};

}  // namespace

const char* paged_attention(const PagedAttentionParams& p) {
  if (p.num_tokens == 0 || p.num_heads == 0) return nullptr;
  if (p.block_size > 1 && p.k_token_stride != 1) return "on CPUs, keys must be dimension-major: k_cache.stride(2) == 1";
  if (p.v_dim_stride != 1) return "on CPUs, a value's dimensions must be adjacent: v_cache.stride(3) == 1";
  if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBF16)
    return "the query must be fp32, fp16 or bf16";
#if defined(PE_SIMD_AMX)
  if (!serves_in_amx(p)) return avx512::paged_attention(p);
  Launch<AmxTileRunner>(p).run();
  return nullptr;
#else
  return with_cache_type(p.kv_dtype, [&](auto cache) -> const char* {
    Launch<TileRunner<decltype(cache)> >(p).run();
    return nullptr;
  });
#endif
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
