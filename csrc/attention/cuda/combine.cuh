// Merges the parts of split sequences, in part order.
#pragma once
#include "query_rows.cuh"

namespace pyengine::cuda {

constexpr int kCombineWarps = 4;

// Grid: (num_work, a share of the rows). The parts of a sequence are neighbours in the plan; the block of the first one
// merges them, one warp a (query token, head); the other blocks have nothing to do.
template <typename T>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(PagedAttentionParams p) {
  const int first = blockIdx.x, lane = threadIdx.x & 31;
  const AttentionWork work = p.work[first];
  if (work.seq < 0 || work.part < 0 || (first > 0 && p.work[first - 1].seq == work.seq)) return;
  int num_parts = 1;
  while (first + num_parts < p.num_work && p.work[first + num_parts].seq == work.seq) num_parts++;
  const int first_token = p.query_start_loc[work.seq], query_len = p.query_start_loc[work.seq + 1] - first_token;
  const int warp = blockIdx.y * kCombineWarps + (threadIdx.x >> 5), num_warps = gridDim.y * kCombineWarps;
  for (int row = warp; row < query_len * p.num_heads; row += num_warps) {
    const int offset = row / p.num_heads, head = row % p.num_heads;
    SoftmaxState state = {-INFINITY, 0.0f};
    for (int i = 0; i < num_parts; i++) state.max = fmaxf(state.max, *slot_log2_sum(p, p.work[first + i].part + offset, head));
    float x[2][4] = {};  // channels 4 lane and 128 + 4 lane on
    for (int i = 0; i < num_parts; i++) {
      const int slot = p.work[first + i].part + offset;
      const float factor = rescale(*slot_log2_sum(p, slot, head), state.max);
      state.sum += factor;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int column = j * 128 + lane * 4;
        if (column >= p.head_dim) continue;
        const float4 part = load_vector<float4>(slot_out(p, slot, head) + column);
        x[j][0] += factor * part.x;
        x[j][1] += factor * part.y;
        x[j][2] += factor * part.z;
        x[j][3] += factor * part.w;
      }
    }
    const float factor = output_factor(p, head, state, 1.0f);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = j * 128 + lane * 4;
      if (column >= p.head_dim) continue;
      for (int i = 0; i < 4; i++) x[j][i] *= factor;
      store_output4(output_row<T>(p, first_token + offset, head) + column, x[j]);
    }
    if (lane == 0) write_lse(p, first_token + offset, head, state);
  }
}

}  // namespace pyengine::cuda
