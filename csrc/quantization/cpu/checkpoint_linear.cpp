// Products with weights in a checkpoint's own layout: plain loops, for the reference and for machines without a GPU. 64 columns
// at a time are widened to fp32, k by k, and every row sums over k in order.
#include <cmath>

#include "../../cpu/parallel.h"
#include "../../cpu/simd.h"
#include "../../cpu/with_type.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int kColumns = 64, kDepth = 128;  // of a panel of widened weights: fp32 [kDepth, kColumns]

template <class T>
float rounded_to(float x) {
  T y;
  from_float(x, &y);
  return to_float(y);
}

// Each format's `get`: the weight at (k, n) in fp32, its row scale left out.
template <class T>
struct Gptq {
  const CheckpointLinearParams& p;
  float get(int k, int n) const {
    const int32_t* words = static_cast<const int32_t*>(p.weight);
    const int q = words[int64_t{k / 8} * p.out_features + n] >> (4 * (k % 8)) & 15, group = k / p.group_size;
    const int zero = (p.zeros[int64_t{group} * (p.out_features / 8) + n / 8] >> (4 * (n % 8)) & 15) + 1;
    return rounded_to<T>(static_cast<float>(q - zero) *
                         to_float(static_cast<const T*>(p.scales)[int64_t{group} * p.out_features + n]));
  }
};

template <class T>
struct Awq {
  const CheckpointLinearParams& p;
  float get(int k, int n) const {
    int shift = 0;
    while (kAwqOrder[shift] != n % 8) shift++;
    const int32_t* words = static_cast<const int32_t*>(p.weight);
    const int words_per_row = p.out_features / 8, group = k / p.group_size;
    const int q = words[int64_t{k} * words_per_row + n / 8] >> (4 * shift) & 15;
    const int zero = p.zeros[int64_t{group} * words_per_row + n / 8] >> (4 * shift) & 15;
    return rounded_to<T>(static_cast<float>(q - zero) *
                         to_float(static_cast<const T*>(p.scales)[int64_t{group} * p.out_features + n]));
  }
};

template <class Code>
struct Rows {
  const CheckpointLinearParams& p;
  float get(int k, int n) const { return to_float(static_cast<const Code*>(p.weight)[int64_t{n} * p.in_features + k]); }
};

template <class Code>
Code widened(int8_t x, Code) {
  return static_cast<Code>(x);
}
template <class In>
float widened(In x, float) {
  return to_float(x);
}

// Columns [first, first + kColumns) of every row. Sum: float, or int32_t where input and weight are integers.
template <class Sum, class In, class T, class Weights, class Finish>
void multiply_columns(const CheckpointLinearParams& p, const Weights& weights, int first, const Finish& finish) {
  const int columns = p.out_features - first < kColumns ? p.out_features - first : kColumns;
  const size_t sums_bytes = sizeof(Sum) * kColumns * p.num_tokens;
  Sum* sums = static_cast<Sum*>(thread_scratch(sums_bytes + sizeof(Sum) * kDepth * kColumns));  // [num_tokens, kColumns]
  Sum* panel = sums + int64_t{kColumns} * p.num_tokens;                                         // [kDepth, kColumns]
  for (int64_t i = 0; i < int64_t{p.num_tokens} * kColumns; i++) sums[i] = 0;
  for (int k0 = 0; k0 < p.in_features; k0 += kDepth) {
    const int depth = p.in_features - k0 < kDepth ? p.in_features - k0 : kDepth;
    for (int k = 0; k < depth; k++) {
      for (int n = 0; n < kColumns; n++)
        panel[k * kColumns + n] = n < columns ? static_cast<Sum>(weights.get(k0 + k, first + n)) : Sum{0};
    }
    for (int row = 0; row < p.num_tokens; row++) {
      const In* input = static_cast<const In*>(p.input) + row * p.input_stride + k0;
      Sum* sum = sums + int64_t{row} * kColumns;
      for (int k = 0; k < depth; k++) {
        const Sum x = widened(input[k], Sum{});
        for (int n = 0; n < kColumns; n++) sum[n] += x * panel[k * kColumns + n];
      }
    }
  }
  const T* bias = static_cast<const T*>(p.bias);
  for (int row = 0; row < p.num_tokens; row++) {
    T* out = static_cast<T*>(p.out) + row * p.out_stride + first;
    for (int n = 0; n < columns; n++) {
      float x = finish(sums[int64_t{row} * kColumns + n], row, first + n);
      if (bias != nullptr) x += to_float(bias[first + n]);
      from_float(x, out + n);
    }
  }
}

template <class Sum, class In, class T, class Weights, class Finish>
const char* multiply(const CheckpointLinearParams& p, const Weights& weights, const Finish& finish) {
  parallel_for((p.out_features + kColumns - 1) / kColumns,
               [&](int64_t unit, int) { multiply_columns<Sum, In, T>(p, weights, static_cast<int>(unit) * kColumns, finish); });
  return nullptr;
}

float row_scale(const CheckpointLinearParams& p, int column) {
  return static_cast<const float*>(p.scales)[p.one_scale ? 0 : column];
}

}  // namespace

const char* gptq_linear(const CheckpointLinearParams& p) {
  return with_float_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return multiply<float, T, T>(p, Gptq<T>{p}, [](float sum, int, int) { return sum; });
  });
}

const char* awq_linear(const CheckpointLinearParams& p) {
  return with_float_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return multiply<float, T, T>(p, Awq<T>{p}, [](float sum, int, int) { return sum; });
  });
}

const char* fp8_linear(const CheckpointLinearParams& p) {
  return with_float_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return multiply<float, T, T>(p, Rows<Float8E4M3>{p}, [&](float sum, int, int n) { return sum * row_scale(p, n); });
  });
}

const char* int8_linear(const CheckpointLinearParams& p) {
  return with_float_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return multiply<int32_t, int8_t, T>(p, Rows<int8_t>{p}, [&](int32_t sum, int row, int n) {
      return static_cast<float>(sum) * p.input_scale[row] * row_scale(p, n);
    });
  });
}

const char* quantize_int8_rows(const QuantizeRowsParams& p) {
  return with_float_type(p.dtype, [&](auto t) -> const char* {
    using T = decltype(t);
    parallel_for(p.num_tokens, [&](int64_t row, int) {
      const T* input = static_cast<const T*>(p.input) + row * p.input_stride;
      int8_t* out = p.out + row * p.in_features;
      float largest = 0.0f;
      for (int k = 0; k < p.in_features; k++) {
        const float x = std::fabs(to_float(input[k]));
        if (!(x <= largest)) largest = x <= 3.402823466e38f ? x : NAN;  // NaN stays: nothing compares with it
        if (largest != largest) break;
      }
      if (largest < 0x1p-100f) largest = 0.0f;
      p.scale[row] = largest / 127.0f;
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      for (int k = 0; k < p.in_features; k++)
        out[k] = largest == largest ? static_cast<int8_t>(std::nearbyint(to_float(input[k]) * inverse)) : int8_t{0};
    });
    return nullptr;
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
