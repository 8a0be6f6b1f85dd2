// Scatters the step's new keys and values to their slots of the paged cache, converting or quantising them and, in the fused
// form, rotating queries and keys first.
#include <cstring>
#include <type_traits>

#include "../../cpu/parallel.h"
#include "../../cpu/simd.h"
#include "../../cpu/with_type.h"
#include "../../layers/cpu/rotary.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int kFewestTokens = 4, kMostTokens = 16;  // of a unit of work
constexpr int kUnitsPerThread = 8;
constexpr int kMaxRunHead = 256;            // head_dim of what is written several tokens at once
constexpr int64_t kSerialLimit = 2 * 1024;  // elements; below, waking threads costs more than the work

// Where one side's (keys' or values') element goes.
template <class T, class C>
struct CacheSide {
  const T* source;  // [num_tokens, num_kv_heads, head_dim]
  C* cache;         // [num_blocks, num_kv_heads, block_size, head_dim], by strides
  float* scale;
  int64_t source_stride, block_stride, head_stride, token_stride, dim_stride, scale_block_stride, scale_head_stride;
};

template <class T, class C>
CacheSide<T, C> key_side(const ReshapeAndCacheParams& p) {
  return {static_cast<const T*>(p.key),
          static_cast<C*>(p.k_cache),
          p.k_scale,
          p.key_token_stride,
          p.k_block_stride,
          p.k_head_stride,
          p.k_token_stride,
          p.k_dim_stride,
          p.k_scale_block_stride,
          p.k_scale_head_stride};
}
template <class T, class C>
CacheSide<T, C> value_side(const ReshapeAndCacheParams& p) {
  return {static_cast<const T*>(p.value),
          static_cast<C*>(p.v_cache),
          p.v_scale,
          p.value_token_stride,
          p.v_block_stride,
          p.v_head_stride,
          p.v_token_stride,
          p.v_dim_stride,
          p.v_scale_block_stride,
          p.v_scale_head_stride};
}

// Symmetric, one scale for each token and head: code = x * 127 / max |x|, to nearest even. NaN makes the scale NaN.
template <class T>
float quantize_int8(const T* x, int n, int8_t* out, int64_t stride) {
  float largest = 0.0f;
  for (int i = 0; i < n; i++) {
    const float magnitude = __builtin_fabsf(to_float(x[i]));
    if (!(magnitude <= largest)) largest = magnitude;  // a NaN enters here, and stays
    if (largest != largest) break;
  }
  if (largest < 0x1p-100f) largest = 0.0f;
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < n; i++) {
    const float code = to_float(x[i]) * inverse;
    out[i * stride] = static_cast<int8_t>(code == code ? __builtin_rintf(code) : 0.0f);
  }
  return largest / 127.0f;
}

template <class T, class C>
void write_head(const CacheSide<T, C>& side, const T* x, int head, int head_dim, int64_t block, int offset) {
  C* out = side.cache + block * side.block_stride + head * side.head_stride + offset * side.token_stride;
  if constexpr (std::is_same_v<C, int8_t>) {
    side.scale[block * side.scale_block_stride + head * side.scale_head_stride + offset] =
        quantize_int8(x, head_dim, out, side.dim_stride);
  } else if constexpr (std::is_same_v<T, C>) {
    for (int i = 0; i < head_dim; i++) out[i * side.dim_stride] = x[i];
  } else {
    const float scale = sizeof(C) == 1 && side.scale != nullptr ? side.scale[head] : 1.0f;
    for (int i = 0; i < head_dim; i++) from_float(to_float(x[i]) / scale, out + i * side.dim_stride);
  }
}

template <class T, class C>
void convert_row(const T* x, int n, C* out) {
  if constexpr (std::is_same_v<T, C>) {
    memcpy(out, x, n * sizeof(T));
  } else if constexpr (std::is_same_v<C, Float16>) {
    for (int i = 0; i < n; i++) from_float(to_float(x[i]), out + i);
  } else {
    for (int i = 0; i < n; i += kLanes) store_partial(out + i, load_partial(x + i, n - i), n - i);
  }
}

// One head of `count` tokens in neighbouring slots of a page: dimension by dimension, where those are far apart.
template <class T, class C>
void write_run(const CacheSide<T, C>& side, const T* x, int count, int head_dim, C* out) {
  if (side.dim_stride == 1) {
    for (int i = 0; i < count; i++) convert_row(x + i * side.source_stride, head_dim, out + i * side.token_stride);
    return;
  }
  C rows[kMostTokens * kMaxRunHead];
  for (int i = 0; i < count; i++) convert_row(x + i * side.source_stride, head_dim, rows + i * head_dim);
  for (int d = 0; d < head_dim; d++) {
    C* to = out + d * side.dim_stride;
    for (int i = 0; i < count; i++) to[i * side.token_stride] = rows[i * head_dim + d];
  }
}

// Tokens from `token` on whose slots follow each other in one page, at most kMostTokens.
inline int run_length(const ReshapeAndCacheParams& p, int64_t token, int64_t end) {
  const int64_t first = p.slot_mapping[token], left = p.block_size - (first & (p.block_size - 1));
  int count = 1;
  while (count < left && count < kMostTokens && token + count < end && p.slot_mapping[token + count] == first + count) count++;
  return count;
}

// Head by head, because neighbouring tokens write into the same cache lines of a dimension-major page.
template <class T, class C>
void write_tokens(const ReshapeAndCacheParams& p, const CacheSide<T, C>& side, int64_t begin, int64_t end) {
  for (int head = 0; head < p.num_kv_heads; head++) {
    for (int64_t token = begin, next; token < end; token = next) {
      next = token + 1;
      const int64_t slot = p.slot_mapping[token], block = slot >> p.block_shift, offset = slot & (p.block_size - 1);
      if (slot < 0) continue;
      const T* x = side.source + token * side.source_stride + int64_t{head} * p.head_dim;
      const int count = sizeof(C) > 1 && p.head_dim <= kMaxRunHead ? run_length(p, token, end) : 1;
      if constexpr (sizeof(C) > 1) {
        if (count > 1) {
          C* out = side.cache + block * side.block_stride + head * side.head_stride + offset * side.token_stride;
          write_run(side, x, count, p.head_dim, out);
          next = token + count;
          continue;
        }
      }
      write_head(side, x, head, p.head_dim, block, static_cast<int>(offset));
    }
  }
}

constexpr int kMaxRotatedHead = 1024;

// Queries in place; keys on their way to the cache, rounded to T as if they had been stored in between.
template <class T, class C>
void rotate_and_write_keys(const ReshapeAndCacheParams& p, const CacheSide<T, C>& side, int64_t begin, int64_t end) {
  T rotated[kMaxRotatedHead];
  for (int64_t token = begin; token < end; token++) {
    const float* cos_sin = p.cos_sin_cache + p.positions[token] * p.rotary_dim;
    T* query = static_cast<T*>(p.query) + token * p.query_token_stride;
    rotate_heads(query, p.num_heads, p.head_dim, cos_sin, p.rotary_dim, p.is_neox);
    const int64_t slot = p.slot_mapping[token];
    for (int head = 0; head < p.num_kv_heads && slot >= 0; head++) {
      memcpy(rotated, side.source + token * side.source_stride + int64_t{head} * p.head_dim, p.head_dim * sizeof(T));
      rotate_heads(rotated, 1, p.head_dim, cos_sin, p.rotary_dim, p.is_neox);
      write_head(side, rotated, head, p.head_dim, slot >> p.block_shift, static_cast<int>(slot & (p.block_size - 1)));
    }
  }
}

template <class T, class C>
void write_range(const ReshapeAndCacheParams& p, int64_t begin, int64_t end) {
  const CacheSide<T, C> keys = key_side<T, C>(p), values = value_side<T, C>(p);
  if (p.positions != nullptr) {
    rotate_and_write_keys(p, keys, begin, end);
  } else {
    write_tokens(p, keys, begin, end);
  }
  write_tokens(p, values, begin, end);
}

template <class T, class C>
const char* run(const ReshapeAndCacheParams& p) {
  const int64_t heads = p.num_kv_heads + (p.positions != nullptr ? p.num_heads : 0);
  if (p.num_tokens * heads * p.head_dim <= kSerialLimit) {
    write_range<T, C>(p, 0, p.num_tokens);
    return nullptr;
  }
  const int64_t even = p.num_tokens / (int64_t{kUnitsPerThread} * get_num_threads());
  const int64_t per_unit = even < kFewestTokens ? kFewestTokens : even > kMostTokens ? kMostTokens : even;
  parallel_for((p.num_tokens + per_unit - 1) / per_unit, [&](int64_t unit, int) {
    const int64_t begin = unit * per_unit;
    write_range<T, C>(p, begin, begin + per_unit < p.num_tokens ? begin + per_unit : p.num_tokens);
  });
  return nullptr;
}

}  // namespace

const char* reshape_and_cache(const ReshapeAndCacheParams& p) {
  if (p.positions != nullptr && p.head_dim > kMaxRotatedHead) return "with rotary embedding, head_dim must be at most 1024";
  if (p.kv_dtype == DType::kInt8 && (p.k_scale == nullptr || p.v_scale == nullptr))
    return "an INT8 cache needs k_scale and v_scale";
  return with_float_type(p.dtype, [&](auto type) {
    return with_cache_type(p.kv_dtype, [&](auto cache) { return run<decltype(type), decltype(cache)>(p); });
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
