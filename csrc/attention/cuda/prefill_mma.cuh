// Attention for longer sequences (prefill, chunked prefill) on tensor cores, in the manner of FlashAttention-2: a block holds
// 128 packed query rows in shared memory, its 8 warps 16 of them each, and walks the keys in double-buffered tiles.
#pragma once
#include "mma_steps.cuh"

namespace pyengine::cuda {

template <typename T, KvFormat kFormat, int kHeadDim>
struct PrefillShape {
  static constexpr int kWarps = 8, kThreads = kWarps * 32, kRows = kWarps * kTileRows;
  static constexpr int kTokens = kHeadDim > 192 ? 32 : 64;
  using Tile = KvTile<T, kFormat, kHeadDim, kTokens>;
  static constexpr int kQueryChunks = kHeadDim * 2 / 16, kQueryPitch = (kQueryChunks | 1) * 16;
  static constexpr int kQueryBytes = kRows * kQueryPitch;
  static constexpr int kSharedBytes = kQueryBytes + 2 * Tile::kBytes;
};

// Starts copying the block's query rows to shared memory; rows and channels that do not exist become zero.
template <typename T, typename Shape>
PYENGINE_DEVICE void copy_queries(const PagedAttentionParams& p, const QueryRows& rows, int first_row, unsigned char* shared) {
  for (int c = threadIdx.x; c < Shape::kRows * Shape::kQueryChunks; c += Shape::kThreads) {
    const int r = c / Shape::kQueryChunks, chunk = c % Shape::kQueryChunks, row = first_row + r;
    const bool live = row < rows.num_rows && chunk * 8 < p.head_dim;
    const T* from = static_cast<const T*>(p.query);
    if (live) from += rows.token(row) * p.query_token_stride + int64_t(rows.head(row)) * p.head_dim + chunk * 8;
    cp_async<16>(shared + r * Shape::kQueryPitch + chunk * 16, from, live ? 16 : 0);
  }
}

// The warp's A operands of one step over the keys, from its 16 query rows at `base`.
template <KvFormat kFormat, typename Shape>
PYENGINE_DEVICE void load_query_operands(uint32_t (&q)[kStepChannels<kFormat> / 16][4], const unsigned char* base, int step,
                                         int lane) {
  if constexpr (kFormat == KvFormat::kModel) {
    ldmatrix_x4<false>(q[0], base + (lane & 15) * Shape::kQueryPitch + (2 * step + (lane >> 4)) * 16);
  } else {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = (lane >> 2) + 8 * r, byte = (2 * step + h) * 32 + (lane & 3) * 8;
        const uint2 v = load_vector<uint2>(base + row * Shape::kQueryPitch + byte);
        q[h][r] = v.x;
        q[h][2 + r] = v.y;
      }
  }
}

// Writes the warp's rows from their accumulators: two neighbouring channels at a time, or four with one-byte values.
template <typename T, KvFormat kFormat, int kHeadDim>
PYENGINE_DEVICE void write_rows(const PagedAttentionParams& p, const QueryRows& rows, int first_row,
                                const float (&o)[kHeadDim / 8][4], SoftmaxState (&state)[2], int lane, float value_scale) {
  const int tig = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + (lane >> 2) + 8 * r;
    if (row >= rows.num_rows) continue;
    const int token = rows.token(row), head = rows.head(row);
    const float factor = output_factor(p, head, state[r], value_scale);
    T* out = output_row<T>(p, token, head);
    if (tig == 0) write_lse(p, token, head, state[r]);
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; i += kFormat == KvFormat::kModel ? 1 : 2) {
      const int column = output_column<kFormat>(i, 0, tig);
      if (column >= p.head_dim) continue;
      if constexpr (kFormat == KvFormat::kModel) {
        store_vector(out + column, pack2<T>(o[i][2 * r] * factor, o[i][2 * r + 1] * factor));
      } else {
        store_vector(out + column, uint2{pack2<T>(o[i][2 * r] * factor, o[i + 1][2 * r] * factor),
                                         pack2<T>(o[i][2 * r + 1] * factor, o[i + 1][2 * r + 1] * factor)});
      }
    }
  }
}

// Grid: (tiles of 128 rows of the longest sequence, num_kv_heads, num_seqs).
template <typename T, KvFormat kFormat, int kHeadDim>
__global__ void __launch_bounds__(256) prefill_mma_kernel(PagedAttentionParams p) {
  using Shape = PrefillShape<T, kFormat, kHeadDim>;
  using Tile = typename Shape::Tile;
  const QueryRows rows(p, blockIdx.z, blockIdx.y);
  // The last rows see the most keys: their blocks start first.
  const int tiles = (rows.num_rows + Shape::kRows - 1) / Shape::kRows, first_row = (tiles - 1 - int(blockIdx.x)) * Shape::kRows;
  if (first_row < 0 || is_short(rows.query_len, rows.group)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3;
  const int last_row = min(first_row + Shape::kRows, rows.num_rows) - 1;
  const KeyRange range(p, rows, first_row, last_row, 0, rows.seq_len);
  const PagedKv<kFormat> kv(p, rows, Tile::kElementBytes);
  unsigned char* ring = shared_memory() + Shape::kQueryBytes;

  auto start_copy = [&](int key, int stage) {
    if (key < range.end)
      copy_tile<Tile, kFormat, Shape::kTokens, Shape::kThreads>(p, kv, Tile{ring + stage * Tile::kBytes}, key, range,
                                                                threadIdx.x);
    cp_async_commit();
  };
  const int first_key = range.begin / Shape::kTokens * Shape::kTokens;
  copy_queries<T, Shape>(p, rows, first_row, shared_memory());
  start_copy(first_key, 0);

  const unsigned char* queries = shared_memory() + warp * kTileRows * Shape::kQueryPitch;
  const WarpRows warp_rows(p, rows, first_row + warp * kTileRows, gid);
  const ScoreTransform transform(p, head_scale<kFormat>(p.k_scale, rows.kv_head));
  const Widen<T, kFormat> widen_keys(p);
  const Widen<typename Tile::Value, kFormat> widen_values(p);
  float o[kHeadDim / 8][4] = {};
  SoftmaxState state[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
  for (int key = first_key, stage = 0; key < range.end; key += Shape::kTokens, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // the tile has landed for every thread, and every warp has left the other stage
    start_copy(key + Shape::kTokens, stage ^ 1);
    const Tile tile{ring + stage * Tile::kBytes};
    float s[Shape::kTokens / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kHeadDim / kStepChannels<kFormat>; i++) {
      uint32_t q[kStepChannels<kFormat> / 16][4];
      load_query_operands<kFormat, Shape>(q, queries, i, lane);
#pragma unroll
      for (int n = 0; n < Shape::kTokens / 16; n++) multiply_keys<T, kFormat>(s + 2 * n, q, tile, widen_keys, n, i, lane);
    }
    finish_scores<kFormat, Shape::kTokens>(s, transform, warp_rows, tile, key, range, tig);
    online_softmax(s, state, o);
#pragma unroll
    for (int n = 0; n < Shape::kTokens / 16; n++) {
      uint32_t probabilities[4];
      pack_probabilities<kFormat>(probabilities, s + 2 * n, tile, n, key + n * 16, range, tig);
      multiply_values<kFormat, kHeadDim>(o, probabilities, tile, widen_values, n, lane);
    }
  }
  reduce_sums(state);

  write_rows<T, kFormat, kHeadDim>(p, rows, first_row + warp * kTileRows, o, state, lane,
                                   head_scale<kFormat>(p.v_scale, rows.kv_head));
}

}  // namespace pyengine::cuda
