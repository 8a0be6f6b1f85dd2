// AWQ's 4-bit weights.
#include "../launch.h"
#include "weight_gemm.cuh"

namespace pyengine::cuda {

const char* awq_linear(const CheckpointLinearParams& p, void* stream) {
  if (const char* error = check_gemm(p, 2, 32)) return error;
  if (p.dtype == DType::kF16) return launch_weight_gemm<AwqWeights<Float16>>(p, stream);
  if (p.dtype == DType::kBF16) return launch_weight_gemm<AwqWeights<BFloat16>>(p, stream);
  return "GPU kernels for 4-bit weights take float16 and bfloat16 inputs";
}

}  // namespace pyengine::cuda
