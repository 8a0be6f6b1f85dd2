// Weights of 8 bits for w8a16_linear: rounded and packed once when a model is loaded, and rows of them as floats again.
#include <cstring>

#include "../../cpu/parallel.h"
#include "../../cpu/scalar_convert.h"
#include "../../cpu/with_type.h"
#include "../params.h"
#include "w8a16_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kRowsPerUnit = 8;

// Where value k of a column is among a panel's bytes.
int64_t place(int k, int column) {
  return int64_t{k / kW8A16Step} * kW8A16StepBytes + 1024 * (column / 16) + 64 * (k % kW8A16Step / 4) + 4 * (column % 16) +
         k % 4;
}

// A group's values of a column: value = scale * q, scale = max |value| / 127, q to nearest even.
void pack_group(const float* values, int first, int count, int column, int8_t* panel, float* factors) {
  VecF largest = zero();
  for (int i = 0; i < count; i += kLanes) largest = max_magnitude(load_partial(values + i, count - i), largest);
  const uint32_t bits = largest_lane_bits(largest);
  const float magnitude = bits_float(bits);
  if (bits >= 0x7f800000) factors[column] = bits_float(0x7fc00000);
  if (bits >= 0x7f800000 || magnitude < 0x1p-100f) return;
  const VecF inverse = set1(127.0f / magnitude);
  float sum = 0.0f;
  for (int i = 0; i < count; i += kLanes) {
    float whole[kLanes];
    store(whole, round_to_int(load_partial(values + i, count - i) * inverse));
    for (int j = 0; j < kLanes && i + j < count; j++) {
      panel[place(first + i + j, column)] = static_cast<int8_t>(whole[j]);
      sum += whole[j];
    }
  }
  factors[column] = magnitude / 127.0f;
  factors[kW8A16Panel + column] = sum;
}

void pack_panel(const PackW8A16Params& p, int64_t index) {
  const int64_t panel_bytes = int64_t{w8a16_steps(p.in_features)} * kW8A16StepBytes;
  const int groups = w8a16_groups(p.in_features), group = w8a16_group_steps(p.in_features) * kW8A16Step;
  int8_t* panel = p.packed + index * panel_bytes;
  float* factors = p.factors + index * groups * kW8A16Factors;
  memset(panel, 0, static_cast<size_t>(panel_bytes));
  memset(factors, 0, static_cast<size_t>(groups) * kW8A16Factors * sizeof(float));
  for (int c = 0; c < kW8A16Panel && index * kW8A16Panel + c < p.out_features; c++) {
    const float* row = p.weight + (index * kW8A16Panel + c) * p.weight_stride;
    for (int g = 0; g < groups; g++) {
      const int first = g * group, left = p.in_features - first;
      pack_group(row + first, first, left < group ? left : group, c, panel, factors + g * kW8A16Factors);
    }
  }
}

template <class Out>
void dequantize_row(const W8A16EmbeddingParams& p, int row) {
  const int64_t panel = p.indices[row] / kW8A16Panel;
  const int column = static_cast<int>(p.indices[row] % kW8A16Panel);
  const int8_t* weight = p.weight + panel * w8a16_steps(p.in_features) * kW8A16StepBytes;
  const float* scales = p.factors + panel * w8a16_groups(p.in_features) * kW8A16Factors + column;
  Out* out = static_cast<Out*>(p.out) + row * p.out_stride;
  const int group = w8a16_group_steps(p.in_features) * kW8A16Step;
  for (int k = 0; k < p.in_features; k++) {
    from_float(scales[k / group * kW8A16Factors] * static_cast<float>(weight[place(k, column)]), out + k);
  }
}

}  // namespace

const char* pack_w8a16_weight(const PackW8A16Params& p) {
  const int64_t panels = (int64_t{p.out_features} + kW8A16Panel - 1) / kW8A16Panel;
  parallel_for(panels, [&](int64_t panel, int) { pack_panel(p, panel); });
  return nullptr;
}

const char* w8a16_embedding(const W8A16EmbeddingParams& p) {
  const int64_t units = (p.num_tokens + kRowsPerUnit - 1) / kRowsPerUnit;
  return with_float_type(p.dtype, [&](auto out) -> const char* {
    parallel_for(units, [&](int64_t unit, int) {
      const int64_t end = (unit + 1) * kRowsPerUnit;
      for (int64_t row = unit * kRowsPerUnit; row < end && row < p.num_tokens; row++) {
        dequantize_row<decltype(out)>(p, static_cast<int>(row));
      }
    });
    return nullptr;
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
