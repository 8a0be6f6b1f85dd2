// The steps of attention on tensor cores, for one warp and its 16 query rows: scores, online softmax, values.
// Lane 4 g + t holds rows g and g + 8 of a tile; s and o are accumulators of mma.m16n8k16, 8 columns each.
#pragma once
#include "kv_tile.cuh"

namespace pyengine::cuda {

// Channels that one step over the keys contracts: one ldmatrix.x4 of 16 keys.
template <KvFormat kFormat>
constexpr int kStepChannels = kFormat == KvFormat::kModel ? 16 : 32;

// s[16 rows, 16 keys] += q * k^T for the tile's keys 16 n to 16 n + 15 and the channels of one step. q: A operands of the
// step, 16 channels each.
template <typename T, KvFormat kFormat, typename Tile>
PYENGINE_DEVICE void multiply_keys(float (*s)[4], const uint32_t (*q)[4], const Tile& tile, const Widen<T, kFormat>& widen,
                                   int n, int step, int lane) {
  uint32_t b[4];
  if constexpr (kFormat == KvFormat::kModel) {
    const int row = n * 16 + (lane >> 4) * 8 + (lane & 7), chunk = 2 * step + (lane >> 3 & 1);
    ldmatrix_x4<false>(b, tile.keys() + row * Tile::kPitch + chunk * 16);
    mma_m16n8k16<T>(s[0], q[0], b[0], b[1]);
    mma_m16n8k16<T>(s[1], q[0], b[2], b[3]);
  } else {  // b[2 h + m]: 16 channels of chunk h, 8 keys of half m, four channels a lane
    const int row = n * 16 + (lane & 15), chunk = 2 * step + (lane >> 4);
    ldmatrix_x4<false>(b, tile.keys() + row * Tile::kPitch + chunk * 16);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const uint32_t x = b[2 * h + m];
        mma_m16n8k16<T>(s[m], q[h], widen.template pair<0, 1>(x), widen.template pair<2, 3>(x));
      }
  }
}

// o[16 rows, channels] += p * v for the tile's tokens 16 n to 16 n + 15. p: the A operand of the probabilities.
template <KvFormat kFormat, int kHeadDim, typename Tile, typename Value>
PYENGINE_DEVICE void multiply_values(float (&o)[kHeadDim / 8][4], const uint32_t (&p)[4], const Tile& tile,
                                     const Widen<Value, kFormat>& widen, int n, int lane) {
  const unsigned char* row = tile.values() + (n * 16 + (lane & 15)) * Tile::kPitch + (lane >> 4) * 16;
#pragma unroll
  for (int j = 0; j < kHeadDim / kStepChannels<kFormat>; j++) {
    uint32_t b[4];
    ldmatrix_x4<true>(b, row + j * 32);
    if constexpr (kFormat == KvFormat::kModel) {
      mma_m16n8k16<Value>(o[2 * j], p, b[0], b[1]);
      mma_m16n8k16<Value>(o[2 * j + 1], p, b[2], b[3]);
    } else {  // 16 channels a chunk: the even ones, then the odd ones
#pragma unroll
      for (int h = 0; h < 2; h++) {
        mma_m16n8k16<Value>(o[4 * j + 2 * h], p, widen.template pair<0, 2>(b[2 * h]), widen.template pair<0, 2>(b[2 * h + 1]));
        mma_m16n8k16<Value>(o[4 * j + 2 * h + 1], p, widen.template pair<1, 3>(b[2 * h]),
                            widen.template pair<1, 3>(b[2 * h + 1]));
      }
    }
  }
}

// What a warp knows of its rows, and a lane of its two.
struct WarpRows {
  int position[2];                    // of the lane's rows g and g + 8
  float slope[2];                     // ALiBi, units of log 2
  int first_position, last_position;  // over the warp's rows

  PYENGINE_DEVICE WarpRows(const PagedAttentionParams& p, const QueryRows& rows, int first_row, int gid) {
    first_position = rows.position(first_row);
    last_position = rows.position(first_row + kTileRows - 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_row + gid + 8 * r;
      position[r] = rows.position(row);
      slope[r] = row < rows.num_rows ? alibi_slope(p, rows.head(row)) : 0.0f;
    }
  }
};

// Products to masked logits, for kTokens keys from position `first` on.
template <KvFormat kFormat, int kTokens, typename Tile>
PYENGINE_DEVICE void finish_scores(float (&s)[kTokens / 8][4], const ScoreTransform& transform, const WarpRows& rows,
                                   const Tile& tile, int first, KeyRange range, int tig) {
  const bool edge = first < range.begin || first + kTokens > range.end || first + kTokens - 1 > rows.first_position ||
                    first <= rows.last_position - transform.window;
  const int key = first + tig * 2;  // of s[0][0]
#pragma unroll
  for (int n = 0; n < kTokens / 8; n++) {
    float2 scale = {transform.factor, transform.factor};
    if constexpr (kFormat == KvFormat::kInt8) {
      const float2 key_scale = load_vector<float2>(tile.key_scales() + n * 8 + tig * 2);
      scale.x *= key_scale.x;
      scale.y *= key_scale.y;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] *= e & 1 ? scale.y : scale.x;
  }
  if (transform.has_cap || transform.has_alibi) {
#pragma unroll
    for (int n = 0; n < kTokens / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        s[n][e] = transform.modify(s[n][e], rows.slope[e >> 1], key + n * 8 + (e & 1), rows.position[e >> 1]);
  }
  if (edge) {
#pragma unroll
    for (int n = 0; n < kTokens / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int k = key + n * 8 + (e & 1);
        if (k < range.begin || k >= range.end || !transform.sees(rows.position[e >> 1], k)) s[n][e] = -INFINITY;
      }
  }
}

// Logits to probabilities: updates the running maxima and sums and rescales the outputs so far. The sums stay per lane, of
// the lane's own keys, until reduce_sums.
template <int kScoreTiles, int kOutputTiles>
PYENGINE_DEVICE void online_softmax(float (&s)[kScoreTiles][4], SoftmaxState (&state)[2], float (&o)[kOutputTiles][4]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float largest = state[r].max;
#pragma unroll
    for (int n = 0; n < kScoreTiles; n++) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    const float base = largest == -INFINITY ? 0.0f : largest;  // no key seen yet: every probability is 2^-inf
    const float factor = fast_exp2(state[r].max - base);
    state[r].max = largest;
    state[r].sum *= factor;
#pragma unroll
    for (int i = 0; i < kOutputTiles; i++) {
      o[i][2 * r] *= factor;
      o[i][2 * r + 1] *= factor;
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; e++) {
        s[n][e] = fast_exp2(s[n][e] - base);
        state[r].sum += s[n][e];
      }
  }
}

PYENGINE_DEVICE void reduce_sums(SoftmaxState (&state)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    state[r].sum += __shfl_xor_sync(kFullWarp, state[r].sum, 1);
    state[r].sum += __shfl_xor_sync(kFullWarp, state[r].sum, 2);
  }
}

// Probabilities of 16 tokens (s[0] and s[1]) as an A operand; with INT8 each is multiplied by its token's value scale.
// first: the position of token 16 n, of which only those in `range` have a scale.
template <KvFormat kFormat, typename Tile>
PYENGINE_DEVICE void pack_probabilities(uint32_t (&p)[4], const float (*s)[4], const Tile& tile, int n, int first,
                                        KeyRange range, int tig) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float x[4] = {s[h][0], s[h][1], s[h][2], s[h][3]};
    if constexpr (kFormat == KvFormat::kInt8) {
      const int offset = h * 8 + tig * 2, token = first + offset;
      float2 scale = load_vector<float2>(tile.value_scales() + n * 16 + offset);
      if (token < range.begin || token >= range.end) scale.x = 0.0f;
      if (token + 1 < range.begin || token + 1 >= range.end) scale.y = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] *= e & 1 ? scale.y : scale.x;
    }
    p[2 * h] = pack2<typename Tile::Value>(x[0], x[1]);
    p[2 * h + 1] = pack2<typename Tile::Value>(x[2], x[3]);
  }
}

}  // namespace pyengine::cuda
