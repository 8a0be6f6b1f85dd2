// Rows of elements, loaded and stored as fp32 in pieces of kWidth neighbours: one memory access a piece.
#pragma once
#include "cuda_port.h"

namespace pyengine::cuda {

template <int kBytes>
struct RawBytes;
template <>
struct RawBytes<2> {
  using Type = uint16_t;
};
template <>
struct RawBytes<4> {
  using Type = uint32_t;
};
template <>
struct RawBytes<8> {
  using Type = uint2;
};
template <>
struct RawBytes<16> {
  using Type = uint4;
};

template <int kWidth, typename T>
PYENGINE_DEVICE void load_elements(float (&x)[kWidth], const T* p) {
  T raw[kWidth];
  const auto bytes = load_vector<typename RawBytes<kWidth * sizeof(T)>::Type>(p);
  memcpy(raw, &bytes, sizeof raw);
#pragma unroll
  for (int i = 0; i < kWidth; i++) x[i] = to_float(raw[i]);
}

template <int kWidth, typename T>
PYENGINE_DEVICE void store_elements(T* p, const float (&x)[kWidth]) {
  T raw[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; i++) raw[i] = from_float<T>(x[i]);
  typename RawBytes<kWidth * sizeof(T)>::Type bytes;
  memcpy(&bytes, raw, sizeof raw);
  store_vector(p, bytes);
}

// Whether rows that start at `p`, `stride` elements apart and `length` long, divide into pieces of `bytes`.
inline bool divides_into(const void* p, int64_t stride, int64_t length, int element_bytes, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 && stride * element_bytes % bytes == 0 &&
         length * element_bytes % bytes == 0;
}

// Calls function(T{}) with the type of `dtype`, which is one of the three that models compute in.
template <typename Function>
const char* with_float_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kF32:
      return function(float{});
    case DType::kF16:
      return function(Float16{});
    case DType::kBF16:
      return function(BFloat16{});
    default:
      return "the type must be float32, float16 or bfloat16";
  }
}

}  // namespace pyengine::cuda
