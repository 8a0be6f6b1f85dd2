// INT8 weights and inputs (W8A8), and the rounding of inputs to int8. Sums are integers, and so exact.
#include "../launch.h"
#include "gemm_tile.cuh"

namespace pyengine::cuda {

namespace {

constexpr int kDepth = 16, kStep = 4 * kDepth;  // values of k of a lane, and of a warp, in one step

// Grid: (tiles of 64 columns, tiles of 16 kRowTiles rows). T: of out and bias.
template <typename T, int kRowTiles>
__global__ void __launch_bounds__(256, kRowTiles == 1 ? 2 : 1) int8_gemm_kernel(CheckpointLinearParams p) {
  const GemmLane lane(p, kRowTiles);
  const int steps = (p.in_features + kStep - 1) / kStep, end = lane.end_step(steps);
  int32_t acc[kRowTiles][8][4] = {};
  uint4 next[8];
  auto load = [&](int step) {
    const int k = min(step * kStep + lane.tig * kDepth, p.in_features - kDepth);  // beyond the end the input is zero
    const int8_t* from = static_cast<const int8_t*>(p.weight) + int64_t(lane.column) * p.in_features + k;
#pragma unroll
    for (int j = 0; j < 8; j++) next[j] = load_vector<uint4>(from + int64_t(j) * p.in_features);
  };
  int step = lane.first_step(steps);
  if (step < end) load(step);
  for (; step < end; step++) {
    uint4 b[8];
#pragma unroll
    for (int j = 0; j < 8; j++) b[j] = next[j];
    if (step + 1 < end) load(step + 1);  // in flight while this step is computed
    uint4 a[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        a[r][h] = load_input<int8_t>(p, lane.first_row + 16 * r + lane.gid + 8 * h, step * kStep + lane.tig * kDepth);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int r = 0; r < kRowTiles; r++) {
        const uint32_t low[4] = {a[r][0].x, a[r][1].x, a[r][0].y, a[r][1].y};
        const uint32_t high[4] = {a[r][0].z, a[r][1].z, a[r][0].w, a[r][1].w};
        mma_m16n8k32(acc[r][j], low, b[j].x, b[j].y);
        mma_m16n8k32(acc[r][j], high, b[j].z, b[j].w);
      }
  }
  const float* scales = static_cast<const float*>(p.scales);
#pragma unroll
  for (int r = 0; r < kRowTiles; r++)
    write_rows<T>(
        p, lane, acc[r], lane.first_row + 16 * r, [](int j) { return j; },
        [&](int32_t sum, int row, int column) {
          return static_cast<float>(sum) * p.input_scale[row] * scales[p.one_scale ? 0 : column];
        });
}

constexpr int kQuantizeWarps = 4;

// A block rounds one row.
template <typename T>
__global__ void __launch_bounds__(kQuantizeWarps * 32) quantize_int8_rows_kernel(QuantizeRowsParams p) {
  const T* input = static_cast<const T*>(p.input) + blockIdx.x * p.input_stride;
  int8_t* out = p.out + int64_t(blockIdx.x) * p.in_features;
  float* maxima = reinterpret_cast<float*>(shared_memory());  // [kQuantizeWarps]
  float largest = 0.0f;
  bool finite = true;
  for (int i = threadIdx.x; i < p.in_features; i += blockDim.x) {
    const float x = fabsf(to_float(input[i]));
    finite = finite && x <= 3.402823466e38f;  // false for NaN
    largest = fmaxf(largest, x);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, i));
  if (__ballot_sync(kFullWarp, !finite)) largest = NAN;
  if ((threadIdx.x & 31) == 0) maxima[threadIdx.x >> 5] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kQuantizeWarps; w++) largest = maxima[w] > largest || maxima[w] != maxima[w] ? maxima[w] : largest;
  if (largest < 0x1p-100f) largest = 0.0f;
  if (threadIdx.x == 0) p.scale[blockIdx.x] = largest / 127.0f;
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;  // NaN: 0
  for (int i = threadIdx.x; i < p.in_features; i += blockDim.x)
    out[i] = largest == largest ? static_cast<int8_t>(round_to_int(to_float(input[i]) * inverse)) : int8_t(0);
}

}  // namespace

const char* int8_linear(const CheckpointLinearParams& p, void* stream) {
  if (const char* error = check_gemm(p, 1, 16)) return error;
  return with_float_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return launch_gemm(p, int8_gemm_kernel<T, 1>, int8_gemm_kernel<T, 4>, 4, stream);
  });
}

const char* quantize_int8_rows(const QuantizeRowsParams& p, void* stream) {
  return with_float_type(p.dtype, [&](auto t) {
    return launch(quantize_int8_rows_kernel<decltype(t)>, dim3(p.num_tokens), dim3(kQuantizeWarps * 32),
                  kQuantizeWarps * sizeof(float), stream, p);
  });
}

}  // namespace pyengine::cuda
