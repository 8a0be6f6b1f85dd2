// Checks what the GPU kernels need beyond the op's own checks, and dispatches by type and head size.
#include "../launch.h"
#include "attention_simt.cuh"
#include "combine.cuh"
#include "launch_mma.cuh"

namespace pyengine::cuda {

namespace {

bool multiple_of_16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Kernels move rows in pieces of 16 bytes, or 8 where one-byte rows are no longer multiple of 16.
const char* check_cache(const PagedAttentionParams& p) {
  const int bytes = dtype_size(p.kv_dtype), piece = p.head_dim * bytes % 16 == 0 ? 16 : 8;
  if (p.k_dim_stride != 1 || p.v_dim_stride != 1) return "the last dimension of k_cache and v_cache must have stride 1";
  if (p.block_size < 8) return "block_size must be at least 8";
  const int64_t strides[] = {p.k_block_stride, p.k_head_stride, p.k_token_stride,
                             p.v_block_stride, p.v_head_stride, p.v_token_stride};
  for (int64_t stride : strides)
    if (stride * bytes % piece != 0) return "the strides of k_cache and v_cache must be multiples of 16 bytes";
  if (!multiple_of_16(p.k_cache) || !multiple_of_16(p.v_cache))
    return "k_cache and v_cache must start at multiples of 16 bytes";
  if (p.kv_dtype == DType::kInt8) {
    if (!p.k_scale || !p.v_scale || !p.scale_per_token) return "an INT8 cache needs scales for every token";
    const int64_t scale_strides[] = {p.k_scale_block_stride, p.k_scale_head_stride, p.v_scale_block_stride,
                                     p.v_scale_head_stride};
    for (int64_t stride : scale_strides)
      if (stride % 4 != 0) return "the strides of k_scale and v_scale must be multiples of 16 bytes";
    if (!multiple_of_16(p.k_scale) || !multiple_of_16(p.v_scale))
      return "k_scale and v_scale must start at multiples of 16 bytes";
  } else if ((p.k_scale || p.v_scale) && p.scale_per_token) {
    return "scales for every token need an INT8 cache";
  }
  return nullptr;
}

const char* check(const PagedAttentionParams& p) {
  if (p.head_dim % 8 != 0 || p.head_dim > 256) return "head_dim must be a multiple of 8 of at most 256";
  const int bytes = dtype_size(p.dtype);
  if (p.query_token_stride * bytes % 16 != 0 || p.out_token_stride * bytes % 16 != 0)
    return "the token strides of query and out must be multiples of 16 bytes";
  if (!multiple_of_16(p.query) || !multiple_of_16(p.out)) return "query and out must start at multiples of 16 bytes";
  if (p.dtype != DType::kF32 && dtype_size(p.kv_dtype) != 1 && p.kv_dtype != p.dtype)
    return "the cache must have the query's type, FP8 or INT8";
  if (p.dtype == DType::kF32 && dtype_size(p.kv_dtype) == 2) return "the cache must have the query's type, FP8 or INT8";
  if (p.work && !multiple_of_16(p.workspace)) return "the workspace must start at a multiple of 16 bytes";
  return check_cache(p);
}

template <KvFormat kFormat, int kHeadDim>
const char* launch_simt_kernel(const PagedAttentionParams& p, void* stream) {
  using Shape = SimtShape<kHeadDim>;
  const int group = p.num_heads / p.num_kv_heads;
  const char* error = nullptr;
  if (p.work) {
    const unsigned row_tiles = (group + kTileRows - 1) / kTileRows;
    error = launch(attention_simt_kernel<kFormat, kHeadDim>, dim3(p.num_work, p.num_kv_heads * row_tiles),
                   dim3(Shape::kThreads), Shape::kSharedBytes, stream, p, true);
    if (error || p.max_query_len <= 1) return error;
  }
  const unsigned tiles = (int64_t(p.max_query_len) * group + kTileRows - 1) / kTileRows;
  return launch(attention_simt_kernel<kFormat, kHeadDim>, dim3(tiles, p.num_kv_heads, p.num_seqs), dim3(Shape::kThreads),
                Shape::kSharedBytes, stream, p, false);
}

template <KvFormat kFormat>
const char* launch_simt_format(const PagedAttentionParams& p, void* stream) {
  if (p.head_dim <= 64) return launch_simt_kernel<kFormat, 64>(p, stream);
  if (p.head_dim <= 128) return launch_simt_kernel<kFormat, 128>(p, stream);
  return launch_simt_kernel<kFormat, 256>(p, stream);
}

const char* launch_simt(const PagedAttentionParams& p, void* stream) {
  if (p.kv_dtype == DType::kF32) return launch_simt_format<KvFormat::kModel>(p, stream);
  if (p.kv_dtype == DType::kInt8) return launch_simt_format<KvFormat::kInt8>(p, stream);
  return launch_simt_format<KvFormat::kFp8>(p, stream);
}

const char* launch_mma_by_head(const PagedAttentionParams& p, void* stream) {
  if (p.head_dim <= 64) return launch_mma<64>(p, stream);
  if (p.head_dim <= 96 && p.kv_dtype == p.dtype) return launch_mma<96>(p, stream);
  if (p.head_dim <= 128) return launch_mma<128>(p, stream);
  if (p.head_dim <= 192) return launch_mma<192>(p, stream);
  return launch_mma<256>(p, stream);
}

const char* launch_combine(const PagedAttentionParams& p, void* stream) {
  const dim3 grid(p.num_work, (p.num_heads + kCombineWarps - 1) / kCombineWarps), block(kCombineWarps * 32);
  if (p.dtype == DType::kF32) return launch(combine_kernel<float>, grid, block, 0, stream, p);
  if (p.dtype == DType::kF16) return launch(combine_kernel<Float16>, grid, block, 0, stream, p);
  return launch(combine_kernel<BFloat16>, grid, block, 0, stream, p);
}

}  // namespace

const char* paged_attention(const PagedAttentionParams& p, void* stream) {
  if (p.num_tokens == 0 || p.num_seqs == 0) return nullptr;
  if (const char* error = check(p)) return error;
  const char* error = p.dtype == DType::kF32 ? launch_simt(p, stream) : launch_mma_by_head(p, stream);
  if (error || !p.work) return error;
  return launch_combine(p, stream);
}

}  // namespace pyengine::cuda
