// Attention in fp32 without tensor cores, for sequences of any length: a block takes 16 packed query rows and walks the keys
// in tiles of 32 that it holds in shared memory as fp32. Eight lanes share a row: each takes every eighth key's score, then
// every eighth group of four channels. Tiles start at fixed positions, so a row's result does not depend on its neighbours.
#pragma once
#include "query_rows.cuh"

namespace pyengine::cuda {

template <int kHeadDim>
struct SimtShape {
  static constexpr int kThreads = 128, kTokens = 32, kRowLanes = 8;
  static constexpr int kPitch = kHeadDim + 4;  // floats, of a row of queries, keys or values
  static constexpr int kScorePitch = kTokens + 1;
  static constexpr int kSharedBytes = 4 * (kPitch * (kTileRows + 2 * kTokens) + kTileRows * kScorePitch);
};

// Four neighbouring elements of a key or value row, at `index` from `row`, as fp32.
template <KvFormat kFormat>
PYENGINE_DEVICE float4 load_kv4(const void* cache, int64_t index, float scale, bool e4m3) {
  if constexpr (kFormat == KvFormat::kModel) {
    return load_vector<float4>(static_cast<const float*>(cache) + index);
  } else {
    const uint32_t bytes = load_vector<uint32_t>(static_cast<const uint8_t*>(cache) + index);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t byte = static_cast<uint8_t>(bytes >> (8 * i));
      x[i] = scale * (kFormat == KvFormat::kFp8 ? fp8_to_float(byte, e4m3) : static_cast<float>(static_cast<int8_t>(byte)));
    }
    return {x[0], x[1], x[2], x[3]};
  }
}

// Loads tokens [first, first + 32) of keys and values; what lies outside `range` or beyond the head size becomes zero.
template <KvFormat kFormat, int kHeadDim>
PYENGINE_DEVICE void load_simt_tile(const PagedAttentionParams& p, const QueryRows& rows, float* keys, float* values, int first,
                                    KeyRange range) {
  using Shape = SimtShape<kHeadDim>;
  constexpr int kPieces = kHeadDim / 4;
  const int32_t* table = p.block_table + rows.seq * p.block_table_stride;
  const bool e4m3 = p.kv_dtype == DType::kFp8E4M3;
  for (int i = threadIdx.x; i < Shape::kTokens * kPieces; i += Shape::kThreads) {
    const int row = i / kPieces, column = i % kPieces * 4, token = first + row;
    float4 k = {0.0f, 0.0f, 0.0f, 0.0f}, v = k;
    if (token >= range.begin && token < range.end && column < p.head_dim) {
      const int64_t block = table[token >> p.block_shift], offset = token & (p.block_size - 1);
      float k_scale = 1.0f, v_scale = 1.0f;
      if constexpr (kFormat == KvFormat::kFp8) {
        if (p.k_scale) k_scale = p.k_scale[rows.kv_head];
        if (p.v_scale) v_scale = p.v_scale[rows.kv_head];
      } else if constexpr (kFormat == KvFormat::kInt8) {
        k_scale = p.k_scale[block * p.k_scale_block_stride + rows.kv_head * p.k_scale_head_stride + offset];
        v_scale = p.v_scale[block * p.v_scale_block_stride + rows.kv_head * p.v_scale_head_stride + offset];
      }
      k = load_kv4<kFormat>(p.k_cache,
                            block * p.k_block_stride + rows.kv_head * p.k_head_stride + offset * p.k_token_stride + column,
                            k_scale, e4m3);
      v = load_kv4<kFormat>(p.v_cache,
                            block * p.v_block_stride + rows.kv_head * p.v_head_stride + offset * p.v_token_stride + column,
                            v_scale, e4m3);
    }
    store_vector(keys + row * Shape::kPitch + column, k);
    store_vector(values + row * Shape::kPitch + column, v);
  }
}

template <int kHeadDim>
PYENGINE_DEVICE float dot_row(const float* a, const float* b) {
  float sum = 0.0f;
#pragma unroll 8
  for (int d = 0; d < kHeadDim; d += 4) {
    const float4 x = load_vector<float4>(a + d), y = load_vector<float4>(b + d);
    sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
  }
  return sum;
}

// Which rows and keys a block works on; seq < 0: none.
struct SimtWork {
  int seq, kv_begin, kv_end, part, kv_head, first_row;
};

// Of the planned launch, grid (num_work, num_kv_heads * row tiles), or of the other, grid (row tiles, num_kv_heads, num_seqs),
// which leaves the short sequences to the planned one where there is a plan.
PYENGINE_DEVICE SimtWork find_simt_work(const PagedAttentionParams& p, bool planned) {
  if (planned) {
    const AttentionWork w = p.work[blockIdx.x];
    return {
        w.seq, w.kv_begin, w.kv_end, w.part, int(blockIdx.y) % p.num_kv_heads, int(blockIdx.y) / p.num_kv_heads * kTileRows};
  }
  const int seq = blockIdx.z, query_len = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
  const bool ours = query_len > 0 && !(p.work && is_short(query_len, p.num_heads / p.num_kv_heads));
  return {ours ? seq : -1, 0, p.seq_lens[seq], -1, int(blockIdx.y), int(blockIdx.x) * kTileRows};
}

template <KvFormat kFormat, int kHeadDim>
__global__ void __launch_bounds__(128, 2) attention_simt_kernel(PagedAttentionParams p, bool planned) {
  using Shape = SimtShape<kHeadDim>;
  const SimtWork work = find_simt_work(p, planned);
  if (work.seq < 0) return;
  const QueryRows rows(p, work.seq, work.kv_head);
  if (work.first_row >= rows.num_rows) return;
  const int last_row = min(work.first_row + kTileRows, rows.num_rows) - 1;
  const KeyRange range(p, rows, work.first_row, last_row, work.kv_begin, work.kv_end);
  const ScoreTransform transform(p, 1.0f);

  float* queries = reinterpret_cast<float*>(shared_memory());
  float* keys = queries + kTileRows * Shape::kPitch;
  float* values = keys + Shape::kTokens * Shape::kPitch;
  const int r = threadIdx.x / Shape::kRowLanes, sub = threadIdx.x % Shape::kRowLanes;
  const int row = min(work.first_row + r, last_row);  // lanes of rows that do not exist shadow the last one
  float* query = queries + r * Shape::kPitch;
  float* scores = values + Shape::kTokens * Shape::kPitch + r * Shape::kScorePitch;
  const float* source =
      static_cast<const float*>(p.query) + rows.token(row) * p.query_token_stride + int64_t(rows.head(row)) * p.head_dim;
  for (int d = sub * 4; d < kHeadDim; d += Shape::kRowLanes * 4)
    store_vector(query + d, d < p.head_dim ? load_vector<float4>(source + d) : float4{0.0f, 0.0f, 0.0f, 0.0f});

  const int position = rows.position(row);
  const float slope = alibi_slope(p, rows.head(row));
  SoftmaxState state = {-INFINITY, 0.0f};
  float o[kHeadDim / 32][4] = {};
  for (int first = range.begin / Shape::kTokens * Shape::kTokens; first < range.end; first += Shape::kTokens) {
    __syncthreads();  // the last tile is done with
    load_simt_tile<kFormat, kHeadDim>(p, rows, keys, values, first, range);
    __syncthreads();
    float s[Shape::kTokens / Shape::kRowLanes], largest = state.max;
#pragma unroll
    for (int i = 0; i < Shape::kTokens / Shape::kRowLanes; i++) {
      const int token = i * Shape::kRowLanes + sub, key = first + token;
      s[i] = transform.modify(dot_row<kHeadDim>(query, keys + token * Shape::kPitch) * transform.factor, slope, key, position);
      if (key < range.begin || key >= range.end || !transform.sees(position, key)) s[i] = -INFINITY;
      largest = fmaxf(largest, s[i]);
    }
#pragma unroll
    for (int x = 1; x < Shape::kRowLanes; x *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, x));
    const float base = largest == -INFINITY ? 0.0f : largest, factor = fast_exp2(state.max - base);
    state.max = largest;
    state.sum *= factor;
#pragma unroll
    for (int i = 0; i < Shape::kTokens / Shape::kRowLanes; i++) {
      s[i] = fast_exp2(s[i] - base);
      state.sum += s[i];
      scores[i * Shape::kRowLanes + sub] = s[i];
    }
    __syncwarp();  // a row's lanes are of one warp
#pragma unroll
    for (int j = 0; j < kHeadDim / 32; j++) {
      float x[4] = {o[j][0] * factor, o[j][1] * factor, o[j][2] * factor, o[j][3] * factor};
#pragma unroll 8
      for (int t = 0; t < Shape::kTokens; t++) {
        const float4 v = load_vector<float4>(values + t * Shape::kPitch + (j * Shape::kRowLanes + sub) * 4);
        const float probability = scores[t];
        if (probability == 0.0f) continue;  // a key that the row does not see leaves no trace, whatever its value is
        x[0] += probability * v.x;
        x[1] += probability * v.y;
        x[2] += probability * v.z;
        x[3] += probability * v.w;
      }
      for (int e = 0; e < 4; e++) o[j][e] = x[e];
    }
    __syncwarp();  // before the scores are overwritten
  }
#pragma unroll
  for (int x = 1; x < Shape::kRowLanes; x *= 2) state.sum += __shfl_xor_sync(kFullWarp, state.sum, x);
  if (work.first_row + r > last_row) return;
#pragma unroll
  for (int j = 0; j < kHeadDim / 32; j++) {
    const int column = (j * Shape::kRowLanes + sub) * 4;
    if (column < p.head_dim) write_row4<float>(p, rows, row, column, state, o[j], 1.0f, work.part);
  }
}

}  // namespace pyengine::cuda
