// The intrinsics of <immintrin.h>; built with PE_SIMDE, their emulation by SIMDe, so that kernels for an instruction set that
// a machine lacks can be tested on it.
#pragma once
#if !defined(PE_SIMDE)
#include <immintrin.h>
#else
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstring>

#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#define __mmask16 simde__mmask16

// What SIMDe 0.7 lacks of AVX-512, from two AVX2 halves.
#define PE_HALF(name, Whole, Half)                                                            \
  static inline Half name(Whole x, int high) {                                                \
    Half half;                                                                                \
    memcpy(&half, reinterpret_cast<const char*>(&x) + (high ? sizeof half : 0), sizeof half); \
    return half;                                                                              \
  }
#define PE_JOIN(name, Whole, Half)                                           \
  static inline Whole name(Half low, Half high) {                            \
    Whole whole;                                                             \
    memcpy(&whole, &low, sizeof low);                                        \
    memcpy(reinterpret_cast<char*>(&whole) + sizeof low, &high, sizeof low); \
    return whole;                                                            \
  }
PE_HALF(pe_half_ps, simde__m512, simde__m256)
PE_HALF(pe_half_si512, simde__m512i, simde__m256i)
PE_HALF(pe_half_si256, simde__m256i, simde__m128i)
PE_JOIN(pe_join_ps, simde__m512, simde__m256)
PE_JOIN(pe_join_si512, simde__m512i, simde__m256i)
PE_JOIN(pe_join_si256, simde__m256i, simde__m128i)
#undef PE_HALF
#undef PE_JOIN

#define _mm512_extractf32x8_ps(x, high) pe_half_ps(x, high)
#define _mm512_cvtss_f32(x) _mm_cvtss_f32(_mm256_castps256_ps128(pe_half_ps(x, 0)))
#define _mm512_cvtph_ps(x) pe_join_ps(_mm256_cvtph_ps(pe_half_si256(x, 0)), _mm256_cvtph_ps(pe_half_si256(x, 1)))
#define _mm512_cvtps_ph(x, r) pe_join_si256(_mm256_cvtps_ph(pe_half_ps(x, 0), r), _mm256_cvtps_ph(pe_half_ps(x, 1), r))
#define _mm512_cvtepi32_ps(x) pe_join_ps(_mm256_cvtepi32_ps(pe_half_si512(x, 0)), _mm256_cvtepi32_ps(pe_half_si512(x, 1)))
#define _mm512_cvtps_epi32(x) pe_join_si512(_mm256_cvtps_epi32(pe_half_ps(x, 0)), _mm256_cvtps_epi32(pe_half_ps(x, 1)))
#define _mm512_cvtepu16_epi32(x) \
  pe_join_si512(_mm256_cvtepu16_epi32(pe_half_si256(x, 0)), _mm256_cvtepu16_epi32(pe_half_si256(x, 1)))
#define _mm512_cvtepi8_epi32(x) pe_join_si512(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(x, y)                                              \
  pe_join_si512(_mm256_madd_epi16(pe_half_si512(x, 0), pe_half_si512(y, 0)), \
                _mm256_madd_epi16(pe_half_si512(x, 1), pe_half_si512(y, 1)))
static inline simde__m256i pe_truncate_epi32_epi16(simde__m512i x) {
  uint32_t words[16];
  uint16_t halves[16];
  memcpy(words, &x, sizeof words);
  for (int i = 0; i < 16; i++) halves[i] = static_cast<uint16_t>(words[i]);
  simde__m256i result;
  memcpy(&result, halves, sizeof result);
  return result;
}
#define _mm512_cvtepi32_epi16(x) pe_truncate_epi32_epi16(x)
#endif
