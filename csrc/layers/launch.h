// Entry points of the layer kernels on a CUDA device, or in its emulation. They take checked parameters, enqueue on
// `stream` (a cudaStream_t) and return nullptr, or a static text that says what is not supported or what the driver said.
#pragma once
#include "params.h"

namespace pyengine::cuda {

// Both rms_norm and fused_add_rms_norm: the latter sets `residual`.
const char* rms_norm(const RmsNormParams& params, void* stream);
const char* rotary_embedding(const RotaryParams& params, void* stream);
// Both silu_and_mul and gelu_and_mul.
const char* act_and_mul(const ActAndMulParams& params, void* stream);

}  // namespace pyengine::cuda
