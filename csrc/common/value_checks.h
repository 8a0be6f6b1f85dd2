// Checks of index values, where the launcher can read them: a wrong one would make a kernel read or write beyond a tensor.
#pragma once
#include "tensor_arg.h"

namespace pyengine {

// Throws unless each element of the dense int64 tensor is in [begin, end).
void expect_values_in(const TensorArg& values, int64_t begin, int64_t end);

// block_mapping [num_pairs, 2], int64: throws unless sources are in [0, num_src), destinations in [0, num_dst), no destination
// is named twice and, within one pool, no block is both.
void expect_block_mapping(const TensorArg& block_mapping, int64_t num_src, int64_t num_dst, bool same_pool);

// What attention relies on: query_start_loc grows from 0 to num_tokens, sequences hold their queries, and every block that a
// sequence reaches is in the cache.
struct BatchShape {
  int64_t num_tokens, num_blocks, block_size;
  int64_t max_query_len, max_seq_len;
};
void expect_valid_batch(const TensorArg& query_start_loc, const TensorArg& seq_lens, const TensorArg& block_table,
                        const BatchShape& shape);

// plan [num_work, 4]: throws unless each row names a sequence (or is padding), keys that it has, and slots that the workspace
// has.
void expect_valid_plan(const TensorArg& plan, const TensorArg& query_start_loc, const TensorArg& seq_lens, int64_t num_slots);

}  // namespace pyengine
