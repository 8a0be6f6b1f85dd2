// Arguments of the cache kernels: plain data that every backend shares. Strides are in elements unless they say bytes.
#pragma once
#include "../common/dtype.h"

namespace pyengine {

// Scatters new keys and values to their slots: slot = block * block_size + offset, -1 skips the token.
// With positions set, rotary embedding is applied first: to query in place, and to the key on its way to the cache.
// INT8: one scale for each token and head, max |x| / 127; without a magnitude of 2^-100 or more, scale and codes are 0.
struct ReshapeAndCacheParams {
  const void* key;              // [num_tokens, num_kv_heads, head_dim], dtype; token stride free, the rest dense
  const void* value;            // as key
  void* k_cache;                // [num_blocks, num_kv_heads, block_size, head_dim], kv_dtype, by strides
  void* v_cache;                // as k_cache
  float* k_scale;               // INT8: written, [num_blocks, num_kv_heads, block_size]; FP8: read, [num_kv_heads]; or null
  float* v_scale;               // as k_scale
  const int64_t* slot_mapping;  // [num_tokens]
  void* query;                  // [num_tokens, num_heads, head_dim], dtype; fused rotary only, else null
  const int64_t* positions;     // [num_tokens]; fused rotary only, else null
  const float* cos_sin_cache;   // [max_position, rotary_dim], cosines then sines; fused rotary only
  int64_t key_token_stride, value_token_stride, query_token_stride;
  int64_t k_block_stride, k_head_stride, k_token_stride, k_dim_stride;
  int64_t v_block_stride, v_head_stride, v_token_stride, v_dim_stride;
  int64_t k_scale_block_stride, k_scale_head_stride, v_scale_block_stride, v_scale_head_stride;
  int32_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, block_shift, rotary_dim;
  bool is_neox;  // rotate halves (NeoX) or neighbouring pairs (GPT-J)
  DType dtype, kv_dtype;
};

// Copies whole blocks inside one block-major pool: one launch for all pairs and layers.
struct CopyBlocksParams {
  void* pool;                    // [num_blocks, block_bytes]
  const int64_t* block_mapping;  // [num_pairs, 2]: source, destination. No block is both.
  int64_t block_bytes;
  int32_t num_pairs;
};

// Copies whole blocks between two block-major pools, host and device.
struct SwapBlocksParams {
  const void* src;               // [num_src_blocks, block_bytes]
  void* dst;                     // [num_dst_blocks, block_bytes]
  const int64_t* block_mapping;  // [num_pairs, 2], host memory: source, destination
  int64_t block_bytes;
  int32_t num_pairs;
};

}  // namespace pyengine
