// Rows rounded to int8, laid out for the tile kernel: one record for each 32 values of a tile's rows.
#pragma once
#include "format_traits.h"
#include "int8_dot.h"
#if defined(PE_SIMD_AVX2)
#include "quantize_blocks_avx2.h"
#endif

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

// Row r's part of a record.
template <class F, class Value>
class RecordRow {
 public:
  RecordRow(uint8_t* record, int rows, int r) : record_(record), rows_(rows), r_(r) {}

  Value* values() const { return reinterpret_cast<Value*>(record_) + r_ * kSubBlock; }
  // sums: of the first and second 16 integers
  void set_factors(float scale, int32_t first_sum, int32_t second_sum) const {
    float* scales = reinterpret_cast<float*>(record_ + rows_ * kSubBlock * sizeof(Value));
    int32_t* sums = reinterpret_cast<int32_t*>(scales + rows_);
    scales[r_] = scale;
    if constexpr (F::kHasMin) {
      const float sum = scale * static_cast<float>(first_sum + second_sum);
      memcpy(sums + r_, &sum, sizeof sum);
    } else if constexpr (F::kScales == 1) {
      sums[r_] = -F::kOffset * (first_sum + second_sum);
    } else {
      sums[r_] = -F::kOffset * first_sum;
      sums[rows_ + r_] = -F::kOffset * second_sum;
    }
  }

 private:
  uint8_t* record_;
  int rows_, r_;
};

template <class F, class Value, class T>
inline void quantize_one(const T* x, RecordRow<F, Value> row) {
  const QuantizedBlock block = quantize_block(x, row.values());
  row.set_factors(block.scale, block.sums[0], block.sums[1]);
}

#if defined(PE_SIMD_AVX2)
template <class F, class Value, class T>
inline void quantize_four(const T* x, int r, int rows, uint8_t* record) {
  const int64_t record_size = record_bytes<F, Value>(rows);
  const auto row = [&](int b) { return RecordRow<F, Value>(record + b * record_size, rows, r); };
  RoundedBlocks blocks;
  if (quantize_four_blocks(x, row(0).values(), record_size / static_cast<int64_t>(sizeof(Value)), blocks)) {
    for (int b = 0; b < kBlocksAtOnce; b++) row(b).set_factors(blocks.scale[b], blocks.sums[0][b], blocks.sums[1][b]);
  } else {
    for (int b = 0; b < kBlocksAtOnce; b++) quantize_one(x + b * kSubBlock, row(b));
  }
}
#endif

// `count` rows of k values, and rows of zeros up to `rows`, to k / 32 records.
template <class F, class Value, class T>
inline void quantize_rows(const T* input, int64_t stride, int count, int rows, int k, uint8_t* records) {
  const int64_t record_size = record_bytes<F, Value>(rows);
  if (count < rows) memset(records, 0, record_size * (k / kSubBlock));
  for (int r = 0; r < count; r++) {
    const T* x = input + r * stride;
    uint8_t* record = records;
    int k0 = 0;
#if defined(PE_SIMD_AVX2)
    for (; k0 + kBlocksAtOnce * kSubBlock <= k; k0 += kBlocksAtOnce * kSubBlock, record += kBlocksAtOnce * record_size) {
      quantize_four<F, Value>(x + k0, r, rows, record);
    }
#endif
    for (; k0 < k; k0 += kSubBlock, record += record_size) quantize_one<F, Value>(x + k0, RecordRow<F, Value>(record, rows, r));
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
