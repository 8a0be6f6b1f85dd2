// Softmax state of query rows, and the steps that bring a block of logits into it (online softmax: Milakov and Gimelshein,
// 2018).
#pragma once
#include "../../cpu/simd.h"
#include "../params.h"
#include "key_block.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr float kLog2E = 1.44269504f;

// Weighted sum of values so far: out [rows, ld] is relative to exp(max), and sum is its denominator.
struct SoftmaxState {
  float* out;
  float* max;  // [rows]; -inf: no keys yet
  float* sum;  // [rows]
  int ld;

  void clear(int rows) const {
    float *const to = out, *const maxima = max, *const sums = sum;
    for (int i = 0, end = rows * ld; i < end; i += kLanes) store(to + i, zero());
    for (int r = 0; r < rows; r++) maxima[r] = -__builtin_inff(), sums[r] = 0.0f;
  }
};

// e^x for one x <= 0.
inline float exp_scalar(float x) { return first_lane(exp_nonpositive(set1(x))); }

inline void scale_row(float* x, float factor, int n) {
  const VecF f = set1(factor);
  for (int i = 0; i < n; i += kLanes) store(x + i, load(x + i) * f);
}

// What turns q * k into a logit.
struct LogitOptions {
  float scale, softcap;  // softcap 0: none
  bool alibi;
};

// cap * tanh(x / cap), tanh(y) = 1 - 2 / (e^2y + 1).
inline VecF soft_cap(VecF x, float cap) {
  const VecF e = exp(x * set1(2.0f / cap));
  return set1(cap) - set1(2.0f * cap) / (e + set1(1.0f));
}

// The numbers 0 .. kKeyBlock - 1.
struct LaneIndices {
  alignas(64) float value[kKeyBlock];
  LaneIndices() {
    for (int i = 0; i < kKeyBlock; i++) value[i] = static_cast<float>(i);
  }
};

// x where begin <= index < end, -inf elsewhere. Adding would keep NaN, which slots never written may hold.
inline VecF mask_outside(VecF x, VecF index, float begin, float end) {
  const VecF hidden = set1(-__builtin_inff());
  return select_less(index, set1(begin), hidden, select_less(index, set1(end), x, hidden));
}

// Brings one row's keys [begin, end) of a block, products q * k in s [kKeyBlock], into the row's max and sum, and leaves
// exp(logit - max) in s. `distance`: the block's first position less the row's. out_row [ld] is scaled to the new max.
inline void softmax_row(float* s, int begin, int end, const LogitOptions& options, float slope, float distance,
                        const LaneIndices& indices, float* out_row, int ld, float* row_max, float* row_sum) {
  const int first = begin / kLanes * kLanes;
  const VecF scale = set1(options.scale);
  VecF largest = set1(-__builtin_inff());
  for (int i = first; i < end; i += kLanes) {
    VecF x = load(s + i) * scale;
    const VecF index = load(indices.value + i);
    if (options.softcap > 0.0f) x = soft_cap(x, options.softcap);
    if (options.alibi) x = fma(set1(slope), index + set1(distance), x);
    if (i < begin || i + kLanes > end) x = mask_outside(x, index, static_cast<float>(begin), static_cast<float>(end));
    store(s + i, x);
    largest = max(largest, x);
  }
  const float block_max = hmax(largest);
  const float old_max = *row_max, new_max = old_max > block_max ? old_max : block_max;
  // Without a finite logit there is nothing to subtract; weights come out as 0, or NaN.
  const float shift = new_max == -__builtin_inff() ? 0.0f : new_max;
  VecF sum = zero();
  for (int i = first; i < end; i += kLanes) {
    const VecF weight = exp_nonpositive(load(s + i) - set1(shift));
    store(s + i, weight);
    sum += weight;
  }
  const float factor = exp_scalar(old_max - shift);
  if (factor != 1.0f) scale_row(out_row, factor, ld);
  *row_sum = *row_sum * factor + hsum(sum);
  *row_max = new_max;
}

// Merges a later partition's state into `total`, row by row.
inline void merge_rows(const SoftmaxState& total, const SoftmaxState& part, int rows) {
  for (int first = 0; first < rows; first += kLanes) {
    const int count = rows - first < kLanes ? rows - first : kLanes;
    const VecF a_max = load_partial(total.max + first, count), b_max = load_partial(part.max + first, count);
    const VecF new_max = max(a_max, b_max);
    float a_factor[kLanes], b_factor[kLanes], maximum[kLanes];
    store(a_factor, exp_nonpositive(a_max - new_max));
    store(b_factor, exp_nonpositive(b_max - new_max));
    store(maximum, new_max);
    for (int i = 0; i < count; i++) {
      const int row = first + i;
      if (part.sum[row] == 0.0f) continue;  // no weight at all
      float* a = total.out + row * total.ld;
      const float* b = part.out + row * part.ld;
      if (total.sum[row] == 0.0f) {
        for (int j = 0; j < total.ld; j += kLanes) store(a + j, load(b + j));
        total.max[row] = part.max[row];
        total.sum[row] = part.sum[row];
        continue;
      }
      const VecF fa = set1(a_factor[i]), fb = set1(b_factor[i]);
      for (int j = 0; j < total.ld; j += kLanes) store(a + j, fma(load(b + j), fb, load(a + j) * fa));
      total.sum[row] = total.sum[row] * a_factor[i] + part.sum[row] * b_factor[i];
      total.max[row] = maximum[i];
    }
  }
}

// Row `row` of a finished state: normalises it into out [head_dim] and gives its log-sum-exp, if there is an `lse`. The sink,
// if there is one, joins the sum.
template <class T>
inline void finish_row(const SoftmaxState& state, int row, const float* sink, int head_dim, T* out, float* lse) {
  float max = state.max[row], sum = state.sum[row], factor = 1.0f;
  if (sink != nullptr) {
    const float new_max = max > *sink ? max : *sink;
    factor = exp_scalar(max - new_max);
    sum = sum * factor + exp_scalar(*sink - new_max);
    max = new_max;
  }
  const VecF scale = set1(factor / sum);
  const float* from = state.out + row * state.ld;
  for (int d = 0; d < head_dim; d += kLanes) store_partial(out + d, load(from + d) * scale, head_dim - d);
  if (lse != nullptr) *lse = max + __builtin_logf(sum);
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
