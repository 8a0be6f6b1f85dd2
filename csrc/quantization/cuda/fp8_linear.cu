// FP8 (e4m3) weights, 16-bit inputs. The products are 16-bit also where the tensor core knows FP8: inputs keep their precision.
#include "../launch.h"
#include "weight_gemm.cuh"

namespace pyengine::cuda {

const char* fp8_linear(const CheckpointLinearParams& p, void* stream) {
  if (const char* error = check_gemm(p, 2, 16)) return error;
  if (p.dtype == DType::kF16) return launch_weight_gemm<Fp8Weights<Float16>>(p, stream);
  if (p.dtype == DType::kBF16) return launch_weight_gemm<Fp8Weights<BFloat16>>(p, stream);
  return "GPU kernels for FP8 weights take float16 and bfloat16 inputs";
}

}  // namespace pyengine::cuda
