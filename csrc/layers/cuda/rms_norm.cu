// Root mean square normalisation (Zhang and Sennrich, 2019), with or without the residual addition before it.
#include "../../common/cuda_vector.cuh"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The sum of `x` over the block, for every thread. `shared`: [kWarps].
PYENGINE_DEVICE float block_sum(float x, float* shared) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; i++) sum += shared[i];
  return sum;
}

// Grid: (num_tokens). kWidth neighbours at a time; it divides hidden_size.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(RmsNormParams p) {
  const int64_t token = blockIdx.x;
  const T* input = static_cast<const T*>(p.input) + token * p.input_stride;
  T* residual = p.residual ? static_cast<T*>(p.residual) + token * p.residual_stride : nullptr;
  float squares = 0.0f;
  for (int i = threadIdx.x * kWidth; i < p.hidden_size; i += kThreads * kWidth) {
    float x[kWidth];
    load_elements(x, input + i);
    if (residual) {  // rounded to T before it is normalised: the norm sees what the next layer will see
      float r[kWidth];
      load_elements(r, residual + i);
      for (int j = 0; j < kWidth; j++) x[j] = to_float(from_float<T>(r[j] + x[j]));
      store_elements(residual + i, x);
    }
    for (int j = 0; j < kWidth; j++) squares += x[j] * x[j];
  }
  const float scale = rsqrtf(block_sum(squares, reinterpret_cast<float*>(shared_memory())) / p.hidden_size + p.epsilon);
  const T* source = residual ? residual : input;  // each thread reads back what it wrote itself
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + token * p.out_stride;
  for (int i = threadIdx.x * kWidth; i < p.hidden_size; i += kThreads * kWidth) {
    float x[kWidth], w[kWidth];
    load_elements(x, source + i);
    load_elements(w, weight + i);
    for (int j = 0; j < kWidth; j++) x[j] *= scale * w[j];
    store_elements(out + i, x);
  }
}

}  // namespace

const char* rms_norm(const RmsNormParams& p, void* stream) {
  return with_float_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    auto wide = [&](const void* rows, int64_t stride) { return divides_into(rows, stride, p.hidden_size, sizeof(T), 16); };
    const bool all_wide = wide(p.out, p.out_stride) && wide(p.input, p.input_stride) && wide(p.weight, 0) &&
                          (!p.residual || wide(p.residual, p.residual_stride));
    const dim3 grid(p.num_tokens), block(kThreads);
    const size_t shared = kWarps * sizeof(float);
    return all_wide ? launch(rms_norm_kernel<T, 16 / sizeof(T)>, grid, block, shared, stream, p)
                    : launch(rms_norm_kernel<T, 1>, grid, block, shared, stream, p);
  });
}

}  // namespace pyengine::cuda
