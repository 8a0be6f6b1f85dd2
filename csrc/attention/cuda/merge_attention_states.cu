// Merges attention over disjoint sets of keys: each part's output counts by its share of the softmax's sum.
#include "../../common/cuda_vector.cuh"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kWarps = 4;

// Grid: (num_rows, heads in groups of kWarps); one warp a head. Channels go to lanes one by one.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) merge_attention_states_kernel(MergeAttentionParams p) {
  const int row = blockIdx.x, head = blockIdx.y * kWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (head >= p.num_heads) return;
  const int begin = p.part_start[row], end = p.part_start[row + 1];
  float largest = -INFINITY, sum = 0.0f;
  for (int i = begin; i < end; i++) largest = fmaxf(largest, p.part_lse[int64_t(i) * p.num_heads + head]);
  for (int i = begin; i < end && largest != -INFINITY; i++) sum += expf(p.part_lse[int64_t(i) * p.num_heads + head] - largest);
  T* out = static_cast<T*>(p.out) + row * p.out_row_stride + int64_t(head) * p.head_dim;
  for (int d = lane; d < p.head_dim; d += 32) {
    float x = 0.0f;
    for (int i = begin; i < end; i++) {
      const float lse = p.part_lse[int64_t(i) * p.num_heads + head];
      if (lse == -INFINITY) continue;  // an empty part
      x += expf(lse - largest) * p.part_out[(int64_t(i) * p.num_heads + head) * p.head_dim + d];
    }
    out[d] = from_float<T>(sum == 0.0f ? 0.0f : x / sum);
  }
  if (p.lse && lane == 0) p.lse[int64_t(row) * p.num_heads + head] = sum == 0.0f ? -INFINITY : largest + logf(sum);
}

}  // namespace

const char* merge_attention_states(const MergeAttentionParams& p, void* stream) {
  return with_float_type(p.dtype, [&](auto type) {
    const dim3 grid(p.num_rows, (p.num_heads + kWarps - 1) / kWarps), block(kWarps * 32);
    return launch(merge_attention_states_kernel<decltype(type)>, grid, block, 0, stream, p);
  });
}

}  // namespace pyengine::cuda
