// Arguments of the layer kernels: plain data that every backend shares. Strides are in elements.
#pragma once
#include "../common/dtype.h"

namespace pyengine {

// out = input / rms(input) * weight; with residual set: residual += input first, and the sum is normalised into input.
struct RmsNormParams {
  void* out;           // [num_tokens, hidden_size], dtype
  const void* input;   // [num_tokens, hidden_size], dtype
  void* residual;      // [num_tokens, hidden_size], dtype; or null
  const void* weight;  // [hidden_size], dtype
  int64_t out_stride, input_stride, residual_stride;
  int32_t num_tokens, hidden_size;
  float epsilon;
  DType dtype;
};

struct RotaryParams {
  const int64_t* positions;    // [num_tokens]
  void* query;                 // [num_tokens, num_heads, head_dim], dtype; token stride free, the rest dense
  void* key;                   // [num_tokens, num_kv_heads, head_dim], dtype; or null
  const float* cos_sin_cache;  // [max_position, rotary_dim], cosines then sines
  int64_t query_token_stride, key_token_stride;
  int32_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
  bool is_neox;
  DType dtype;
};

enum class GatedActivation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// out = act(input[:, :d]) * input[:, d:]
struct ActAndMulParams {
  void* out;          // [num_tokens, d], dtype
  const void* input;  // [num_tokens, 2 d], dtype
  int64_t out_stride, input_stride;
  int32_t num_tokens, d;
  GatedActivation activation;
  DType dtype;
};

// out = input * weight^T + bias. Each output is summed in fp32 in one fixed order of k, whatever the number of rows is: k = 0,
// 1, 2, ..., but two chains for each 32 with AMX and bf16.
struct LinearParams {
  void* out;           // [num_tokens, out_features], out_dtype
  const void* input;   // [num_tokens, in_features], dtype
  const void* weight;  // packed: [ceil(out_features / 16), in_features, 16], weight_dtype, zero padded
  const void* bias;    // [out_features], dtype; or null
  int64_t out_stride, input_stride;
  int32_t num_tokens, in_features, out_features;
  DType dtype, weight_dtype, out_dtype;
};
constexpr int kLinearPanel = 16;

// packed[p][k][j] = weight[16 p + j][k], zero where 16 p + j reaches past the last row.
struct PackLinearParams {
  void* packed;        // [ceil(out_features / 16), in_features, 16], dtype
  const void* weight;  // [out_features, in_features], dtype
  int64_t weight_stride;
  int32_t in_features, out_features;
  DType dtype;
};

}  // namespace pyengine
