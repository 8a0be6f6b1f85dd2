// Copies of whole KV blocks, inside one pool (copy-on-write) or between two (swapping).
#include <cstring>

#include "../../cpu/parallel.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kBytesPerUnit = 256 * 1024;

void copy_pairs(const void* src, void* dst, const int64_t* block_mapping, int64_t block_bytes, int num_pairs) {
  const int64_t units_per_block = (block_bytes + kBytesPerUnit - 1) / kBytesPerUnit;
  parallel_for(num_pairs * units_per_block, [&](int64_t unit, int) {
    const int64_t pair = unit / units_per_block, begin = unit % units_per_block * kBytesPerUnit;
    const int64_t bytes = block_bytes - begin < kBytesPerUnit ? block_bytes - begin : kBytesPerUnit;
    memcpy(static_cast<char*>(dst) + block_mapping[2 * pair + 1] * block_bytes + begin,
           static_cast<const char*>(src) + block_mapping[2 * pair] * block_bytes + begin, bytes);
  });
}

}  // namespace

const char* copy_blocks(const CopyBlocksParams& p) {
  copy_pairs(p.pool, p.pool, p.block_mapping, p.block_bytes, p.num_pairs);
  return nullptr;
}

const char* swap_blocks(const SwapBlocksParams& p) {
  copy_pairs(p.src, p.dst, p.block_mapping, p.block_bytes, p.num_pairs);
  return nullptr;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
