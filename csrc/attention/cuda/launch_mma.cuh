// Launches the tensor-core kernels of one head size. Instantiated once in each mma_head*.cu; declared here for the dispatcher.
#pragma once
#include "decode_mma.cuh"
#include "prefill_mma.cuh"

namespace pyengine::cuda {

template <typename T, KvFormat kFormat, int kHeadDim>
const char* launch_mma_kernels(const PagedAttentionParams& p, void* stream) {
  using Decode = DecodeShape<T, kFormat, kHeadDim>;
  using Prefill = PrefillShape<T, kFormat, kHeadDim>;
  const int group = p.num_heads / p.num_kv_heads;
  const unsigned row_tiles = (group + kTileRows - 1) / kTileRows;  // of a short sequence
  const unsigned items = p.work ? p.num_work : p.num_seqs;
  const char* error = launch(decode_mma_kernel<T, kFormat, kHeadDim>, dim3(items, p.num_kv_heads * row_tiles),
                             dim3(Decode::kThreads), Decode::kSharedBytes, stream, p);
  if (error || p.max_query_len <= 1) return error;
  const unsigned tiles = (int64_t(p.max_query_len) * group + Prefill::kRows - 1) / Prefill::kRows;
  return launch(prefill_mma_kernel<T, kFormat, kHeadDim>, dim3(tiles, p.num_kv_heads, p.num_seqs), dim3(Prefill::kThreads),
                Prefill::kSharedBytes, stream, p);
}

template <typename T, int kHeadDim>
const char* launch_mma_format(const PagedAttentionParams& p, void* stream) {
  if (p.kv_dtype == p.dtype) return launch_mma_kernels<T, KvFormat::kModel, kHeadDim>(p, stream);
  // Head sizes between powers of two are common only with caches of the model's type; others are rounded up further.
  if constexpr (kHeadDim == 96) {
    return "paged_attention: head sizes 65 to 96 with a quantised cache belong to the kernels for 128";
  } else {
    if (p.kv_dtype == DType::kInt8) return launch_mma_kernels<T, KvFormat::kInt8, kHeadDim>(p, stream);
    return launch_mma_kernels<T, KvFormat::kFp8, kHeadDim>(p, stream);
  }
}

template <int kHeadDim>
const char* launch_mma(const PagedAttentionParams& p, void* stream) {
  return p.dtype == DType::kF16 ? launch_mma_format<Float16, kHeadDim>(p, stream)
                                : launch_mma_format<BFloat16, kHeadDim>(p, stream);
}

extern template const char* launch_mma<64>(const PagedAttentionParams&, void*);
extern template const char* launch_mma<96>(const PagedAttentionParams&, void*);
extern template const char* launch_mma<128>(const PagedAttentionParams&, void*);
extern template const char* launch_mma<192>(const PagedAttentionParams&, void*);
extern template const char* launch_mma<256>(const PagedAttentionParams&, void*);

}  // namespace pyengine::cuda
