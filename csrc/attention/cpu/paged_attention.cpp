// Paged attention for batches of decodes, prefills and anything between: cuts the work into tiles, longest first, and runs
// them.
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "attention_tile.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int kTileRows = 96;       // query rows of a prefill tile
constexpr int kTilesPerThread = 4;  // with fewer, long tiles are split by partitions of keys
constexpr int kCostBuckets = 48;    // of tiles, by the logarithm of rows * keys

// A run of one sequence's query tokens; each KV head makes a tile of it.
struct QueryRun {
  int32_t seq, first_token, num_tokens, num_keys;
  int64_t begin;  // first position that any row sees
};

int tokens_per_tile(const PagedAttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  const int tokens = kTileRows > group ? kTileRows / group : 1;
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

int cost_bucket(const QueryRun& run) {
  const uint64_t cost = static_cast<uint64_t>(run.num_tokens) * static_cast<uint64_t>(run.num_keys - run.begin) + 1;
  const int log2 = 63 - __builtin_clzll(cost);
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

template <class T>
class Launch {
 public:
  explicit Launch(const PagedAttentionParams& p) : p_(p), tokens_(tokens_per_tile(p)), shape_(p, tokens_) {}

  void run() {
    runs_ = static_cast<QueryRun*>(shared_scratch(p_.num_tokens * sizeof(QueryRun)));
    num_runs_ = sorted_runs(p_, tokens_, runs_);
    const int64_t tiles = int64_t{num_runs_} * p_.num_kv_heads;
    int64_t parts = 0;
    for (int i = 0; i < num_runs_; i++) parts += end_partition(runs_[i]) - first_partition(runs_[i]);
    if (get_num_threads() > 1 && tiles < int64_t{kTilesPerThread} * get_num_threads() && parts > num_runs_) {
      run_split(parts);
    } else {
      parallel_for(tiles, [&](int64_t i, int) { run_whole(i); });
    }
  }

 private:
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
    return static_cast<float*>(thread_scratch(TileMemory::floats(shape_, p_.head_dim) * sizeof(float)));
  }

  void run_whole(int64_t index) const {
    const AttentionTile work = tile(index);
    const QueryRun& run = runs_[index / p_.num_kv_heads];
    const TileRunner<T> runner(p_, shape_, work, indices_, tile_memory());
    const SoftmaxState total = runner.scratch_state(0), part = runner.scratch_state(1);
    runner.run_partition(first_partition(run), total);
    for (int64_t i = first_partition(run) + 1; i < end_partition(run); i++) {
      runner.run_partition(i, part);
      for (int row = 0; row < runner.num_rows(); row++) merge_row(total, row, part, row);
    }
    runner.finish(total);
  }

  // Each partition of each tile by itself, then the merges, in the order of run_whole.
  void run_split(int64_t parts) {
    const int64_t state_floats = shape_.state_floats(shape_.max_rows);
    const int64_t num_states = parts * p_.num_kv_heads;
    char* memory = static_cast<char*>(
        shared_scratch(num_states * (state_floats * sizeof(float) + sizeof(Part)) + p_.num_tokens * sizeof(QueryRun)));
    float* states = reinterpret_cast<float*>(memory);
    Part* part_list = reinterpret_cast<Part*>(states + num_states * state_floats);
    runs_ = reinterpret_cast<QueryRun*>(part_list + num_states);
    num_runs_ = sorted_runs(p_, tokens_, runs_);  // again: the scratch moved
    int64_t n = 0;
    for (int64_t i = 0; i < int64_t{num_runs_} * p_.num_kv_heads; i++) {
      const QueryRun& run = runs_[i / p_.num_kv_heads];
      for (int64_t j = first_partition(run); j < end_partition(run); j++) part_list[n++] = {i, j};
    }
    parallel_for(n, [&](int64_t i, int) {
      const AttentionTile work = tile(part_list[i].tile);
      const TileRunner<T> runner(p_, shape_, work, indices_, tile_memory());
      runner.run_partition(part_list[i].partition, shape_.state(states + i * state_floats, runner.num_rows()));
    });
    for (int64_t i = 0; i < n;) i = merge_parts(part_list, states, i, n);
  }

  struct Part {
    int64_t tile, partition;
  };

  // Merges the parts of one tile, from part i on, into its first one, and writes the rows. Returns the next tile's first part.
  int64_t merge_parts(const Part* parts, float* states, int64_t i, int64_t n) const {
    const int64_t state_floats = shape_.state_floats(shape_.max_rows);
    const AttentionTile work = tile(parts[i].tile);
    const TileRunner<T> runner(p_, shape_, work, indices_, tile_memory());
    const SoftmaxState total = shape_.state(states + i * state_floats, runner.num_rows());
    int64_t j = i + 1;
    for (; j < n && parts[j].tile == parts[i].tile; j++) {
      const SoftmaxState part = shape_.state(states + j * state_floats, runner.num_rows());
      for (int row = 0; row < runner.num_rows(); row++) merge_row(total, row, part, row);
    }
    runner.finish(total);
    return j;
  }

  const PagedAttentionParams& p_;
  int tokens_;
  TileShape shape_;
  LaneIndices indices_;
  QueryRun* runs_ = nullptr;
  int num_runs_ = 0;
};

}  // namespace

const char* paged_attention(const PagedAttentionParams& p) {
  if (p.num_tokens == 0 || p.num_heads == 0) return nullptr;
  if (p.block_size > 1 && p.k_token_stride != 1) return "on CPUs, keys must be dimension-major: k_cache.stride(2) == 1";
  if (p.v_dim_stride != 1) return "on CPUs, a value's dimensions must be adjacent: v_cache.stride(3) == 1";
  if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBF16)
    return "the query must be fp32, fp16 or bf16";
  return with_cache_type(p.kv_dtype, [&](auto cache) -> const char* {
    Launch<decltype(cache)>(p).run();
    return nullptr;
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
