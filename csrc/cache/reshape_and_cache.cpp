// reshape_and_cache: checks and launch.
#include "../common/value_checks.h"
#include "kv_cache_args.h"
#include "launch.h"

namespace pyengine {
namespace {

constexpr const char* kOp = "reshape_and_cache";

// key and value [num_tokens, num_kv_heads, head_dim] against each other and the cache.
void check_key_value(const TensorArg& key, const TensorArg& value, const TensorArg& k_cache, ReshapeAndCacheParams* p) {
  p->dtype = key.float_dtype(kFloatTypes);
  expect_same_dtype(value, value.float_dtype(kFloatTypes), key, p->dtype);
  value.expect_same_device(key);
  k_cache.expect_same_device(key);
  p->num_tokens = key.size32(0, "num_tokens");
  value.expect_size(0, "num_tokens", p->num_tokens, "key");
  for (const TensorArg* arg : {&key, &value}) {
    arg->expect_size(1, "num_kv_heads", k_cache.size(1), "k_cache");
    arg->expect_size(2, "head_dim", k_cache.size(3), "k_cache");
    arg->expect_dense(1);
  }
  p->key = key.data();
  p->value = value.data();
  p->key_token_stride = key.stride(0);
  p->value_token_stride = value.stride(0);
}

void fill_cache(const TensorArg& k_cache, const TensorArg& v_cache, const KVScales& scales, ReshapeAndCacheParams* p) {
  p->num_kv_heads = static_cast<int32_t>(k_cache.size(1));
  p->block_size = static_cast<int32_t>(k_cache.size(2));
  p->head_dim = static_cast<int32_t>(k_cache.size(3));
  p->k_cache = k_cache.data();
  p->v_cache = v_cache.data();
  p->k_block_stride = k_cache.stride(0);
  p->k_head_stride = k_cache.stride(1);
  p->k_token_stride = k_cache.stride(2);
  p->k_dim_stride = k_cache.stride(3);
  p->v_block_stride = v_cache.stride(0);
  p->v_head_stride = v_cache.stride(1);
  p->v_token_stride = v_cache.stride(2);
  p->v_dim_stride = v_cache.stride(3);
  p->k_scale = scales.k;
  p->v_scale = scales.v;
  p->k_scale_block_stride = scales.k_block_stride;
  p->k_scale_head_stride = scales.k_head_stride;
  p->v_scale_block_stride = scales.v_block_stride;
  p->v_scale_head_stride = scales.v_head_stride;
}

// key, value [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim];
// slot_mapping [num_tokens]
template <Target target>
void reshape_and_cache(const Tensor key, const Tensor value, Tensor k_cache, Tensor v_cache, const Tensor slot_mapping,
                       OptionalTensor k_scale, OptionalTensor v_scale) {
  const TensorArg key_arg(kOp, "key", key, 3), value_arg(kOp, "value", value, 3), k_arg(kOp, "k_cache", k_cache, 4),
      v_arg(kOp, "v_cache", v_cache, 4), slots_arg(kOp, "slot_mapping", slot_mapping, 1);
  ReshapeAndCacheParams p{};
  p.kv_dtype = check_kv_cache(target, k_arg, v_arg, &p.block_shift);
  check_key_value(key_arg, value_arg, k_arg, &p);
  fill_cache(k_arg, v_arg, check_kv_scales(kOp, k_scale, v_scale, k_arg, p.kv_dtype), &p);
  slots_arg.expect_dtype(torch::headeronly::ScalarType::Long);
  slots_arg.expect_same_device(key_arg);
  slots_arg.expect_size(0, "num_tokens", p.num_tokens, "key");
  slots_arg.expect_dense(0);
  p.slot_mapping = slots_arg.data_as<int64_t>();
  if constexpr (values_readable(target)) expect_values_in(slots_arg, -1, k_arg.size(0) * k_arg.size(2));
  if (p.num_tokens > 0) PE_LAUNCH(reshape_and_cache, p, key_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
