// Changes of logits before a draw: penalties and the grammar's bitmask.
#include "../../common/cuda_port.h"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256;

// Grid: (pieces of the vocabulary, num_rows).
__global__ void __launch_bounds__(kThreads) apply_penalties_kernel(PenaltiesParams p) {
  const int token = blockIdx.x * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (token >= p.vocab_size) return;
  const int count = p.output_counts[row * p.output_counts_stride + token];
  if (count == 0 && !p.prompt_mask[row * p.prompt_mask_stride + token]) return;
  float* logit = p.logits + row * p.logits_stride + token;
  const float repetition = p.repetition[row];
  float x = *logit > 0.0f ? *logit / repetition : *logit * repetition;
  x -= p.frequency[row] * static_cast<float>(count);
  if (count > 0) x -= p.presence[row];
  *logit = x;
}

// Grid: (pieces of the vocabulary, num_rows).
__global__ void __launch_bounds__(kThreads) apply_bitmask_kernel(BitmaskParams p) {
  const int token = blockIdx.x * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (token >= p.vocab_size) return;
  const uint32_t word = static_cast<uint32_t>(p.bitmask[row * p.bitmask_stride + token / 32]);
  if (!(word >> (token % 32) & 1)) p.logits[row * p.logits_stride + token] = -INFINITY;
}

}  // namespace

const char* apply_penalties(const PenaltiesParams& p, void* stream) {
  return launch(apply_penalties_kernel, dim3((p.vocab_size + kThreads - 1) / kThreads, p.num_rows), dim3(kThreads), 0, stream,
                p);
}

const char* apply_bitmask(const BitmaskParams& p, void* stream) {
  return launch(apply_bitmask_kernel, dim3((p.vocab_size + kThreads - 1) / kThreads, p.num_rows), dim3(kThreads), 0, stream, p);
}

}  // namespace pyengine::cuda
