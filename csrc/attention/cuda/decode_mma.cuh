// Attention for short sequences (decode, speculative verify) on tensor cores, split over keys. The query heads of one KV
// head, times the query tokens, are the 16 rows of the mma. Each of four warps has its own ring of cp.async stages and takes
// every fourth 16-token tile, so that the main loop has no block barrier; the warps' states are merged at the end.
#pragma once
#include "mma_steps.cuh"

namespace pyengine::cuda {

template <typename T, KvFormat kFormat, int kHeadDim>
struct DecodeShape {
  static constexpr int kWarps = 4, kThreads = kWarps * 32, kTokens = 16;
  using Tile = KvTile<T, kFormat, kHeadDim, kTokens>;
  static constexpr int kStages = kHeadDim > 192 && kFormat == KvFormat::kModel ? 2 : 3;
  static constexpr int kRingBytes = kStages * Tile::kBytes;
  static constexpr int kOutputPitch = kHeadDim + 4;  // floats; against bank conflicts
  static constexpr int kMergeBytes = kWarps * kTileRows * (kOutputPitch * 4 + int(sizeof(SoftmaxState)));
  static constexpr int kSharedBytes = kWarps * kRingBytes > kMergeBytes ? kWarps * kRingBytes : kMergeBytes;
};

// One unit of work: with a plan the block's entry of it, without one a whole short sequence.
PYENGINE_DEVICE AttentionWork find_work(const PagedAttentionParams& p, int index) {
  if (p.work) return p.work[index];
  const int query_len = p.query_start_loc[index + 1] - p.query_start_loc[index];
  const bool ours = query_len > 0 && is_short(query_len, p.num_heads / p.num_kv_heads);
  return {ours ? index : -1, 0, p.seq_lens[index], -1};
}

// Merges the warps' states and writes the rows. `shared`: outputs [kWarps, 16, kOutputPitch], then states [kWarps, 16].
template <typename T, int kHeadDim, typename Shape>
PYENGINE_DEVICE void merge_warps(const PagedAttentionParams& p, const QueryRows& rows, int first_row,
                                 const unsigned char* shared, float value_scale, int part) {
  const float* outputs = reinterpret_cast<const float*>(shared);
  const SoftmaxState* states = reinterpret_cast<const SoftmaxState*>(outputs + Shape::kWarps * kTileRows * Shape::kOutputPitch);
  const int num_rows = min(rows.num_rows - first_row, kTileRows);
  for (int i = threadIdx.x; i < num_rows * (kHeadDim / 4); i += Shape::kThreads) {
    const int row = i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
    if (column >= p.head_dim) continue;
    SoftmaxState merged = {-INFINITY, 0.0f};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; w++) merged.max = fmaxf(merged.max, states[w * kTileRows + row].max);
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; w++) {
      const SoftmaxState state = states[w * kTileRows + row];
      const float factor = rescale(state.max, merged.max);
      const float4 o = load_vector<float4>(outputs + (w * kTileRows + row) * Shape::kOutputPitch + column);
      merged.sum += factor * state.sum;
      x[0] += factor * o.x;
      x[1] += factor * o.y;
      x[2] += factor * o.z;
      x[3] += factor * o.w;
    }
    write_row4<T>(p, rows, first_row + row, column, merged, x, value_scale, part);
  }
}

// Grid: (num_work or num_seqs, num_kv_heads * row_tiles); row tile i of a KV head holds its rows 16 i to 16 i + 15.
template <typename T, KvFormat kFormat, int kHeadDim>
__global__ void __launch_bounds__(128, 2) decode_mma_kernel(PagedAttentionParams p) {
  using Shape = DecodeShape<T, kFormat, kHeadDim>;
  using Tile = typename Shape::Tile;
  constexpr int kStride = Shape::kWarps * Shape::kTokens;  // keys from one of a warp's tiles to its next
  const AttentionWork work = find_work(p, blockIdx.x);
  if (work.seq < 0) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3;
  const int kv_head = blockIdx.y % p.num_kv_heads, first_row = blockIdx.y / p.num_kv_heads * kTileRows;
  const QueryRows rows(p, work.seq, kv_head);
  if (first_row >= rows.num_rows) return;
  const int last_row = min(first_row + kTileRows, rows.num_rows) - 1;
  const KeyRange range(p, rows, first_row, last_row, work.kv_begin, work.kv_end);
  const PagedKv<kFormat> kv(p, rows, Tile::kElementBytes);
  unsigned char* ring = shared_memory() + warp * Shape::kRingBytes;

  const int first_key = range.begin / Shape::kTokens * Shape::kTokens + warp * Shape::kTokens;
  auto start_copy = [&](int key, int stage) {
    if (key < range.end)
      copy_tile<Tile, kFormat, Shape::kTokens, 32>(p, kv, Tile{ring + stage * Tile::kBytes}, key, range, lane);
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < Shape::kStages - 1; i++) start_copy(first_key + i * kStride, i);

  uint32_t q[kHeadDim / 16][4];
  const T* row_start[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + gid + 8 * r;
    row_start[r] = row > last_row ? nullptr
                                  : static_cast<const T*>(p.query) + rows.token(row) * p.query_token_stride +
                                        int64_t(rows.head(row)) * p.head_dim;
  }
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; i++) load_query_fragment<T, kFormat>(q[i], row_start[0], row_start[1], i, tig, p.head_dim);

  const WarpRows warp_rows(p, rows, first_row, gid);
  const ScoreTransform transform(p, head_scale<kFormat>(p.k_scale, kv_head));
  const Widen<T, kFormat> widen_keys(p);
  const Widen<typename Tile::Value, kFormat> widen_values(p);
  float o[kHeadDim / 8][4] = {};
  SoftmaxState state[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
  int stage = 0;
  for (int key = first_key; key < range.end; key += kStride) {
    cp_async_wait<Shape::kStages - 2>();
    __syncwarp();  // every lane's copies have landed, and every lane has left the stage that is filled next
    start_copy(key + (Shape::kStages - 1) * kStride, stage == 0 ? Shape::kStages - 1 : stage - 1);
    const Tile tile{ring + stage * Tile::kBytes};
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < kHeadDim / kStepChannels<kFormat>; i++)
      multiply_keys<T, kFormat>(s, q + i * (kStepChannels<kFormat> / 16), tile, widen_keys, 0, i, lane);
    finish_scores<kFormat, Shape::kTokens>(s, transform, warp_rows, tile, key, range, tig);
    online_softmax(s, state, o);
    uint32_t probabilities[4];
    pack_probabilities<kFormat>(probabilities, s, tile, 0, key, range, tig);
    multiply_values<kFormat, kHeadDim>(o, probabilities, tile, widen_values, 0, lane);
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
  }
  reduce_sums(state);

  __syncthreads();  // the rings are done with: their memory holds the warps' states from here on
  float* outputs = reinterpret_cast<float*>(shared_memory());
  SoftmaxState* states = reinterpret_cast<SoftmaxState*>(outputs + Shape::kWarps * kTileRows * Shape::kOutputPitch);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = warp * kTileRows + gid + 8 * r;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; i++) {
      outputs[row * Shape::kOutputPitch + output_column<kFormat>(i, 0, tig)] = o[i][2 * r];
      outputs[row * Shape::kOutputPitch + output_column<kFormat>(i, 1, tig)] = o[i][2 * r + 1];
    }
    if (tig == 0) states[row] = state[r];
  }
  __syncthreads();
  merge_warps<T, kHeadDim, Shape>(p, rows, first_row, shared_memory(), head_scale<kFormat>(p.v_scale, kv_head), work.part);
}

}  // namespace pyengine::cuda
