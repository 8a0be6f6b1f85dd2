// reshape_and_cache, rotary_reshape_and_cache: checks and launch.
#include "../common/value_checks.h"
#include "kv_cache_args.h"
#include "launch.h"

namespace pyengine {
namespace {

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

// Everything but the rotary embedding: key, value [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache
// [num_blocks, num_kv_heads, block_size, head_dim]; slot_mapping [num_tokens]
ReshapeAndCacheParams check_common(Target target, const char* op, const TensorArg& key, const Tensor& value,
                                   const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping,
                                   const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const TensorArg value_arg(op, "value", value, 3), k_arg(op, "k_cache", k_cache, 4), v_arg(op, "v_cache", v_cache, 4),
      slots_arg(op, "slot_mapping", slot_mapping, 1);
  ReshapeAndCacheParams p{};
  p.kv_dtype = check_kv_cache(target, k_arg, v_arg, &p.block_shift);
  check_key_value(key, value_arg, k_arg, &p);
  fill_cache(k_arg, v_arg, check_kv_scales(op, k_scale, v_scale, k_arg, p.kv_dtype), &p);
  slots_arg.expect_dtype(torch::headeronly::ScalarType::Long);
  slots_arg.expect_same_device(key);
  slots_arg.expect_size(0, "num_tokens", p.num_tokens, "key");
  slots_arg.expect_dense(0);
  p.slot_mapping = slots_arg.data_as<int64_t>();
  if (values_readable(target)) expect_values_in(slots_arg, -1, k_arg.size(0) * k_arg.size(2));
  return p;
}

template <Target target>
void reshape_and_cache(const Tensor key, const Tensor value, Tensor k_cache, Tensor v_cache, const Tensor slot_mapping,
                       OptionalTensor k_scale, OptionalTensor v_scale) {
  const TensorArg key_arg("reshape_and_cache", "key", key, 3);
  const ReshapeAndCacheParams p =
      check_common(target, key_arg.op(), key_arg, value, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  if (p.num_tokens > 0) PE_LAUNCH(reshape_and_cache, p, key_arg);
}

// positions [num_tokens]; query [num_tokens, num_heads, head_dim]; cos_sin_cache [max_position, rotary_dim]
void check_rotary(Target target, const TensorArg& positions, const TensorArg& query, const TensorArg& cos_sin_cache,
                  const TensorArg& key, ReshapeAndCacheParams* p) {
  expect_same_dtype(query, query.float_dtype(kFloatTypes), key, p->dtype);
  for (const TensorArg* arg : {&positions, &query, &cos_sin_cache}) arg->expect_same_device(key);
  for (const TensorArg* arg : {&positions, &query}) arg->expect_size(0, "num_tokens", p->num_tokens, "key");
  query.expect_size(2, "head_dim", p->head_dim, "key");
  query.expect_dense(1);
  positions.expect_dtype(torch::headeronly::ScalarType::Long);
  positions.expect_dense(0);
  cos_sin_cache.expect_dtype(torch::headeronly::ScalarType::Float);
  cos_sin_cache.expect_dense(0);
  p->rotary_dim = cos_sin_cache.size32(1, "rotary_dim");
  if (p->rotary_dim % 2 != 0 || p->rotary_dim > p->head_dim) {
    cos_sin_cache.fail("has rotary_dim " + std::to_string(p->rotary_dim) + ", it must be even and at most key's head_dim " +
                       std::to_string(p->head_dim));
  }
  if (values_readable(target)) expect_values_in(positions, 0, cos_sin_cache.size(0));
  p->num_heads = query.size32(1, "num_heads");
  p->query = query.data();
  p->query_token_stride = query.stride(0);
  p->positions = positions.data_as<int64_t>();
  p->cos_sin_cache = cos_sin_cache.data_as<float>();
}

template <Target target>
void rotary_reshape_and_cache(const Tensor positions, Tensor query, const Tensor key, const Tensor value,
                              const Tensor cos_sin_cache, Tensor k_cache, Tensor v_cache, const Tensor slot_mapping,
                              bool is_neox, OptionalTensor k_scale, OptionalTensor v_scale) {
  const char* op = "rotary_reshape_and_cache";
  const TensorArg positions_arg(op, "positions", positions, 1), query_arg(op, "query", query, 3), key_arg(op, "key", key, 3),
      cos_sin_arg(op, "cos_sin_cache", cos_sin_cache, 2);
  ReshapeAndCacheParams p = check_common(target, op, key_arg, value, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  check_rotary(target, positions_arg, query_arg, cos_sin_arg, key_arg, &p);
  p.is_neox = is_neox;
  if (p.num_tokens > 0) PE_LAUNCH(reshape_and_cache, p, key_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache<target>));
  library.impl("rotary_reshape_and_cache", TORCH_BOX(&rotary_reshape_and_cache<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
