// Arguments of the quantised matrix kernels, and the formats that they know. Strides are in elements.
#pragma once
#include "../common/dtype.h"
#include "../layers/params.h"

namespace pyengine {

// Block formats of GGUF files (ggml-common.h of ggml gives their layouts). A value is scale * q, or scale * q + minimum.
enum class QuantFormat : int32_t { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

struct QuantFormatInfo {
  const char* name;
  int32_t block_size;   // values of one row that the file stores together
  int32_t block_bytes;  // what such a block takes in the file
  int32_t tile_bytes;   // what 16 of them, one from each of 16 rows, take once packed
};

// By QuantFormat.
static constexpr QuantFormatInfo kQuantFormats[] = {
    {"Q4_0", 32, 18, 288}, {"Q4_1", 32, 20, 320},    {"Q5_0", 32, 22, 352},    {"Q5_1", 32, 24, 384},
    {"Q8_0", 32, 34, 544}, {"Q4_K", 256, 144, 2368}, {"Q5_K", 256, 176, 2880}, {"Q6_K", 256, 210, 3360},
};
constexpr int kNumQuantFormats = 8;
constexpr int kQuantPanel = 16;  // output features in one tile

// A packed weight is [ceil(out / 16), in / block_size, tile_bytes]: a tile holds one block of each of 16 rows ("columns", since
// they are columns of the output); absent rows are zero. Inside it, in this order:
//   Blocks of 256 only: fp16 scale[16], and where the format has minima, fp16 minimum[16] (the file's with its sign changed).
//   For each 32 values:
//     4, 5, 6 bits: low[4][64]: byte 4 c + j of low[h] has column c's value 4 h + j in its lower half, 16 + 4 h + j above.
//     5 bits:       high[64]: bit g of byte 4 c + j is the fifth bit of value 4 g + j.
//     6 bits:       high[2][64]: bits 2 h and 2 h + 1 of byte 4 c + j of high[i] are the upper ones of value 16 i + 4 h + j.
//     8 bits:       q[8][64]: byte 4 c + j of q[g] is value 4 g + j, plus 128.
//     Blocks of 32:  fp16 scale[16], and where the format has minima, fp16 minimum[16].
//     Blocks of 256: two int8[16], factors of the tile's: the scale, and the minimum or (Q6_K) the scale of the last 16 values.

struct PackQuantizedParams {
  void* packed;        // as above
  const void* weight;  // [out_features, in_features / block_size * block_bytes] bytes, as the file has them
  int64_t weight_stride;
  int32_t in_features, out_features;
  QuantFormat format;
};

// out = input * weight^T + bias. Each row of the input is rounded to int8, one scale for 32 values: scale = max |x| / 127. Dot
// products of 32 values are exact integers; they are scaled and summed in the order of k in fp32, whatever the number of rows
// is. A block without a magnitude above 2^-100 counts as zero; a row with a NaN or an infinity gives NaN.
//
// Gated, the weight has twice out_features columns, in panels turn about of the gate and of what it gates, which end up as
// out = act(gate) * up.
struct QuantizedLinearParams {
  void* out;           // [num_tokens, out_features], out_dtype
  const void* input;   // [num_tokens, in_features], dtype
  const void* weight;  // packed
  const void* bias;    // [out_features], dtype; gated: [2, out_features], the gate's first; or null
  int64_t out_stride, input_stride;
  int32_t num_tokens, in_features, out_features;
  DType dtype, out_dtype;
  QuantFormat format;
  bool gated;
  GatedActivation activation;  // kSilu or kGeluTanh
};

// out[i] = row indices[i] of the weight, dequantised.
struct QuantizedEmbeddingParams {
  void* out;               // [num_tokens, in_features], dtype
  const int64_t* indices;  // [num_tokens], checked
  const void* weight;      // packed
  int64_t out_stride;
  int32_t num_tokens, in_features;
  DType dtype;
  QuantFormat format;
};

// ---- weights of 8 bits, activations of 16 --------------------------------------------------------------------------------
// Where a CPU multiplies tiles of bytes (AMX), scaling each 32 products as above costs many times what the products do. So
// weights are rounded anew, up to 576 values of a row to one scale, and activations to 16 bits, whose halves are multiplied
// apart: a scale for the whole row then costs them less than a scale for 32 values does at 8 bits.
constexpr int kW8A16Panel = 32;  // output features
constexpr int kW8A16Step = 64;   // values of k in one tile of bytes
constexpr int kW8A16StepBytes = kW8A16Panel * kW8A16Step;
constexpr int kW8A16Factors = 2 * kW8A16Panel;
// A group of steps shares a scale. 16 rows' part of a group is 18 KB, which stays in a first-level cache while as much of each
// panel passes by; the sums of the high halves, at most 2^7 * 127 * 576, are exact in fp32.
constexpr int kW8A16MaxGroupSteps = 9;

constexpr int w8a16_steps(int64_t in_features) { return static_cast<int>((in_features + kW8A16Step - 1) / kW8A16Step); }
constexpr int w8a16_groups(int64_t in_features) {
  return (w8a16_steps(in_features) + kW8A16MaxGroupSteps - 1) / kW8A16MaxGroupSteps;
}
// All groups have as many, but the last may have fewer.
constexpr int w8a16_group_steps(int64_t in_features) {
  return (w8a16_steps(in_features) + w8a16_groups(in_features) - 1) / w8a16_groups(in_features);
}

// A packed weight is int8 [ceil(out / 32), ceil(in / 64), 2048], absent rows and values zero: byte 1024 h + 64 g + 4 c + j of a
// step is value 4 g + j of column 16 h + c. Its factors are fp32 [ceil(out / 32), w8a16_groups(in), 64]: a group's scale[32],
// and sum[32] of its integers, which some instructions need.
struct PackW8A16Params {
  int8_t* packed;
  float* factors;
  const float* weight;  // [out_features, in_features]
  int64_t weight_stride;
  int32_t in_features, out_features;
};

// out = input * weight^T + bias. A row of the input is rounded to q of 16 bits with scale = max |x| / 32767. A group's sums of
// q's halves times the weight are exact integers; fma(high, 256, low) is scaled, and added to the groups before it, whatever
// the number of rows is. A row without a magnitude above 2^-100 counts as zero; one with a NaN or an infinity gives NaN.
//
// Gated, the weight has twice out_features columns, in panels turn about of the gate and of what it gates, which end up as
// out = act(gate) * up.
struct W8A16LinearParams {
  void* out;             // [num_tokens, out_features], out_dtype
  const void* input;     // [num_tokens, in_features], dtype
  const int8_t* weight;  // packed
  const float* factors;  // the weight's
  const void* bias;      // [out_features], dtype; gated: [2, out_features], the gate's first; or null
  int64_t out_stride, input_stride;
  int32_t num_tokens, in_features, out_features;
  DType dtype, out_dtype;
  bool gated;
  GatedActivation activation;  // kSilu or kGeluTanh
};

// out[i] = row indices[i] of the weight, dequantised.
struct W8A16EmbeddingParams {
  void* out;               // [num_tokens, in_features], dtype
  const int64_t* indices;  // [num_tokens], checked
  const int8_t* weight;    // packed
  const float* factors;
  int64_t out_stride;
  int32_t num_tokens, in_features;
  DType dtype;
};

// ---- weights as quantised checkpoints for GPUs have them ---------------------------------------------------------------
// out = input * weight^T + bias, each sum in a fixed order of k whatever the number of rows is. Weights stay as the checkpoint
// has them:
//   GPTQ (4 bits, asymmetric): word [k / 8][n] of qweight has k's value in bits 4 (k % 8); word [k / group][n / 8] of qzeros
//   has
//     zero - 1 in bits 4 (n % 8). Value: (q - zero) * scale[k / group][n], rounded to dtype.
//   AWQ (4 bits): word [k][n / 8] has value n in bits 4 i with kAwqOrder[i] == n % 8; qzeros likewise, zeros as they are.
//   FP8: e4m3 [out_features, in_features], a scale for each row or one for all.
//   INT8: int8 [out_features, in_features], scales likewise; the input is int8 too, a scale for each row. Sums are exact.
static constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

struct CheckpointLinearParams {
  void* out;                 // [num_tokens, out_features], dtype
  const void* input;         // [num_tokens, in_features], dtype; INT8: int8
  const void* weight;        // as above
  const void* scales;        // 4 bits: [groups, out_features], dtype; else fp32 [out_features] or [1]
  const int32_t* zeros;      // 4 bits: [groups, out_features / 8]
  const float* input_scale;  // INT8: [num_tokens]
  const void* bias;          // [out_features], dtype; or null
  int64_t out_stride, input_stride;
  int32_t num_tokens, in_features, out_features;
  int32_t group_size;  // 4 bits: values of k that share a scale
  bool one_scale;      // FP8, INT8: scales has one element
  DType dtype;
};

// out = round(input / scale), to nearest even; scale = max |row| / 127. A row without a magnitude of 2^-100 or more counts as
// zero: scale 0 and zeros. A row with a NaN or an infinity has a scale that is none, so that its products are NaN.
struct QuantizeRowsParams {
  int8_t* out;        // [num_tokens, in_features]
  float* scale;       // [num_tokens]
  const void* input;  // [num_tokens, in_features], dtype
  int64_t input_stride;
  int32_t num_tokens, in_features;
  DType dtype;
};

}  // namespace pyengine
