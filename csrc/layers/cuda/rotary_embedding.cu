#include "../launch.h"
#include "rotary.cuh"

namespace pyengine::cuda {

namespace {

constexpr int kWarps = 4;

// Grid: (num_tokens, heads of query and key together in groups of kWarps); one warp a head.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarps * 32) rotary_embedding_kernel(RotaryParams p) {
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y * kWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const float* cos_sin = p.cos_sin_cache + p.positions[token] * p.rotary_dim;
  if (head < p.num_heads) {
    T* x = static_cast<T*>(p.query) + token * p.query_token_stride + int64_t(head) * p.head_dim;
    rotate_head<kWidth>(x, cos_sin, p.rotary_dim, p.is_neox, lane);
  } else if (p.key && head < p.num_heads + p.num_kv_heads) {
    T* x = static_cast<T*>(p.key) + token * p.key_token_stride + int64_t(head - p.num_heads) * p.head_dim;
    rotate_head<kWidth>(x, cos_sin, p.rotary_dim, p.is_neox, lane);
  }
}

}  // namespace

const char* rotary_embedding(const RotaryParams& p, void* stream) {
  return with_float_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const int bytes = 4 * sizeof(T), heads = p.num_heads + (p.key ? p.num_kv_heads : 0);
    const bool wide = p.rotary_dim % 8 == 0 && divides_into(p.query, p.query_token_stride, p.head_dim, sizeof(T), bytes) &&
                      (!p.key || divides_into(p.key, p.key_token_stride, p.head_dim, sizeof(T), bytes));
    const dim3 grid(p.num_tokens, (heads + kWarps - 1) / kWarps), block(kWarps * 32);
    return wide ? launch(rotary_embedding_kernel<T, 4>, grid, block, 0, stream, p)
                : launch(rotary_embedding_kernel<T, 1>, grid, block, 0, stream, p);
  });
}

}  // namespace pyengine::cuda
