// Arguments of the attention kernels: plain data that every backend shares. Strides are in elements.
#pragma once
#include "../common/dtype.h"

namespace pyengine {

// One unit of attention work on a GPU: query rows of one sequence against keys [kv_begin, kv_end).
// part < 0: the kernel writes the output itself. seq < 0: padding, nothing to do.
struct AttentionWork {
  int32_t seq, kv_begin, kv_end, part;
};

struct PagedAttentionParams {
  void* out;                       // [num_tokens, num_heads, head_dim], dtype
  const void* query;               // [num_tokens, num_heads, head_dim], dtype; token stride free, the rest dense
  const void* k_cache;             // [num_blocks, num_kv_heads, block_size, head_dim], kv_dtype, by strides
  const void* v_cache;             // as k_cache
  const float* k_scale;            // per token [num_blocks, num_kv_heads, block_size] or per head [num_kv_heads]; or null
  const float* v_scale;            // as k_scale
  const int32_t* block_table;      // [num_seqs, max_blocks], rows block_table_stride apart
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const float* alibi_slopes;       // [num_heads] or null
  const float* sinks;              // [num_heads], a logit that joins the softmax's sum only; or null
  float* lse;                      // [num_tokens, num_heads], natural log; or null
  int64_t out_token_stride, query_token_stride;
  int64_t k_block_stride, k_head_stride, k_token_stride, k_dim_stride;
  int64_t v_block_stride, v_head_stride, v_token_stride, v_dim_stride;
  int64_t k_scale_block_stride, k_scale_head_stride;  // per-token scales only; the token stride is 1
  int64_t v_scale_block_stride, v_scale_head_stride;
  int64_t block_table_stride;
  int32_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, block_size, block_shift;
  int32_t max_query_len, max_seq_len;
  int32_t sliding_window;  // the last `sliding_window` positions are seen, the query's own included; <= 0: all
  bool scale_per_token;    // which form k_scale and v_scale have
  float scale;             // of the logits
  float logit_softcap;     // 0: none
  DType dtype, kv_dtype;
  // Split-KV, GPUs only: the plan made once a step, and room for partial results.
  const AttentionWork* work;  // [num_work] or null
  int32_t num_work;
  float* workspace;
  int64_t workspace_size;  // floats
};

// Merges partial attention results over disjoint key ranges, in part order.
struct MergeAttentionParams {
  void* out;                  // [num_rows, num_heads, head_dim], dtype
  float* lse;                 // [num_rows, num_heads] or null
  const float* part_out;      // [num_parts, num_heads, head_dim]
  const float* part_lse;      // [num_parts, num_heads], natural log; -inf for an empty part
  const int32_t* part_start;  // [num_rows + 1]: row i merges parts part_start[i] .. part_start[i + 1]
  int64_t out_row_stride;
  int32_t num_rows, num_heads, head_dim;
  DType dtype;
};

}  // namespace pyengine
