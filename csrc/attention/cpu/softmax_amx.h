// Softmax of a row's logits in a partition, in one piece: weights come out as tiles of bf16, for their product with the values.
#pragma once
#include "bf16_tiles.h"
#include "softmax.h"
#include "tile_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

// How logits go into 2^x: weight = 2^(logit * factor - shift). They may have been brought into their final form before.
struct LogitForm {
  bool transformed;  // soft-capped or with ALiBi's bias, else bare products of query and key
  float to_natural;  // times this, in the units of SoftmaxState::max
  float factor;      // times this, for 2^x

  explicit LogitForm(const LogitOptions& options)
      : transformed(options.softcap > 0.0f || options.alibi || !(options.scale > 0.0f)),
        to_natural(transformed ? 1.0f : options.scale),
        factor(to_natural * 1.44269504f) {}
};

// Lanes [16 i, 16 i + 16) of a row that lie in `keys`.
PE_ALWAYS_INLINE __mmask16 lanes_within(KeyRange keys, int i) {
  const auto below = [i](int end) { return end <= 16 * i ? 0u : end >= 16 * i + 16 ? 0xffffu : (1u << (end - 16 * i)) - 1; };
  return static_cast<__mmask16>(below(keys.end) & ~below(keys.begin));
}

// Brings products q * k in s [kPartition] into their final form. `distance`: the partition's first position less the row's.
inline void transform_logits(float* s, KeyRange keys, const LogitOptions& options, float slope, float distance,
                             const LaneIndices& indices) {
  for (int i = keys.begin / kLanes * kLanes; i < keys.end; i += kLanes) {
    VecF x = load(s + i) * set1(options.scale);
    if (options.softcap > 0.0f) x = soft_cap(x, options.softcap);
    if (options.alibi) x = fma(set1(slope), load(indices.value) + set1(distance + static_cast<float>(i)), x);
    store(s + i, x);
  }
}

inline float largest_logit(const float* s, KeyRange keys) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  VecF a{lowest}, b{lowest};
  const int first = (keys.begin + 15) / 16, end = keys.end / 16;
  for (int i = first; i < end; i++) {
    a = max(a, load(s + 16 * i));
    if (++i < end) b = max(b, load(s + 16 * i));
  }
  // What only a part of a vector's lanes see, at either end.
  for (const int i : {keys.begin / 16, end}) {
    if (16 * i >= keys.end || (i >= first && i < end)) continue;
    a = max(a, VecF{_mm512_mask_loadu_ps(lowest, lanes_within(keys, i), s + 16 * i)});
  }
  return hmax(max(a, b));
}

// 2^x for x <= 0 or NaN; below -126, 0. With weights in one part, relative error below 9e-5, else 2e-7. Minimax polynomials of
// the fraction.
template <int PARTS>
PE_ALWAYS_INLINE __m512 exp2_nonpositive(__m512 x, __mmask16 lanes) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p;
  if constexpr (PARTS == 1) {
    p = _mm512_fmadd_ps(_mm512_set1_ps(7.7067041988e-02f), r, _mm512_set1_ps(2.2764499121e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9511678641e-01f));
  } else {
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.8671300699e-03f), r, _mm512_set1_ps(9.0170303224e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5799913104e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4016445016e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9315131180e-01f));
  }
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, x);
}

// The weights of one row's logits s [kPartition], to the row at `to` of tiles [kKeySteps][PARTS]; steps [first, end) are
// written, of which the row sees `keys` alone. Returns their sum.
template <int PARTS>
inline float store_weights(const float* s, KeyRange keys, int first, int end, float factor, float shift, uint8_t* to) {
  const __m512 scale = _mm512_set1_ps(factor), minus_shift = _mm512_set1_ps(-shift);
  VecF sums[2] = {zero(), zero()};
  to += first * PARTS * kTileBytes;
  for (int step = first; step < end; step++, to += PARTS * kTileBytes) {
    const int key = step * kStep;
    if (key + kStep <= keys.begin || key >= keys.end) {
      store_zero_parts<PARTS>(to);
      continue;
    }
    const bool whole = key >= keys.begin && key + kStep <= keys.end;
    const __mmask16 low = whole ? 0xffff : lanes_within(keys, 2 * step),
                    high = whole ? 0xffff : lanes_within(keys, 2 * step + 1);
    const __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(s + key), scale, minus_shift);
    const __m512 y = _mm512_fmadd_ps(_mm512_loadu_ps(s + key + 16), scale, minus_shift);
    const VecF a{exp2_nonpositive<PARTS>(x, low)}, b{exp2_nonpositive<PARTS>(y, high)};
    sums[0] += a;
    sums[1] += b;
    store_parts<PARTS>(a, b, to);
  }
  return hsum(sums[0] + sums[1]);
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
