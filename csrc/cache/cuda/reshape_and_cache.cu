// Scatters the step's new keys and values to their slots of the paged cache: converting, quantising and, in the fused form,
// rotating queries and keys on the way.
#include "../../layers/cuda/rotary.cuh"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kWarps = 4, kMaxPieces = 256 / 32;  // pieces of a head that one lane may hold, at width 1

enum class CacheFormat { kModel, kFp8, kInt8 };

// One head of keys or of values and the place where it goes.
template <typename T>
struct HeadCopy {
  const T* source;
  void* cache;  // at the block's first element of the head and slot
  float* scale;
};

template <typename T>
PYENGINE_DEVICE HeadCopy<T> find_head(const ReshapeAndCacheParams& p, int64_t token, int64_t slot, int head, bool is_value,
                                      int cache_bytes, bool scale_per_token) {
  const int64_t block = slot >> p.block_shift, offset = slot & (p.block_size - 1), column = int64_t(head) * p.head_dim;
  const T* source = is_value ? static_cast<const T*>(p.value) + token * p.value_token_stride
                             : static_cast<const T*>(p.key) + token * p.key_token_stride;
  const int64_t element = is_value ? block * p.v_block_stride + head * p.v_head_stride + offset * p.v_token_stride
                                   : block * p.k_block_stride + head * p.k_head_stride + offset * p.k_token_stride;
  float* scale = is_value ? p.v_scale : p.k_scale;
  if (scale && scale_per_token) {
    scale += is_value ? block * p.v_scale_block_stride + head * p.v_scale_head_stride + offset
                      : block * p.k_scale_block_stride + head * p.k_scale_head_stride + offset;
  } else if (scale) {
    scale += head;
  }
  return {source + column, static_cast<char*>(is_value ? p.v_cache : p.k_cache) + element * cache_bytes, scale};
}

// Codes of kWidth neighbours, as bytes.
template <int kWidth>
PYENGINE_DEVICE void store_bytes(uint8_t* p, const uint8_t (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    *p = x[0];
  } else {
    uint32_t bytes;
    memcpy(&bytes, x, 4);
    store_vector(p, bytes);
  }
}

// Symmetric, one scale for each token and head: code = x * 127 / max |x|, to nearest even; a NaN makes the scale NaN.
template <int kWidth>
PYENGINE_DEVICE void store_int8(const float (&x)[kMaxPieces][kWidth], int head_dim, uint8_t* cache, float* scale, int lane) {
  float largest = 0.0f;
  bool has_nan = false;
  for (int n = 0; n < kMaxPieces; n++)
    for (int j = 0; j < kWidth; j++) {
      if ((n * 32 + lane) * kWidth >= head_dim) continue;
      largest = fmaxf(largest, fabsf(x[n][j]));
      has_nan |= x[n][j] != x[n][j];
    }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, i));
  if (__ballot_sync(kFullWarp, has_nan)) largest = NAN;
  if (largest < 0x1p-100f) largest = 0.0f;
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int n = 0; n < kMaxPieces; n++) {
    const int column = (n * 32 + lane) * kWidth;
    if (column >= head_dim) continue;
    uint8_t codes[kWidth];
    for (int j = 0; j < kWidth; j++) {
      const float code = x[n][j] * inverse;
      codes[j] = static_cast<uint8_t>(code == code ? round_to_int(code) : 0);
    }
    store_bytes(cache + column, codes);
  }
  if (lane == 0) *scale = largest / 127.0f;
}

template <typename T, CacheFormat kFormat, int kWidth>
PYENGINE_DEVICE void store_head(const ReshapeAndCacheParams& p, const HeadCopy<T>& head, const float* cos_sin, int lane) {
  [[maybe_unused]] float all[kMaxPieces][kWidth] = {};
#pragma unroll
  for (int n = 0; n < kMaxPieces; n++) {
    const int column = (n * 32 + lane) * kWidth;
    if (column >= p.head_dim) break;
    float x[kWidth];
    if (cos_sin)
      load_rotated(x, head.source, column, cos_sin, p.rotary_dim, p.is_neox);
    else
      load_elements(x, head.source + column);
    if constexpr (kFormat == CacheFormat::kModel) {
      store_elements(static_cast<T*>(head.cache) + column, x);
    } else if constexpr (kFormat == CacheFormat::kFp8) {
      const float scale = head.scale ? *head.scale : 1.0f;
      uint8_t codes[kWidth];
      for (int j = 0; j < kWidth; j++) codes[j] = to_fp8(x[j] / scale, p.kv_dtype == DType::kFp8E4M3);
      store_bytes(static_cast<uint8_t*>(head.cache) + column, codes);
    } else {
      for (int j = 0; j < kWidth; j++) all[n][j] = x[j];
    }
  }
  if constexpr (kFormat == CacheFormat::kInt8) store_int8(all, p.head_dim, static_cast<uint8_t*>(head.cache), head.scale, lane);
}

// Grid: (num_tokens, heads of keys, values and, in the fused form, queries together in groups of kWarps); one warp a head.
template <typename T, CacheFormat kFormat, int kWidth>
__global__ void __launch_bounds__(kWarps * 32) reshape_and_cache_kernel(ReshapeAndCacheParams p) {
  const int64_t token = blockIdx.x;
  const int item = blockIdx.y * kWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const float* cos_sin = p.positions ? p.cos_sin_cache + p.positions[token] * p.rotary_dim : nullptr;
  if (item >= 2 * p.num_kv_heads) {
    const int head = item - 2 * p.num_kv_heads;
    if (!cos_sin || !p.query || head >= p.num_heads) return;
    T* query = static_cast<T*>(p.query) + token * p.query_token_stride + int64_t(head) * p.head_dim;
    rotate_head<kWidth>(query, cos_sin, p.rotary_dim, p.is_neox, lane);
    return;
  }
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const bool is_value = item >= p.num_kv_heads;
  constexpr int kCacheBytes = kFormat == CacheFormat::kModel ? sizeof(T) : 1;
  const HeadCopy<T> head = find_head<T>(p, token, slot, is_value ? item - p.num_kv_heads : item, is_value, kCacheBytes,
                                        kFormat == CacheFormat::kInt8);
  store_head<T, kFormat, kWidth>(p, head, is_value ? nullptr : cos_sin, lane);
}

template <typename T, CacheFormat kFormat>
const char* launch_format(const ReshapeAndCacheParams& p, void* stream) {
  const int cache_bytes = kFormat == CacheFormat::kModel ? sizeof(T) : 1;
  auto rows = [&](const void* q, int64_t stride) { return divides_into(q, stride, p.head_dim, sizeof(T), 4 * sizeof(T)); };
  auto cache = [&](const void* q, int64_t block_stride, int64_t head_stride, int64_t token_stride) {
    return divides_into(q, block_stride, head_stride, cache_bytes, 4 * cache_bytes) &&
           divides_into(q, token_stride, p.head_dim, cache_bytes, 4 * cache_bytes);
  };
  const bool wide = rows(p.key, p.key_token_stride) && rows(p.value, p.value_token_stride) && p.rotary_dim % 8 == 0 &&
                    (!p.query || rows(p.query, p.query_token_stride)) &&
                    cache(p.k_cache, p.k_block_stride, p.k_head_stride, p.k_token_stride) &&
                    cache(p.v_cache, p.v_block_stride, p.v_head_stride, p.v_token_stride);
  const int items = 2 * p.num_kv_heads + (p.query ? p.num_heads : 0);
  const dim3 grid(p.num_tokens, (items + kWarps - 1) / kWarps), block(kWarps * 32);
  return wide ? launch(reshape_and_cache_kernel<T, kFormat, 4>, grid, block, 0, stream, p)
              : launch(reshape_and_cache_kernel<T, kFormat, 1>, grid, block, 0, stream, p);
}

}  // namespace

const char* reshape_and_cache(const ReshapeAndCacheParams& p, void* stream) {
  if (p.k_dim_stride != 1 || p.v_dim_stride != 1) return "the last dimension of k_cache and v_cache must have stride 1";
  if (p.head_dim > 256) return "head_dim must be at most 256";
  return with_float_type(p.dtype, [&](auto type) -> const char* {
    using T = decltype(type);
    if (p.kv_dtype == p.dtype) return launch_format<T, CacheFormat::kModel>(p, stream);
    if (p.kv_dtype == DType::kInt8) {
      if (!p.k_scale || !p.v_scale) return "an INT8 cache needs k_scale and v_scale";
      return launch_format<T, CacheFormat::kInt8>(p, stream);
    }
    if (dtype_size(p.kv_dtype) != 1) return "the cache must have the key's type, FP8 or INT8";
    return launch_format<T, CacheFormat::kFp8>(p, stream);
  });
}

}  // namespace pyengine::cuda
