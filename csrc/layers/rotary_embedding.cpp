// rotary_embedding: checks and launch.
#include "../common/launch.h"
#include "../common/value_checks.h"
#include "launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kOp = "rotary_embedding";

void check_cos_sin_cache(const TensorArg& cos_sin_cache, const TensorArg& query, RotaryParams* p) {
  cos_sin_cache.expect_dtype(ScalarType::Float);
  cos_sin_cache.expect_same_device(query);
  cos_sin_cache.expect_dense(0);
  p->rotary_dim = cos_sin_cache.size32(1, "rotary_dim");
  if (p->rotary_dim % 2 != 0 || p->rotary_dim > p->head_dim) {
    cos_sin_cache.fail("has rotary_dim " + std::to_string(p->rotary_dim) + ", it must be even and at most query's head_dim " +
                       std::to_string(p->head_dim));
  }
  p->cos_sin_cache = cos_sin_cache.data_as<float>();
}

void check_key(const Tensor& key, const TensorArg& query, RotaryParams* p) {
  const TensorArg arg(kOp, "key", key, 3);
  expect_same_dtype(arg, arg.float_dtype(kFloatTypes), query, p->dtype);
  arg.expect_same_device(query);
  arg.expect_size(0, "num_tokens", p->num_tokens, "query");
  arg.expect_size(2, "head_dim", p->head_dim, "query");
  arg.expect_dense(1);
  p->num_kv_heads = arg.size32(1, "num_kv_heads");
  p->key = arg.data();
  p->key_token_stride = arg.stride(0);
}

// positions [num_tokens]; query [num_tokens, num_heads, head_dim]; key [num_tokens, num_kv_heads, head_dim];
// cos_sin_cache [max_position, rotary_dim]
template <Target target>
void rotary_embedding(const Tensor positions, Tensor query, OptionalTensor key, const Tensor cos_sin_cache, bool is_neox) {
  const TensorArg positions_arg(kOp, "positions", positions, 1), query_arg(kOp, "query", query, 3),
      cache_arg(kOp, "cos_sin_cache", cos_sin_cache, 2);
  RotaryParams p{};
  p.dtype = query_arg.float_dtype(kFloatTypes);
  p.num_tokens = query_arg.size32(0, "num_tokens");
  p.num_heads = query_arg.size32(1, "num_heads");
  p.head_dim = query_arg.size32(2, "head_dim");
  p.is_neox = is_neox;
  query_arg.expect_dense(1);
  p.query = query_arg.data();
  p.query_token_stride = query_arg.stride(0);
  positions_arg.expect_dtype(ScalarType::Long);
  positions_arg.expect_same_device(query_arg);
  positions_arg.expect_size(0, "num_tokens", p.num_tokens, "query");
  positions_arg.expect_dense(0);
  p.positions = positions_arg.data_as<int64_t>();
  check_cos_sin_cache(cache_arg, query_arg, &p);
  if (key) check_key(*key, query_arg, &p);
  if constexpr (values_readable(target)) expect_values_in(positions_arg, 0, cache_arg.size(0));
  if (p.num_tokens > 0) PE_LAUNCH(rotary_embedding, p, query_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
