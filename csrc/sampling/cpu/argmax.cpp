// The most likely token of each row.
#include <cmath>

#include "../../cpu/parallel.h"
#include "../../cpu/simd.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int kBlock = 256;  // tokens whose largest logit is found at once

// The largest of n logits; NaN if any is NaN.
float largest_of(const float* logits, int n) {
  VecF largest = set1(-INFINITY), difference = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VecF x = load(logits + i);
    largest = max(largest, x);
    difference += abs(x) * zero();  // NaN for infinities, too: then the block is looked at again
  }
  float result = hmax(largest);
  const bool is_plain = hsum(difference) == 0.0f;
  for (int j = is_plain ? i : 0; j < n; j++) {
    if (!(logits[j] <= result)) result = logits[j];
    if (result != result) break;
  }
  return result;
}

// Blocks go in order, and only a larger logit replaces the best one: of equals, the first stays.
void argmax_row(const ArgmaxParams& p, int64_t row) {
  const float* logits = p.logits + row * p.logits_stride;
  float best = -INFINITY;
  int best_start = 0;
  for (int start = 0; start < p.vocab_size; start += kBlock) {
    const float largest = largest_of(logits + start, p.vocab_size - start < kBlock ? p.vocab_size - start : kBlock);
    if (largest <= best) continue;
    best = largest;
    best_start = start;
    if (best != best) break;
  }
  int id = best_start;
  while (logits[id] != best && best == best) id++;
  while (best != best && logits[id] == logits[id]) id++;
  p.token_ids[row] = id;
  p.maxima[row] = best;
}

}  // namespace

const char* argmax(const ArgmaxParams& p) {
  parallel_for(p.num_rows, [&](int64_t row, int) { argmax_row(p, row); });
  return nullptr;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
