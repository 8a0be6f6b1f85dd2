// Copies whole KV blocks inside a pool, every layer of every pair in one launch.
#include "../../common/cuda_port.h"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256, kPiecesPerThread = 4;

// Grid: (shares of a block, num_pairs). V: the piece that one thread moves at once.
template <typename V>
__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(CopyBlocksParams p) {
  char* pool = static_cast<char*>(p.pool);
  const char* source = pool + p.block_mapping[2 * int64_t(blockIdx.y)] * p.block_bytes;
  char* target = pool + p.block_mapping[2 * int64_t(blockIdx.y) + 1] * p.block_bytes;
  const int64_t first = int64_t(blockIdx.x) * kThreads * kPiecesPerThread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPiecesPerThread; i++) {
    const int64_t byte = (first + i * kThreads) * int64_t(sizeof(V));
    if (byte < p.block_bytes) store_vector(target + byte, load_vector<V>(source + byte));
  }
}

template <typename V>
const char* launch_copy(const CopyBlocksParams& p, void* stream) {
  const int64_t share = int64_t(sizeof(V)) * kThreads * kPiecesPerThread;
  return launch(copy_blocks_kernel<V>, dim3(static_cast<unsigned>((p.block_bytes + share - 1) / share), p.num_pairs),
                dim3(kThreads), 0, stream, p);
}

}  // namespace

const char* copy_blocks(const CopyBlocksParams& p, void* stream) {
  if (p.block_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(p.pool) % 16 == 0) return launch_copy<uint4>(p, stream);
  if (p.block_bytes % 4 == 0 && reinterpret_cast<uintptr_t>(p.pool) % 4 == 0) return launch_copy<uint32_t>(p, stream);
  return launch_copy<uint8_t>(p, stream);
}

}  // namespace pyengine::cuda
