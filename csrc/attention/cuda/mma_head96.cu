#include "launch_mma.cuh"

namespace pyengine::cuda {
template const char* launch_mma<96>(const PagedAttentionParams&, void*);
}  // namespace pyengine::cuda
