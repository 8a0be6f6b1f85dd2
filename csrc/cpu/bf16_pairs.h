// Values as products of bf16 tiles take them: pair by pair, the k-th of a step's first half beside the k-th of its second.
#pragma once
#include "simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

// first[0], second[0], first[1], ... of 16 bf16 values each.
inline __attribute__((always_inline)) __m512i pair_words(__m256i first, __m256i second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// The same of fp32's upper halves.
inline __attribute__((always_inline)) __m512i pair_upper_words(VecF first, VecF second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first.v), 16),
                                 _mm512_castps_si512(second.v));
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
