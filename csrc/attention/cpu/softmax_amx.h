// Softmax of a row's logits in a partition, in one piece. Weights come out rounded to bf16, their sum before they are.
#pragma once
#include "bf16_tiles.h"
#include "softmax_rows.h"
#include "tile_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

// Lanes [16 i, 16 i + 16) of a row that lie in `keys`.
PE_ALWAYS_INLINE __mmask16 lanes_within(KeyRange keys, int i) {
  const auto below = [i](int end) { return end <= 16 * i ? 0u : end >= 16 * i + 16 ? 0xffffu : (1u << (end - 16 * i)) - 1; };
  return static_cast<__mmask16>(below(keys.end) & ~below(keys.begin));
}

inline float largest_logit(const float* s, KeyRange keys) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  VecF a{lowest}, b{lowest};
  const int first = (keys.begin + 15) / 16, end = keys.end / 16;
  int i = first;
  for (; i + 1 < end; i += 2) {
    a = max(a, load(s + 16 * i));
    b = max(b, load(s + 16 * i + 16));
  }
  if (i < end) a = max(a, load(s + 16 * i));
  // Vectors of which the row sees a part of the lanes, at either end.
  for (const int edge : {keys.begin / 16, end}) {
    const __mmask16 lanes = edge >= first && edge < end ? 0 : lanes_within(keys, edge);
    if (lanes != 0) b = max(b, VecF{_mm512_mask_loadu_ps(lowest, lanes, s + 16 * edge)});
  }
  return hmax(max(a, b));
}

// 2^x for x <= 0 or NaN, relative error below 9e-5 (minimax polynomial of the fraction), rounded to bf16; below -126, and in
// lanes not asked for, 0. A NaN need not stay one: the sum of all weights is NaN anyway.
PE_ALWAYS_INLINE VecF bf16_exp2_nonpositive(__m512 x, __mmask16 lanes, __m512& sum) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(7.7067041988e-02f), r, _mm512_set1_ps(2.2764499121e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9511678641e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_maskz_scalef_ps(_mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, x);
  sum = _mm512_add_ps(sum, p);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000)))};
}

// The weights of one row's logits s [kPartition] for steps [first, end), of which the row sees `keys` alone. put(step, a, b)
// takes the weights of both halves, upper 16 bits of each lane. Returns their sum.
template <class Put>
PE_ALWAYS_INLINE float weigh_row(const float* s, KeyRange keys, int first, int end, float factor, float shift, const Put& put) {
  const __m512 scale = _mm512_set1_ps(factor), minus_shift = _mm512_set1_ps(-shift);
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int step = first; step < end; step++) {
    const int key = step * kStep;
    if (key + kStep <= keys.begin || key >= keys.end) {
      put(step, zero(), zero());
      continue;
    }
    const bool whole = key >= keys.begin && key + kStep <= keys.end;
    const __mmask16 low = whole ? 0xffff : lanes_within(keys, 2 * step),
                    high = whole ? 0xffff : lanes_within(keys, 2 * step + 1);
    const __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(s + key), scale, minus_shift);
    const __m512 y = _mm512_fmadd_ps(_mm512_loadu_ps(s + key + kHalfStep), scale, minus_shift);
    put(step, bf16_exp2_nonpositive(x, low, sums[0]), bf16_exp2_nonpositive(y, high, sums[1]));
  }
  return hsum(VecF{_mm512_add_ps(sums[0], sums[1])});
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
