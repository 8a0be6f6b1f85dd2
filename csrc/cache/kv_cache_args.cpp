#include "kv_cache_args.h"

namespace pyengine {
namespace {

float* check_scale(const char* op, const char* name, const Tensor& scale, const TensorArg& k_cache, DType kv_dtype,
                   int64_t* block_stride, int64_t* head_stride) {
  const bool per_token = kv_dtype == DType::kInt8;
  const TensorArg arg(op, name, scale, per_token ? 3 : 1);
  arg.expect_dtype(torch::headeronly::ScalarType::Float);
  arg.expect_same_device(k_cache);
  if (per_token) {
    arg.expect_size(0, "num_blocks", k_cache.size(0), "k_cache");
    arg.expect_size(1, "num_kv_heads", k_cache.size(1), "k_cache");
    arg.expect_size(2, "block_size", k_cache.size(2), "k_cache");
    arg.expect_dense(2);
    *block_stride = arg.stride(0);
    *head_stride = arg.stride(1);
  } else {
    arg.expect_size(0, "num_kv_heads", k_cache.size(1), "k_cache");
    arg.expect_dense(0);
  }
  return arg.data_as<float>();
}

}  // namespace

DType check_kv_cache(Target target, const TensorArg& k_cache, const TensorArg& v_cache, int32_t* block_shift) {
  const DType dtype = k_cache.float_dtype(kCacheTypes);
  expect_same_dtype(v_cache, v_cache.float_dtype(kCacheTypes), k_cache, dtype);
  v_cache.expect_same_device(k_cache);
  const char* const dims[] = {"num_blocks", "num_kv_heads", "block_size", "head_dim"};
  for (int dim = 0; dim < 4; dim++) {
    k_cache.size32(dim, dims[dim]);
    v_cache.expect_size(dim, dims[dim], k_cache.size(dim), "k_cache");
  }
  const int64_t block_size = k_cache.size(2);
  if (block_size < 1 || (block_size & (block_size - 1)) != 0) {
    k_cache.fail("has block_size " + std::to_string(block_size) + ", it must be a power of two");
  }
  *block_shift = __builtin_ctzll(static_cast<uint64_t>(block_size));
  if (target == Target::kCpu) {
    if (block_size != 1 && k_cache.stride(2) != 1) {
      k_cache.fail("has stride(2) " + std::to_string(k_cache.stride(2)) + ", on the CPU K is dimension-major: it must be 1");
    }
    v_cache.expect_dense(3);
  }
  return dtype;
}

KVScales check_kv_scales(const char* op, const OptionalTensor& k_scale, const OptionalTensor& v_scale, const TensorArg& k_cache,
                         DType kv_dtype) {
  KVScales scales;
  const bool int8 = kv_dtype == DType::kInt8, fp8 = kv_dtype == DType::kFp8E4M3 || kv_dtype == DType::kFp8E5M2;
  if (k_scale.has_value() != v_scale.has_value()) fail_op(op, "k_scale and v_scale must be given together");
  if (int8 && !k_scale) fail_op(op, "a cache of type Char needs k_scale and v_scale");
  if (!int8 && !fp8 && k_scale)
    fail_op(op, std::string("a cache of type ") + dtype_name(kv_dtype) + " takes no k_scale and v_scale");
  if (!k_scale) return scales;
  scales.k = check_scale(op, "k_scale", *k_scale, k_cache, kv_dtype, &scales.k_block_stride, &scales.k_head_stride);
  scales.v = check_scale(op, "v_scale", *v_scale, k_cache, kv_dtype, &scales.v_block_stride, &scales.v_head_stride);
  return scales;
}

}  // namespace pyengine
