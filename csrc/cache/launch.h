// Entry points of the cache kernels on a CUDA device, or in its emulation. They take checked parameters, enqueue on
// `stream` (a cudaStream_t) and return nullptr, or a static text that says what is not supported or what the driver said.
#pragma once
#include "params.h"

namespace pyengine::cuda {

const char* reshape_and_cache(const ReshapeAndCacheParams& params, void* stream);
// `block_mapping` is in device memory.
const char* copy_blocks(const CopyBlocksParams& params, void* stream);
// `block_mapping` is in host memory and may be freed when this returns; `src` or `dst` may be (pinned) host memory.
const char* swap_blocks(const SwapBlocksParams& params, void* stream);

}  // namespace pyengine::cuda
