// Rotary position embedding (Su et al., 2021) of one head by one warp.
#pragma once
#include "../../common/cuda_vector.cuh"

namespace pyengine::cuda {

// (a, b) -> (a cos - b sin, b cos + a sin)
PYENGINE_DEVICE void rotate(float& a, float& b, float cos, float sin) {
  const float rotated = a * cos - b * sin;
  b = b * cos + a * sin;
  a = rotated;
}

// Rotates x [head_dim] in place. cos_sin [rotary_dim]: the position's cosines, then its sines. Pairs are the halves' elements
// i and i + rotary_dim / 2 (NeoX) or neighbours (GPT-J). kWidth elements of each half at a time; it divides rotary_dim / 2.
template <int kWidth, typename T>
PYENGINE_DEVICE void rotate_head(T* x, const float* cos_sin, int rotary_dim, bool is_neox, int lane) {
  const int half = rotary_dim / 2;
  for (int i = lane * kWidth; i < half; i += 32 * kWidth) {
    float a[kWidth], b[kWidth];
    if (is_neox) {
      load_elements(a, x + i);
      load_elements(b, x + half + i);
      for (int j = 0; j < kWidth; j++) rotate(a[j], b[j], cos_sin[i + j], cos_sin[half + i + j]);
      store_elements(x + i, a);
      store_elements(x + half + i, b);
    } else {
      load_elements(a, x + 2 * i);
      load_elements(b, x + 2 * i + kWidth);
      if constexpr (kWidth == 1) {
        rotate(a[0], b[0], cos_sin[i], cos_sin[half + i]);
      } else {
        for (int j = 0; j < kWidth; j += 2) {
          rotate(a[j], a[j + 1], cos_sin[i + j / 2], cos_sin[half + i + j / 2]);
          rotate(b[j], b[j + 1], cos_sin[i + kWidth / 2 + j / 2], cos_sin[half + i + kWidth / 2 + j / 2]);
        }
      }
      store_elements(x + 2 * i, a);
      store_elements(x + 2 * i + kWidth, b);
    }
  }
}

// Elements [column, column + kWidth) of x, rotated, without touching memory.
template <int kWidth, typename T>
PYENGINE_DEVICE void load_rotated(float (&out)[kWidth], const T* x, int column, const float* cos_sin, int rotary_dim,
                                  bool is_neox) {
  const int half = rotary_dim / 2;
  load_elements(out, x + column);
  for (int j = 0; j < kWidth; j++) {
    const int i = column + j;
    if (i >= rotary_dim) continue;
    const bool second = is_neox ? i >= half : i & 1;
    const int pair = is_neox ? i % half : i / 2, other = is_neox ? (second ? i - half : i + half) : i ^ 1;
    float a = second ? to_float(x[other]) : out[j], b = second ? out[j] : to_float(x[other]);
    rotate(a, b, cos_sin[pair], cos_sin[half + pair]);
    out[j] = to_float(from_float<T>(second ? b : a));  // rounded as if it had been stored in between
  }
}

}  // namespace pyengine::cuda
