#include "launch_mma.cuh"

namespace pyengine::cuda {
template const char* launch_mma<64>(const PagedAttentionParams&, void*);
}  // namespace pyengine::cuda
