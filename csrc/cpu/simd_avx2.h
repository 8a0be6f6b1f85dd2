// VecF on AVX2 + FMA + F16C: 8 lanes.
#pragma once
#include "scalar_convert.h"
#include "x86_intrinsics.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kLanes = 8;

struct VecF {
  __m256 v;
};

inline VecF zero() { return {_mm256_setzero_ps()}; }
inline VecF set1(float x) { return {_mm256_set1_ps(x)}; }

inline __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_8_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

inline VecF load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline VecF load(const Float16* p) { return {_mm256_cvtph_ps(load_16_bytes(p))}; }
inline VecF load(const BFloat16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16))};
}
inline VecF load(const int8_t* p) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p)))}; }
inline VecF load(const Float8E5M2* p) { return {_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_8_bytes(p)), 8))}; }
inline VecF load(const Float8E4M3* p) {
  const __m128i x = _mm_cvtepu8_epi16(load_8_bytes(p));
  const __m128i magnitude = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7c00));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
  const __m128i half = _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16(magnitude, 7));
  return {_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f))};  // half's bias is larger by 8
}

inline void store(float* p, VecF x) { _mm256_storeu_ps(p, x.v); }
inline void store(Float16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat16* p, VecF x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline VecF operator+(VecF a, VecF b) { return {_mm256_add_ps(a.v, b.v)}; }
inline VecF operator-(VecF a, VecF b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline VecF operator*(VecF a, VecF b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline VecF operator/(VecF a, VecF b) { return {_mm256_div_ps(a.v, b.v)}; }
inline VecF fma(VecF a, VecF b, VecF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline VecF fnma(VecF a, VecF b, VecF c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
inline VecF min(VecF a, VecF b) { return {_mm256_min_ps(a.v, b.v)}; }
inline VecF max(VecF a, VecF b) { return {_mm256_max_ps(a.v, b.v)}; }
inline VecF abs(VecF a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline VecF sqrt(VecF a) { return {_mm256_sqrt_ps(a.v)}; }

// To the nearest whole number, for |x| < 2^22.
inline VecF round_to_int(VecF x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for whole n in [-126, 128], 2^128 being infinity; any value for other n.
inline VecF mul_pow2(VecF x, VecF n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(exponent))};
}
// x where `key` >= bound or is NaN, 0 elsewhere.
inline VecF zero_below(VecF x, VecF key, float bound) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(key.v, _mm256_set1_ps(bound), _CMP_LT_OQ), x.v)};
}

// a < b ? yes : no, lane by lane; NaN compares false.
inline VecF select_less(VecF a, VecF b, VecF yes, VecF no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}

inline float first_lane(VecF x) { return _mm256_cvtss_f32(x.v); }

// The order of the sum is fixed: halves, then halves of them.
inline float hsum(VecF x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float hmax(VecF x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
