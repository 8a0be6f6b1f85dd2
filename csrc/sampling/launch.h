// Entry points of the sampling kernels on a CUDA device, or in its emulation. They take checked parameters, enqueue on
// `stream` (a cudaStream_t) and return nullptr, or a static text that says what is not supported or what the driver said.
#pragma once
#include "params.h"

namespace pyengine::cuda {

const char* apply_penalties(const PenaltiesParams& params, void* stream);
const char* apply_bitmask(const BitmaskParams& params, void* stream);
const char* sample_top_k_top_p(const SampleParams& params, void* stream);

}  // namespace pyengine::cuda
