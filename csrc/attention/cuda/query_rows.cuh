// What all attention kernels share: the packing of query heads into rows, masks, score modifiers and the epilogue.
#pragma once
#include "../../common/cuda_port.h"
#include "../params.h"

namespace pyengine::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kNoWindow = 1 << 30;
constexpr int kTileRows = 16;  // rows of one mma tile; a sequence with more rows than this is not "short"

// How keys and values are stored: as the query is, as FP8 (e4m3 or e5m2) or as INT8 with a scale per token.
enum class KvFormat { kModel, kFp8, kInt8 };

// A sequence that the split-KV kernel serves: few rows a KV head. This is a function of the sequence alone, so that a row's
// result does not depend on its batch. `pyengine/worker/backends/attention_plan.py` holds the same rule.
PYENGINE_DEVICE bool is_short(int query_len, int group) { return query_len == 1 || query_len * group <= kTileRows; }

// The query rows of one sequence and KV head: row r is query token r / group under query head r % group of the KV head.
struct QueryRows {
  int seq, kv_head, group;
  int first_token;  // of the sequence in `query`
  int query_len, seq_len, num_rows;

  PYENGINE_DEVICE QueryRows(const PagedAttentionParams& p, int seq_, int kv_head_)
      : seq(seq_),
        kv_head(kv_head_),
        group(p.num_heads / p.num_kv_heads),
        first_token(p.query_start_loc[seq_]),
        query_len(p.query_start_loc[seq_ + 1] - p.query_start_loc[seq_]),
        seq_len(p.seq_lens[seq_]),
        num_rows(query_len * group) {}

  PYENGINE_DEVICE int token(int row) const { return first_token + row / group; }
  PYENGINE_DEVICE int head(int row) const { return kv_head * group + row % group; }
  // Position of the row's token in its sequence; it sees keys up to and including this one.
  PYENGINE_DEVICE int position(int row) const { return seq_len - query_len + row / group; }
};

// The keys that rows [first_row, last_row] see between them, cut to [begin, end).
struct KeyRange {
  int begin, end;

  PYENGINE_DEVICE KeyRange(const PagedAttentionParams& p, const QueryRows& rows, int first_row, int last_row, int from,
                           int to) {
    begin = from;
    if (p.sliding_window > 0) begin = max(begin, rows.position(first_row) + 1 - p.sliding_window);
    end = min(to, rows.position(last_row) + 1);
  }
};

// From dot products to logits in units of log 2: scale, soft-cap, ALiBi.
struct ScoreTransform {
  float factor, cap;  // with a cap, factor leads to the argument of tanh
  int window;
  bool has_cap, has_alibi;

  PYENGINE_DEVICE ScoreTransform(const PagedAttentionParams& p, float key_scale) {
    has_cap = p.logit_softcap > 0.0f;
    has_alibi = p.alibi_slopes != nullptr;
    factor = p.scale * key_scale * (has_cap ? 1.0f / p.logit_softcap : kLog2e);
    cap = p.logit_softcap * kLog2e;
    window = p.sliding_window > 0 ? p.sliding_window : kNoWindow;
  }
  PYENGINE_DEVICE float modify(float x, float slope, int key, int position) const {
    if (has_cap) x = cap * fast_tanh(x);
    return x + slope * static_cast<float>(key - position);
  }
  PYENGINE_DEVICE bool sees(int position, int key) const { return key <= position && key > position - window; }
};

PYENGINE_DEVICE float alibi_slope(const PagedAttentionParams& p, int head) {
  return p.alibi_slopes ? p.alibi_slopes[head] * kLog2e : 0.0f;
}

// A row's running softmax: the largest logit (units of log 2) and the sum of 2^(logit - max).
struct SoftmaxState {
  float max, sum;
};

// What scales a state with maximum `from` to one with maximum `to`.
PYENGINE_DEVICE float rescale(float from, float to) { return from == -INFINITY ? 0.0f : fast_exp2(from - to); }

// Lets a head's attention sink join the sum; returns what the accumulated output must be multiplied by on that account.
PYENGINE_DEVICE float add_sink(const PagedAttentionParams& p, int head, SoftmaxState& state) {
  if (!p.sinks) return 1.0f;
  const float sink = p.sinks[head] * kLog2e, merged = fmaxf(state.max, sink), factor = rescale(state.max, merged);
  state.sum = state.sum * factor + fast_exp2(sink - merged);
  state.max = merged;
  return factor;
}

PYENGINE_DEVICE float log2_sum(const SoftmaxState& state) {
  return state.sum == 0.0f ? -INFINITY : state.max + log2f(state.sum);
}

// Partial results in the workspace: slot s holds, for one query token and one part, out [num_heads, head_dim] and then the
// base-2 log of the sum [num_heads]; slots start at multiples of 4 floats.
PYENGINE_DEVICE int64_t slot_floats(const PagedAttentionParams& p) {
  return (int64_t(p.num_heads) * (p.head_dim + 1) + 3) / 4 * 4;
}
PYENGINE_DEVICE float* slot_out(const PagedAttentionParams& p, int slot, int head) {
  return p.workspace + slot * slot_floats(p) + int64_t(head) * p.head_dim;
}
PYENGINE_DEVICE float* slot_log2_sum(const PagedAttentionParams& p, int slot, int head) {
  return p.workspace + slot * slot_floats(p) + int64_t(p.num_heads) * p.head_dim + head;
}

// Stores four neighbouring output channels.
template <typename T>
PYENGINE_DEVICE void store_output4(T* out, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4)
    store_vector(out, float4{x[0], x[1], x[2], x[3]});
  else
    store_vector(out, uint2{pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3])});
}

// What a finished row's accumulated values must be multiplied by. The row's sink, if any, joins `state` first.
PYENGINE_DEVICE float output_factor(const PagedAttentionParams& p, int head, SoftmaxState& state, float value_scale) {
  const float sink_factor = add_sink(p, head, state);
  return state.sum == 0.0f ? 0.0f : sink_factor * value_scale / state.sum;
}

template <typename T>
PYENGINE_DEVICE T* output_row(const PagedAttentionParams& p, int token, int head) {
  return static_cast<T*>(p.out) + token * p.out_token_stride + int64_t(head) * p.head_dim;
}

PYENGINE_DEVICE void write_lse(const PagedAttentionParams& p, int token, int head, const SoftmaxState& state) {
  if (p.lse) p.lse[int64_t(token) * p.num_heads + head] = log2_sum(state) * kLn2;
}

// Writes channels [column, column + 4) of one row, whose softmax has `state` before any sink: to the output, or with
// part >= 0 to the workspace slot of the row's token. The writer of channel 0 writes the log-sum-exp too.
template <typename T>
PYENGINE_DEVICE void write_row4(const PagedAttentionParams& p, const QueryRows& rows, int row, int column, SoftmaxState state,
                                float (&x)[4], float value_scale, int part) {
  const int token = rows.token(row), head = rows.head(row);
  if (part < 0) {
    const float factor = output_factor(p, head, state, value_scale);
    for (int i = 0; i < 4; i++) x[i] *= factor;
    store_output4(output_row<T>(p, token, head) + column, x);
    if (column == 0) write_lse(p, token, head, state);
  } else {
    const int slot = part + token - rows.first_token;
    const float factor = state.sum == 0.0f ? 0.0f : value_scale / state.sum;
    for (int i = 0; i < 4; i++) x[i] *= factor;
    store_output4(slot_out(p, slot, head) + column, x);
    if (column == 0) *slot_log2_sum(p, slot, head) = log2_sum(state);
  }
}

}  // namespace pyengine::cuda
