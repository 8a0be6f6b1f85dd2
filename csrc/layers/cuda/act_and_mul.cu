// Gated activations: out = act(gate) * up, gate and up being the halves of each input row.
#include "../../common/cuda_vector.cuh"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 128;

template <GatedActivation kActivation>
PYENGINE_DEVICE float activate(float x) {
  if constexpr (kActivation == GatedActivation::kSilu) return x / (1.0f + expf(-x));
  if constexpr (kActivation == GatedActivation::kGeluTanh) {
    // x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016)
    const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * u));
  }
  return 0.5f * x * erfcf(-0.7071067812f * x);
}

// Grid: (num_tokens, pieces of a row).
template <typename T, int kWidth, GatedActivation kActivation>
__global__ void __launch_bounds__(kThreads) act_and_mul_kernel(ActAndMulParams p) {
  const int64_t token = blockIdx.x;
  const int i = (blockIdx.y * kThreads + threadIdx.x) * kWidth;
  if (i >= p.d) return;
  const T* gate = static_cast<const T*>(p.input) + token * p.input_stride;
  float x[kWidth], up[kWidth];
  load_elements(x, gate + i);
  load_elements(up, gate + p.d + i);
  for (int j = 0; j < kWidth; j++) x[j] = activate<kActivation>(x[j]) * up[j];
  store_elements(static_cast<T*>(p.out) + token * p.out_stride + i, x);
}

template <typename T, GatedActivation kActivation>
const char* launch_activation(const ActAndMulParams& p, void* stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide =
      divides_into(p.out, p.out_stride, p.d, sizeof(T), 16) && divides_into(p.input, p.input_stride, p.d, sizeof(T), 16);
  const int per_block = kThreads * (wide ? kWide : 1);
  const dim3 grid(p.num_tokens, (p.d + per_block - 1) / per_block), block(kThreads);
  return wide ? launch(act_and_mul_kernel<T, kWide, kActivation>, grid, block, 0, stream, p)
              : launch(act_and_mul_kernel<T, 1, kActivation>, grid, block, 0, stream, p);
}

}  // namespace

const char* act_and_mul(const ActAndMulParams& p, void* stream) {
  return with_float_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    switch (p.activation) {
      case GatedActivation::kSilu:
        return launch_activation<T, GatedActivation::kSilu>(p, stream);
      case GatedActivation::kGeluTanh:
        return launch_activation<T, GatedActivation::kGeluTanh>(p, stream);
      case GatedActivation::kGelu:
        break;
    }
    return launch_activation<T, GatedActivation::kGelu>(p, stream);
  });
}

}  // namespace pyengine::cuda
