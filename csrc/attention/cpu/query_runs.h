// Cuts a batch's queries into runs: what one tile of a KV head takes.
#pragma once
#include "tile_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kCostBuckets = 48;  // of runs, by the logarithm of rows * keys

// A run of one sequence's query tokens; each KV head makes a tile of it.
struct QueryRun {
  int32_t seq, first_token, num_tokens, num_keys;
  int64_t begin;      // first position that any row sees, after a shared prefix
  int32_t num_parts;  // partitions of the shared prefix, which are computed elsewhere
};

inline int tokens_per_tile(const PagedAttentionParams& p, int max_rows) {
  const int group = p.num_heads / p.num_kv_heads;
  const int tokens = max_rows > group ? max_rows / group : 1;
  return tokens < p.max_query_len || p.max_query_len <= 0 ? tokens : p.max_query_len;
}

// fn(QueryRun) for each run of the batch.
template <class Fn>
inline void for_each_run(const PagedAttentionParams& p, const SharedPrefixes& prefixes, int tokens, const Fn& fn) {
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int query_len = p.query_start_loc[seq + 1] - p.query_start_loc[seq],
              num_parts = prefixes.num_tiles > 0 ? prefixes.seqs[seq].num_parts : 0;
    for (int first = 0; first < query_len; first += tokens) {
      const int count = query_len - first < tokens ? query_len - first : tokens;
      const int position = p.seq_lens[seq] - query_len + first;
      const int64_t window_begin = p.sliding_window > 0 ? int64_t{position} - p.sliding_window + 1 : 0;
      const int64_t begin = window_begin > 0 ? window_begin : int64_t{num_parts} * kPartition;
      fn(QueryRun{seq, first, count, position + count, begin, num_parts});
    }
  }
}

// Query rows times keys, without the factors that all runs share.
inline int64_t cost(const QueryRun& run) { return int64_t{run.num_tokens} * (run.num_keys - run.begin); }

inline int cost_bucket(const QueryRun& run) {
  const int log2 = 63 - __builtin_clzll(static_cast<uint64_t>(cost(run)) + 1);
  return log2 < kCostBuckets ? kCostBuckets - 1 - log2 : 0;
}

// The batch's runs, long ones first, so that no thread is left alone with a long one at the end. `runs` has room for
// num_tokens.
inline int sorted_runs(const PagedAttentionParams& p, const SharedPrefixes& prefixes, int tokens, QueryRun* runs) {
  int next[kCostBuckets + 1] = {};
  for_each_run(p, prefixes, tokens, [&](const QueryRun& run) { next[cost_bucket(run) + 1]++; });
  for (int i = 0; i < kCostBuckets; i++) next[i + 1] += next[i];
  const int count = next[kCostBuckets];
  for_each_run(p, prefixes, tokens, [&](const QueryRun& run) { runs[next[cost_bucket(run)]++] = run; });
  return count;
}

inline int64_t first_partition(const QueryRun& run) { return run.begin / kPartition; }
inline int64_t end_partition(const QueryRun& run) { return (int64_t{run.num_keys} + kPartition - 1) / kPartition; }
inline int64_t num_partitions(const QueryRun& run) { return end_partition(run) - first_partition(run); }

}  // namespace PE_ISA
}  // namespace pyengine::cpu
