#include "value_checks.h"

#include <unordered_set>

namespace pyengine {
namespace {

std::string str(int64_t n) { return std::to_string(n); }

void expect_blocks(const TensorArg& block_table, int64_t seq, int64_t num_used, int64_t num_blocks) {
  const int32_t* row = block_table.data_as<const int32_t>() + seq * block_table.stride(0);
  bool valid = true;  // one pass without branches; the culprit is looked for only when there is one
  for (int64_t i = 0; i < num_used; i++) valid &= row[i] >= 0 && row[i] < num_blocks;
  for (int64_t i = 0; !valid && i < num_used; i++) {
    if (row[i] < 0 || row[i] >= num_blocks) {
      block_table.fail("[" + str(seq) + ", " + str(i) + "] is " + str(row[i]) + ", k_cache has num_blocks " + str(num_blocks));
    }
  }
}

}  // namespace

void expect_values_in(const TensorArg& values, int64_t begin, int64_t end) {
  const int64_t* v = values.data_as<const int64_t>();
  for (int64_t i = 0; i < values.size(0); i++) {
    if (v[i] < begin || v[i] >= end) {
      values.fail("[" + str(i) + "] is " + str(v[i]) + ", it must be in [" + str(begin) + ", " + str(end) + ")");
    }
  }
}

void expect_block_mapping(const TensorArg& block_mapping, int64_t num_src, int64_t num_dst, bool same_pool) {
  const int64_t* pairs = block_mapping.data_as<const int64_t>();
  const int64_t num_pairs = block_mapping.size(0);
  std::unordered_set<int64_t> destinations;
  for (int64_t i = 0; i < num_pairs; i++) {
    const int64_t src = pairs[2 * i], dst = pairs[2 * i + 1];
    if (src < 0 || src >= num_src)
      block_mapping.fail("[" + str(i) + ", 0] is " + str(src) + ", the source has " + str(num_src) + " blocks");
    if (dst < 0 || dst >= num_dst) {
      block_mapping.fail("[" + str(i) + ", 1] is " + str(dst) + ", the destination has " + str(num_dst) + " blocks");
    }
    if (!destinations.insert(dst).second) block_mapping.fail("names destination block " + str(dst) + " twice");
  }
  for (int64_t i = 0; same_pool && i < num_pairs; i++) {
    if (destinations.count(pairs[2 * i]) != 0) {
      block_mapping.fail("names block " + str(pairs[2 * i]) + " as a source and as a destination");
    }
  }
}

void expect_valid_batch(const TensorArg& query_start_loc, const TensorArg& seq_lens, const TensorArg& block_table,
                        const BatchShape& shape) {
  const int32_t* start = query_start_loc.data_as<const int32_t>();
  const int32_t* lens = seq_lens.data_as<const int32_t>();
  const int64_t num_seqs = seq_lens.size(0);
  if (start[0] != 0) query_start_loc.fail("starts at " + str(start[0]) + ", it must start at 0");
  if (start[num_seqs] != shape.num_tokens) {
    query_start_loc.fail("ends at " + str(start[num_seqs]) + ", query has num_tokens " + str(shape.num_tokens));
  }
  for (int64_t i = 0; i < num_seqs; i++) {
    const int64_t query_len = static_cast<int64_t>(start[i + 1]) - start[i];
    const int64_t num_used = (lens[i] + shape.block_size - 1) / shape.block_size;
    if (query_len < 0 || query_len > shape.max_query_len) {
      query_start_loc.fail("gives sequence " + str(i) + " a query of length " + str(query_len) + ", max_query_len is " +
                           str(shape.max_query_len));
    }
    if (lens[i] < query_len || lens[i] > shape.max_seq_len) {
      seq_lens.fail("[" + str(i) + "] is " + str(lens[i]) + ", its query has length " + str(query_len) +
                    " and max_seq_len is " + str(shape.max_seq_len));
    }
    if (query_len == 0) continue;
    if (num_used > block_table.size(1)) {
      block_table.fail("has max_blocks " + str(block_table.size(1)) + ", seq_lens[" + str(i) + "] = " + str(lens[i]) +
                       " needs " + str(num_used));
    }
    expect_blocks(block_table, i, num_used, shape.num_blocks);
  }
}

void expect_valid_plan(const TensorArg& plan, const TensorArg& query_start_loc, const TensorArg& seq_lens, int64_t num_slots) {
  const int32_t* start = query_start_loc.data_as<const int32_t>();
  const int32_t* lens = seq_lens.data_as<const int32_t>();
  for (int64_t i = 0; i < plan.size(0); i++) {
    const int32_t* work = plan.data_as<const int32_t>() + 4 * i;
    const int32_t seq = work[0], kv_begin = work[1], kv_end = work[2], part = work[3];
    const std::string row = "[" + str(i) + "] ";
    if (seq < 0) continue;
    if (seq >= seq_lens.size(0))
      plan.fail(row + "names sequence " + str(seq) + ", seq_lens has num_seqs " + str(seq_lens.size(0)));
    if (kv_begin < 0 || kv_begin > kv_end || kv_end > lens[seq]) {
      plan.fail(row + "covers keys " + str(kv_begin) + " to " + str(kv_end) + ", seq_lens[" + str(seq) + "] is " +
                str(lens[seq]));
    }
    const int64_t end_slot = static_cast<int64_t>(part) + start[seq + 1] - start[seq];
    if (part >= 0 && end_slot > num_slots) {
      plan.fail(row + "ends at slot " + str(end_slot) + ", workspace has room for " + str(num_slots));
    }
  }
}

}  // namespace pyengine
