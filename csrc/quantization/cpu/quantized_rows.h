// Rows rounded to int8, laid out for the tile kernel: one record for each 32 values of a tile's rows.
#pragma once
#include "format_traits.h"
#include "int8_dot.h"

namespace pyengine::cpu {
namespace PE_ISA {

// A record of MR rows:  Value q[MR][32] | float scale[MR] | kSums times int32 or float sum[MR], which is
//   with minima:                  float scale * sum(q)
//   with an offset in the format: int32 -offset * sum(q), for each of the format's scales
// Value: int8_t, or int16_t where the kernel takes the same integers widened.
template <class F, int MR, class Value = int8_t>
struct RowRecord {
  static constexpr int kScales = MR * kSubBlock * sizeof(Value), kSums = kScales + 4 * MR, kBytes = kSums + 4 * F::kScales * MR;
};
template <class F, class Value = int8_t>
constexpr int64_t record_bytes(int rows) {
  return int64_t{rows} * RowRecord<F, 1, Value>::kBytes;
}

struct QuantizedBlock {
  float scale;
  int32_t sums[2];  // of the first and second 16 integers
};

// x[0 .. 32) = scale * q, rounded to nearest even. See QuantizedLinearParams for what is zero and what is NaN.
template <class T, class Value>
inline QuantizedBlock quantize_block(const T* x, Value* q) {
  constexpr int kVecs = kSubBlock / kLanes;
  VecF v[kVecs];
  VecF largest = zero();
  for (int i = 0; i < kVecs; i++) {
    v[i] = load(x + i * kLanes);
    largest = max_magnitude(v[i], largest);
  }
  const uint32_t bits = largest_lane_bits(largest);
  const float magnitude = bits_float(bits);
  QuantizedBlock block{};
  if (bits >= 0x7f800000 || magnitude < 0x1p-100f) {
    memset(q, 0, kSubBlock * sizeof(Value));
    block.scale = bits >= 0x7f800000 ? bits_float(0x7fc00000) : 0.0f;
    return block;
  }
  block.scale = magnitude / 127.0f;
  const VecF inverse = set1(127.0f / magnitude);
  for (int half = 0; half < 2; half++) {
    VecI sum = zero_int();
    for (int i = half * kVecs / 2; i < (half + 1) * kVecs / 2; i++) sum = sum + store_integers(q + i * kLanes, v[i] * inverse);
    block.sums[half] = hsum(sum);
  }
  return block;
}

// `count` rows of k values, and rows of zeros up to `rows`, to k / 32 records.
template <class F, class Value, class T>
inline void quantize_rows(const T* input, int64_t stride, int count, int rows, int k, uint8_t* records) {
  if (count < rows) memset(records, 0, record_bytes<F, Value>(rows) * (k / kSubBlock));
  for (int r = 0; r < count; r++) {
    uint8_t* record = records;
    for (int k0 = 0; k0 < k; k0 += kSubBlock, record += record_bytes<F, Value>(rows)) {
      const QuantizedBlock block = quantize_block(input + r * stride + k0, reinterpret_cast<Value*>(record) + r * kSubBlock);
      float* scales = reinterpret_cast<float*>(record + rows * kSubBlock * sizeof(Value));
      int32_t* sums = reinterpret_cast<int32_t*>(scales + rows);
      scales[r] = block.scale;
      if constexpr (F::kHasMin) {
        const float sum = block.scale * static_cast<float>(block.sums[0] + block.sums[1]);
        memcpy(sums + r, &sum, sizeof sum);
      } else if constexpr (F::kScales == 1) {
        sums[r] = -F::kOffset * (block.sums[0] + block.sums[1]);
      } else {
        for (int s = 0; s < F::kScales; s++) sums[s * rows + r] = -F::kOffset * block.sums[s];
      }
    }
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
