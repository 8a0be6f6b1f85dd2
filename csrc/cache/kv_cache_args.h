// Checks that the ops on a KV cache share.
#pragma once
#include "../common/launch.h"

namespace pyengine {

inline constexpr auto kCacheTypes = {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8};

// k_cache and v_cache [num_blocks, num_kv_heads, block_size, head_dim] agree, and block_size is a power of two.
// On the CPU K is dimension-major and V token-major. Returns the element type; `block_shift` is log2(block_size).
DType check_kv_cache(Target target, const TensorArg& k_cache, const TensorArg& v_cache, int32_t* block_shift);

// Scales of a cache of `kv_dtype`: INT8 needs both, [num_blocks, num_kv_heads, block_size]; FP8 may have both, [num_kv_heads];
// other types have none.
struct KVScales {
  float* k = nullptr;
  float* v = nullptr;
  int64_t k_block_stride = 0, k_head_stride = 0, v_block_stride = 0, v_head_stride = 0;  // INT8
};
KVScales check_kv_scales(const char* op, const OptionalTensor& k_scale, const OptionalTensor& v_scale, const TensorArg& k_cache,
                         DType kv_dtype);

}  // namespace pyengine
