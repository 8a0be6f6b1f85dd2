// Rotary position embedding (Su et al., 2021), in place, in NeoX's layout (halves) or GPT-J's (neighbouring pairs).
#include "../../cpu/parallel.h"
#include "../../cpu/simd.h"
#include "../../cpu/with_type.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kElementsPerUnit = 8 * 1024;

// (a, b) -> (a cos - b sin, b cos + a sin) for element i of the halves and i + half.
template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i;
    const VecF a = load_partial(x + i, n), b = load_partial(x + half + i, n);
    const VecF c = load_partial(cos + i, n), s = load_partial(sin + i, n);
    store_partial(x + i, fnma(b, s, a * c), n);
    store_partial(x + half + i, fma(a, s, b * c), n);
  }
}

template <class T>
void rotate_pairs(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i++) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    from_float(a * cos[i] - b * sin[i], x + 2 * i);
    from_float(b * cos[i] + a * sin[i], x + 2 * i + 1);
  }
}

template <class T>
void rotate_heads(T* heads, int num_heads, int head_dim, const float* cos_sin, int rotary_dim, bool is_neox) {
  const int half = rotary_dim / 2;
  for (int h = 0; h < num_heads; h++, heads += head_dim) {
    if (is_neox) {
      rotate_halves(heads, cos_sin, cos_sin + half, half);
    } else {
      rotate_pairs(heads, cos_sin, cos_sin + half, half);
    }
  }
}

template <class T>
const char* run(const RotaryParams& p) {
  const int64_t row = int64_t{p.num_heads + p.num_kv_heads} * p.head_dim;
  const int64_t per_unit = kElementsPerUnit / (row + 1) + 1;
  parallel_for((p.num_tokens + per_unit - 1) / per_unit, [&](int64_t unit, int) {
    const int64_t end = (unit + 1) * per_unit < p.num_tokens ? (unit + 1) * per_unit : p.num_tokens;
    for (int64_t token = unit * per_unit; token < end; token++) {
      const float* cos_sin = p.cos_sin_cache + p.positions[token] * p.rotary_dim;
      rotate_heads(static_cast<T*>(p.query) + token * p.query_token_stride, p.num_heads, p.head_dim, cos_sin, p.rotary_dim,
                   p.is_neox);
      if (p.key != nullptr) {
        rotate_heads(static_cast<T*>(p.key) + token * p.key_token_stride, p.num_kv_heads, p.head_dim, cos_sin, p.rotary_dim,
                     p.is_neox);
      }
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
