// Conversions of single elements, once per instruction set. Rounding is to nearest even; FP8 saturates, as
// __NV_SATFINITE does in CUDA; NaN stays NaN.
#pragma once
#include <cstring>

#include "../common/scalar_types.h"

namespace pyengine::cpu {
namespace PE_ISA {

inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return static_cast<float>(x); }
inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | magnitude << 13);  // infinity, NaN
  const float value = bits_float(magnitude << 13) * 0x1p112f;                       // normal: only the exponent's bias moves
  if (magnitude >= 0x0400) return bits_float(sign | float_bits(value));
  return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal
}
inline float to_float(Float8E5M2 x) { return to_float(Float16{static_cast<uint16_t>(x.bits << 8)}); }
inline float to_float(Float8E4M3 x) {
  const uint16_t sign = static_cast<uint16_t>((x.bits & 0x80) << 8);
  const uint16_t magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return to_float(Float16{static_cast<uint16_t>(sign | 0x7e00)});
  return 256.0f * to_float(Float16{static_cast<uint16_t>(sign | magnitude << 7)});  // half's bias is larger by 8
}

// The magnitude of `bits` (a finite or infinite float's) rounded to `mantissa` bits, with the exponent's bias reduced so that
// the smallest normal exponent becomes 1.
inline uint32_t round_bits(uint32_t bits, int mantissa, int min_exponent) {
  const int drop = 23 - mantissa;
  const float smallest = bits_float(static_cast<uint32_t>(min_exponent + 127) << 23);
  if (bits_float(bits) < smallest) {  // subnormal: let the adder round to a multiple of the smallest step
    const float magic = bits_float(static_cast<uint32_t>(min_exponent - mantissa + 23 + 127) << 23);
    return float_bits(bits_float(bits) + magic) - float_bits(magic);
  }
  const uint32_t rounded = bits + ((1u << (drop - 1)) - 1) + ((bits >> drop) & 1);
  return (rounded >> drop) - (static_cast<uint32_t>(min_exponent + 126) << mantissa);
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, BFloat16* out) {
  const uint32_t bits = float_bits(x);
  if (x != x) {
    out->bits = 0x7fc0;
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}
inline void from_float(float x, Float16* out) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (magnitude > 0x7f800000) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (magnitude >= 0x47800000) {  // 65536 and above
    out->bits = static_cast<uint16_t>(sign | 0x7c00);
  } else {
    out->bits = static_cast<uint16_t>(sign | round_bits(magnitude, 10, -14));
  }
}
inline void from_float(float x, Float8E4M3* out) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 24 & 0x80;
  uint32_t value = 0x7f;
  if (magnitude <= 0x7f800000) value = magnitude >= 0x43e00000 ? 0x7e : round_bits(magnitude, 3, -6);  // 448 and above
  out->bits = static_cast<uint8_t>(sign | value);
}
inline void from_float(float x, Float8E5M2* out) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 24 & 0x80;
  uint32_t value = 0x7f;
  if (magnitude <= 0x7f800000) value = magnitude >= 0x47600000 ? 0x7b : round_bits(magnitude, 2, -14);  // 57344 and above
  out->bits = static_cast<uint8_t>(sign | value);
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
