// fp16, bf16 and FP8 on the CPU, rounding as the GPU does: to nearest, ties to even.
#pragma once
#include <cstdint>
#include <cstring>

#include "../common/scalar_types.h"

namespace pyengine::emulation {

inline float float_of_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t bits_of_float(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float to_float(BFloat16 x) { return float_of_bits(uint32_t(x.bits) << 16); }
inline BFloat16 to_bfloat16(float f) {
  const uint32_t u = bits_of_float(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

inline float to_float(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of_bits(sign | 0x70000000u | magnitude);  // infinity or NaN
  return float_of_bits(bits_of_float(float_of_bits(magnitude) * 0x1p112f) | sign);  // the product rebases the exponent, exactly
}

// Rounds |f| to a format with `mantissa` stored bits whose smallest normal is 2^min_exponent: as an integer count of the
// format's spacing, with the exponent field above it. Larger values run on into larger exponents.
inline uint32_t round_to_format(float f, int mantissa, int min_exponent) {
  const uint32_t u = bits_of_float(f) & 0x7fffffffu;
  const int exponent = static_cast<int>(u >> 23) - 127;
  if (exponent < min_exponent) {  // subnormal: a multiple of 2^(min_exponent - mantissa), which adding 1.5 * 2^k rounds to
    const float magic = float_of_bits(static_cast<uint32_t>(min_exponent - mantissa + 23 + 127) << 23) * 1.5f;
    return bits_of_float(float_of_bits(u) + magic) - bits_of_float(magic);
  }
  const int dropped = 23 - mantissa;
  const uint32_t rounded = u + (1u << (dropped - 1)) - 1 + (u >> dropped & 1);
  return (rounded >> dropped) - (static_cast<uint32_t>(min_exponent - 1 + 127) << mantissa);
}

inline Float16 to_float16(float f) {
  const uint32_t u = bits_of_float(f), sign = u >> 16 & 0x8000u;
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  const uint32_t r = round_to_format(f, 10, -14);
  return {static_cast<uint16_t>(sign | (r > 0x7c00u ? 0x7c00u : r))};
}

// FP8 with saturation to the largest finite value; NaN stays NaN.
inline uint8_t to_fp8_e4m3(float f) {
  const uint32_t u = bits_of_float(f), sign = u >> 24 & 0x80u;
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7f;
  const uint32_t r = (u & 0x7fffffffu) >= 0x7f800000u ? 0x7e : round_to_format(f, 3, -6);
  return static_cast<uint8_t>(sign | (r > 0x7e ? 0x7e : r));
}
inline uint8_t to_fp8_e5m2(float f) {
  const uint32_t u = bits_of_float(f), sign = u >> 24 & 0x80u;
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7f;
  const uint32_t r = (u & 0x7fffffffu) >= 0x7f800000u ? 0x7b : round_to_format(f, 2, -14);
  return static_cast<uint8_t>(sign | (r > 0x7b ? 0x7b : r));
}

}  // namespace pyengine::emulation
