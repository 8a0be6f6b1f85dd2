// Softmax of several rows' logits in a block of keys, in 2^x: the rows' maxima first, then all that comes from them.
#pragma once
#include "softmax.h"

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
        factor(to_natural * kLog2E) {}
};

// Brings products q * k in s, of one row's `keys`, into their final form. `distance`: the first position of s less the row's.
inline void transform_logits(float* s, KeyRange keys, const LogitOptions& options, float slope, float distance,
                             const LaneIndices& indices) {
  for (int i = keys.begin / kLanes * kLanes; i < keys.end; i += kLanes) {
    VecF x = load(s + i) * set1(options.scale);
    if (options.softcap > 0.0f) x = soft_cap(x, options.softcap);
    if (options.alibi) x = fma(set1(slope), load(indices.value) + set1(distance + static_cast<float>(i)), x);
    store(s + i, x);
  }
}

// 2^x for x <= 0 or NaN, relative error below 2e-7 (minimax polynomial of the fraction, exact at 0); 0 below -126.5, where n is
// -127, whose power mul_pow2 makes 0.
inline VecF exp2_nonpositive(VecF x) {
  x = max(set1(-127.0f), x);
  const VecF n = round_to_int(x), r = x - n;
  VecF p = set1(1.3264727247e-3f);
  p = fma(p, r, set1(9.6715126882e-3f));
  p = fma(p, r, set1(5.5507337436e-2f));
  p = fma(p, r, set1(2.4022242085e-1f));
  p = fma(p, r, set1(6.9314697760e-1f));
  p = fma(p, r, set1(1.0f));
  return mul_pow2(p, n);
}

// The largest of a row's logits s; what shares a vector with `keys` at either end and is not one of them becomes -inf.
inline float largest_of_keys(float* s, KeyRange keys, const LaneIndices& indices) {
  const int first = keys.begin / kLanes * kLanes, last = (keys.end - 1) / kLanes * kLanes;
  const int edges[2] = {first, last};
  for (const int edge : edges) {
    if (edge >= keys.begin && edge + kLanes <= keys.end) continue;
    store(s + edge, mask_outside(load(s + edge), load(indices.value + edge), static_cast<float>(keys.begin),
                                 static_cast<float>(keys.end)));
  }
  VecF a = set1(-__builtin_inff()), b = a;
  int i = first;
  for (; i < last; i += 2 * kLanes) {
    a = max(a, load(s + i));
    b = max(b, load(s + i + kLanes));
  }
  if (i == last) a = max(a, load(s + i));
  return hmax(max(a, b));
}

// weight = 2^(logit * factor - shift) of a row's keys, in place; 0 for what shares a vector with them. Returns their sum.
inline float weigh_keys(float* s, KeyRange keys, float factor, float shift) {
  const VecF scale = set1(factor), minus_shift = set1(-shift);
  VecF sum = zero();
  for (int i = keys.begin / kLanes * kLanes; i < keys.end; i += kLanes) {
    const VecF weight = exp2_nonpositive(fma(load(s + i), scale, minus_shift));
    store(s + i, weight);
    sum += weight;
  }
  return hsum(sum);
}

// Brings the logits s [count, kKeyBlock] of a few rows into their state, and leaves the weights, relative to exp(max), in s.
// Row r sees `visible[r]` of the keys; where that is nothing, all stays as it is. The state's `out` is scaled to the new max.
template <int MAX_ROWS>
inline void weigh_rows(float* s, int count, const KeyRange* visible, const LogitForm& form, const LaneIndices& indices,
                       const SoftmaxState& state) {
  constexpr int kVectors = (MAX_ROWS + kLanes - 1) / kLanes;
  float factor[kVectors * kLanes], shift[kVectors * kLanes];
  for (int i = 0; i < count; i += kLanes) {
    store(factor + i, zero());
    store(shift + i, zero());
  }
  for (int r = 0; r < count; r++) {
    if (visible[r].empty()) continue;
    const float block_max = largest_of_keys(s + r * kKeyBlock, visible[r], indices) * form.to_natural;
    const float old_max = state.max[r], new_max = old_max > block_max ? old_max : block_max;
    // Without a finite logit there is nothing to subtract; weights come out as 0, or NaN.
    shift[r] = new_max == -__builtin_inff() ? 0.0f : new_max;
    factor[r] = old_max - shift[r];
    state.max[r] = new_max;
  }
  for (int i = 0; i < count; i += kLanes) {
    store(factor + i, exp2_nonpositive(load(factor + i) * set1(kLog2E)));
    store(shift + i, load(shift + i) * set1(kLog2E));
  }
  for (int r = 0; r < count; r++) {
    if (visible[r].empty()) continue;
    const float sum = weigh_keys(s + r * kKeyBlock, visible[r], form.factor, shift[r]);
    if (factor[r] != 1.0f) scale_row(state.out + r * state.ld, factor[r], state.ld);
    state.sum[r] = state.sum[r] * factor[r] + sum;
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
