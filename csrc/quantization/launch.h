// The CUDA kernels of this folder, by the names that launchers call.
#pragma once
#include "params.h"

namespace pyengine::cuda {

const char* gptq_linear(const CheckpointLinearParams& params, void* stream);
const char* awq_linear(const CheckpointLinearParams& params, void* stream);
const char* fp8_linear(const CheckpointLinearParams& params, void* stream);
const char* int8_linear(const CheckpointLinearParams& params, void* stream);
const char* quantize_int8_rows(const QuantizeRowsParams& params, void* stream);

}  // namespace pyengine::cuda
