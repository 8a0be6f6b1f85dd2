// Four blocks of 32 values rounded at once on AVX2: what a block alone waits for, its largest value, two divisions and its sum,
// is done for all of them together. The bits are quantize_block's.
#pragma once
#include "format_traits.h"
#include "int8_dot.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kBlocksAtOnce = 4;

// Row `b` of the result has, in each half of 128 bits, op over that half of x[b]: [x0, x1, x2, x3 | x0, x1, x2, x3].
template <class Op>
inline __m256i reduce_four(const __m256i (&x)[kBlocksAtOnce], const Op& op) {
  const __m256i first = op(_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]));
  const __m256i second = op(_mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3]));
  return op(_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
}

// integers[i]'s lanes are values 8 i to 8 i + 7 of a block. Writes them and returns lanes whose sums, over each half of 128
// bits, are those of the first and second 16 values.
inline __m256i store_block(int8_t* q, const __m256i (&integers)[4]) {
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(integers[0], integers[1]), _mm256_packs_epi32(integers[2], integers[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), ordered);
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), ordered), _mm256_set1_epi16(1));
}
inline __m256i store_block(int16_t* q, const __m256i (&integers)[4]) {
  __m256i words[2];
  for (int half = 0; half < 2; half++) {
    words[half] = _mm256_permute4x64_epi64(_mm256_packs_epi32(integers[2 * half], integers[2 * half + 1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q) + half, words[half]);
  }
  const __m256i first = _mm256_madd_epi16(words[0], _mm256_set1_epi16(1)),
                second = _mm256_madd_epi16(words[1], _mm256_set1_epi16(1));
  const __m256i low = _mm256_permute2x128_si256(first, second, 0x20), high = _mm256_permute2x128_si256(first, second, 0x31);
  return _mm256_add_epi32(low, high);
}

struct RoundedBlocks {
  alignas(16) float scale[kBlocksAtOnce];
  alignas(32) int32_t sums[2][kBlocksAtOnce];  // of the first and second 16 integers
};

// Blocks at x, x + 32, ... to q, q + stride, ... False, with nothing done, where one of them is all but zero or not finite.
template <class T, class Value>
inline bool quantize_four_blocks(const T* x, Value* q, int64_t stride, RoundedBlocks& blocks) {
  constexpr int kVecs = kSubBlock / kLanes;
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7fffffff);
  __m256i largest[kBlocksAtOnce];
  for (int b = 0; b < kBlocksAtOnce; b++) {
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < kVecs; i++) {
      const __m256i bits = _mm256_castps_si256(load(x + b * kSubBlock + i * kLanes).v);
      most = _mm256_max_epi32(most, _mm256_and_si256(bits, magnitude_bits));
    }
    largest[b] = most;
  }
  const __m256i halves = reduce_four(largest, [](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); });
  const __m128i bits = _mm_max_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  // The bits of 2^-100 and of infinity.
  const __m128i small = _mm_cmpgt_epi32(_mm_set1_epi32(0x0d800000), bits),
                huge = _mm_cmpgt_epi32(bits, _mm_set1_epi32(0x7f7fffff));
  if (_mm_movemask_epi8(_mm_or_si128(small, huge)) != 0) return false;  // not testz, which SIMDe 0.7 has wrong
  const __m128 magnitude = _mm_castsi128_ps(bits);
  alignas(16) float inverse[kBlocksAtOnce];
  _mm_store_ps(blocks.scale, _mm_div_ps(magnitude, _mm_set1_ps(127.0f)));
  _mm_store_ps(inverse, _mm_div_ps(_mm_set1_ps(127.0f), magnitude));
  __m256i sums[kBlocksAtOnce];
  for (int b = 0; b < kBlocksAtOnce; b++) {
    const VecF factor = set1(inverse[b]);
    __m256i integers[kVecs];
    for (int i = 0; i < kVecs; i++) integers[i] = _mm256_cvtps_epi32((load(x + b * kSubBlock + i * kLanes) * factor).v);
    sums[b] = store_block(q + b * stride, integers);
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(blocks.sums),
                     reduce_four(sums, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }));
  return true;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
