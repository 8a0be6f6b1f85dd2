// Products of 16-bit inputs with quantised weights: weights become 16-bit in registers, one mma.m16n8k16 at a time.
#pragma once
#include "weight_tiles.cuh"

namespace pyengine::cuda {

// Grid: (tiles of 64 columns, tiles of 16 kRowTiles rows).
template <typename Weights, int kRowTiles>
__global__ void __launch_bounds__(256, kRowTiles == 1 ? 2 : 1) weight_gemm_kernel(CheckpointLinearParams p) {
  using T = typename Weights::Type;
  const GemmLane lane(p, kRowTiles);
  const int steps = (p.in_features + Weights::kStep - 1) / Weights::kStep;
  const int end = lane.end_step(steps);
  float acc[kRowTiles][8][4] = {};
  Weights weights, next;
  int step = lane.first_step(steps);
  if (step < end) next.load(p, step, lane);
  for (; step < end; step++) {
    weights.take(next);
    if (step + 1 < end) next.load(p, step + 1, lane);  // in flight while this step is computed
    weights.start(p, step, lane);
#pragma unroll
    for (int v = 0; v < Weights::kDepth / 8; v++) {  // 8 of the lane's values of k: two mma steps
      uint32_t a[kRowTiles][2][4];                   // pairs of rows gid and gid + 8 of each tile
#pragma unroll
      for (int r = 0; r < kRowTiles; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int k = step * Weights::kStep + lane.tig * Weights::kDepth + 8 * v;
          Weights::order(load_input<T>(p, lane.first_row + 16 * r + lane.gid + 8 * h, k), a[r][h]);
        }
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const uint32_t b0 = weights.pair(4 * v + 2 * h, j), b1 = weights.pair(4 * v + 2 * h + 1, j);
#pragma unroll
          for (int r = 0; r < kRowTiles; r++) {
            const uint32_t rows[4] = {a[r][0][2 * h], a[r][1][2 * h], a[r][0][2 * h + 1], a[r][1][2 * h + 1]};
            mma_m16n8k16<T>(acc[r][j], rows, b0, b1);
          }
        }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; r++)
    write_rows<T>(
        p, lane, acc[r], lane.first_row + 16 * r, [](int j) { return Weights::column_of(j); },
        [&](float sum, int, int column) { return Weights::finish(p, sum, column); });
}

template <typename Weights>
const char* launch_weight_gemm(const CheckpointLinearParams& p, void* stream) {
  constexpr int kMany = Weights::kManyRows;
  return launch_gemm(p, weight_gemm_kernel<Weights, 1>, weight_gemm_kernel<Weights, kMany>, kMany, stream);
}

}  // namespace pyengine::cuda
