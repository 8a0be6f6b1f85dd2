// Copies whole KV blocks between two pools, device and pinned host memory. A block holds every layer, so a copy is large;
// neighbouring blocks that stay neighbours go as one.
#include <vector>

#include "../../common/cuda_port.h"
#include "../launch.h"

namespace pyengine::cuda {

const char* swap_blocks(const SwapBlocksParams& p, void* stream) {
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> bytes;
  for (int32_t i = 0; i < p.num_pairs; i++) {
    const int64_t source = p.block_mapping[2 * i], target = p.block_mapping[2 * i + 1];
    const bool continues = i > 0 && source == p.block_mapping[2 * i - 2] + 1 && target == p.block_mapping[2 * i - 1] + 1;
    if (continues) {
      bytes.back() += static_cast<size_t>(p.block_bytes);
      continue;
    }
    sources.push_back(static_cast<const char*>(p.src) + source * p.block_bytes);
    targets.push_back(static_cast<char*>(p.dst) + target * p.block_bytes);
    bytes.push_back(static_cast<size_t>(p.block_bytes));
  }
  return copy_batch(targets.size(), targets.data(), sources.data(), bytes.data(), stream);
}

}  // namespace pyengine::cuda
