// VecF on AVX-512 (F, BW, DQ, VL): 16 lanes.
#pragma once
#include "scalar_convert.h"
#include "x86_intrinsics.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kLanes = 16;

struct VecF {
  __m512 v;
};

inline VecF zero() { return {_mm512_setzero_ps()}; }
inline VecF set1(float x) { return {_mm512_set1_ps(x)}; }

inline __m256i load_32_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

inline VecF load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline VecF load(const Float16* p) { return {_mm512_cvtph_ps(load_32_bytes(p))}; }
inline VecF load(const BFloat16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(p)), 16))};
}
inline VecF load(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(p)))}; }
inline VecF load(const Float8E5M2* p) {
  return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_16_bytes(p)), 8))};
}
inline VecF load(const Float8E4M3* p) {
  const __m256i x = _mm256_cvtepu8_epi16(load_16_bytes(p));
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7c00));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(magnitude, 7));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};  // half's bias is larger by 8
}

inline void store(float* p, VecF x) { _mm512_storeu_ps(p, x.v); }
inline void store(Float16* p, VecF x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat16* p, VecF x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}

inline VecF operator+(VecF a, VecF b) { return {_mm512_add_ps(a.v, b.v)}; }
inline VecF operator-(VecF a, VecF b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline VecF operator*(VecF a, VecF b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline VecF operator/(VecF a, VecF b) { return {_mm512_div_ps(a.v, b.v)}; }
inline VecF fma(VecF a, VecF b, VecF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline VecF fnma(VecF a, VecF b, VecF c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline VecF min(VecF a, VecF b) { return {_mm512_min_ps(a.v, b.v)}; }
inline VecF max(VecF a, VecF b) { return {_mm512_max_ps(a.v, b.v)}; }
inline VecF abs(VecF a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
inline VecF sqrt(VecF a) { return {_mm512_sqrt_ps(a.v)}; }

// To the nearest whole number, for |x| < 2^22.
inline VecF round_to_int(VecF x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for whole n; beyond the exponents there are, 0 or infinity.
inline VecF mul_pow2(VecF x, VecF n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// x where `key` >= bound or is NaN, 0 elsewhere.
inline VecF zero_below(VecF x, VecF key, float bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), x.v)};
}

// a < b ? yes : no, lane by lane; NaN compares false.
inline VecF select_less(VecF a, VecF b, VecF yes, VecF no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

inline float first_lane(VecF x) { return _mm512_cvtss_f32(x.v); }

// The order of the sum is fixed: halves, then halves of them.
inline float hsum(VecF x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float hmax(VecF x) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
