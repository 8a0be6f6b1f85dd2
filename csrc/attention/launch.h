// Entry points of the attention kernels on a CUDA device, or in its emulation. They take checked parameters, enqueue on
// `stream` (a cudaStream_t) and return nullptr, or a static text that says what is not supported or what the driver said.
#pragma once
#include "params.h"

namespace pyengine::cuda {

const char* paged_attention(const PagedAttentionParams& params, void* stream);
const char* merge_attention_states(const MergeAttentionParams& params, void* stream);

}  // namespace pyengine::cuda
