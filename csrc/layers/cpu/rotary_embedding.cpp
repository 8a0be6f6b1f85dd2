// Rotary position embedding of queries and keys.
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../params.h"
#include "rotary.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kElementsPerUnit = 8 * 1024;

template <class T>
void fetch(const T* from, int count) {
  for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(from + i, 1, 3);
}

template <class T>
const char* run(const RotaryParams& p) {
  const int64_t row = int64_t{p.num_heads + p.num_kv_heads} * p.head_dim;
  const int64_t per_unit = kElementsPerUnit / (row + 1) + 1;
  parallel_for((p.num_tokens + per_unit - 1) / per_unit, [&](int64_t unit, int) {
    const int64_t end = (unit + 1) * per_unit < p.num_tokens ? (unit + 1) * per_unit : p.num_tokens;
    for (int64_t token = unit * per_unit; token < end; token++) {
      const float* cos_sin = p.cos_sin_cache + p.positions[token] * p.rotary_dim;
      T* query = static_cast<T*>(p.query) + token * p.query_token_stride;
      if (token + 1 < end) fetch(query + p.query_token_stride, p.num_heads * p.head_dim);
      rotate_heads(query, p.num_heads, p.head_dim, cos_sin, p.rotary_dim, p.is_neox);
      if (p.key == nullptr) continue;
      T* key = static_cast<T*>(p.key) + token * p.key_token_stride;
      if (token + 1 < end) fetch(key + p.key_token_stride, p.num_kv_heads * p.head_dim);
      rotate_heads(key, p.num_kv_heads, p.head_dim, cos_sin, p.rotary_dim, p.is_neox);
    }
  });
  return nullptr;
}

}  // namespace

const char* rotary_embedding(const RotaryParams& p) {
  return with_float_type(p.dtype, [&](auto type) { return run<decltype(type)>(p); });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
