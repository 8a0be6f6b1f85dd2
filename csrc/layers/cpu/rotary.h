// Rotary position embedding (Su et al., 2021) of one token's heads, in place, in NeoX's layout (halves) or GPT-J's
// (neighbouring pairs). Once per instruction set.
#pragma once
#include "../../cpu/simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

// (a, b) -> (a cos - b sin, b cos + a sin) for element i of the halves and i + half.
template <class T>
inline void rotate_halves(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i;
    const VecF a = load_partial(x + i, n), b = load_partial(x + half + i, n);
    const VecF c = load_partial(cos + i, n), s = load_partial(sin + i, n);
    store_partial(x + i, fnma(b, s, a * c), n);
    store_partial(x + half + i, fma(a, s, b * c), n);
  }
}

template <class T>
inline void rotate_pairs(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i++) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    from_float(a * cos[i] - b * sin[i], x + 2 * i);
    from_float(b * cos[i] + a * sin[i], x + 2 * i + 1);
  }
}

// heads [num_heads, head_dim]; cos_sin [rotary_dim]: the position's cosines, then its sines
template <class T>
inline void rotate_heads(T* heads, int num_heads, int head_dim, const float* cos_sin, int rotary_dim, bool is_neox) {
  const int half = rotary_dim / 2;
  for (int h = 0; h < num_heads; h++, heads += head_dim) {
    if (is_neox) {
      rotate_halves(heads, cos_sin, cos_sin + half, half);
    } else {
      rotate_pairs(heads, cos_sin, cos_sin + half, half);
    }
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
