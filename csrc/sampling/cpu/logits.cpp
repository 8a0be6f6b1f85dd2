// Changes of logits before a draw: penalties and the grammar's bitmask.
#include <cmath>

#include "../../cpu/parallel.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

void penalize_row(const PenaltiesParams& p, int64_t row) {
  const bool* in_prompt = p.prompt_mask + row * p.prompt_mask_stride;
  const int32_t* counts = p.output_counts + row * p.output_counts_stride;
  float* logits = p.logits + row * p.logits_stride;
  for (int token = 0; token < p.vocab_size; token++) {
    if (counts[token] == 0 && !in_prompt[token]) continue;
    float x = logits[token] > 0.0f ? logits[token] / p.repetition[row] : logits[token] * p.repetition[row];
    x -= p.frequency[row] * static_cast<float>(counts[token]);
    if (counts[token] > 0) x -= p.presence[row];
    logits[token] = x;
  }
}

}  // namespace

const char* apply_penalties(const PenaltiesParams& p) {
  parallel_for(p.num_rows, [&](int64_t row, int) { penalize_row(p, row); });
  return nullptr;
}

const char* apply_bitmask(const BitmaskParams& p) {
  parallel_for(p.num_rows, [&](int64_t row, int) {
    const int32_t* bits = p.bitmask + row * p.bitmask_stride;
    float* logits = p.logits + row * p.logits_stride;
    for (int token = 0; token < p.vocab_size; token++) {
      if (!(static_cast<uint32_t>(bits[token / 32]) >> (token % 32) & 1)) logits[token] = -INFINITY;
    }
  });
  return nullptr;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
