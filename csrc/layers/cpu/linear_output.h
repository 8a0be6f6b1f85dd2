// How a linear layer's sums become its output.
#pragma once
#include "../../cpu/simd.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {

// One finished row of one panel: adds the bias, converts, writes columns [column, column + 16) as far as they exist.
template <class Out, class In>
inline void write_row(const float* c, const In* bias, int column, int out_features, Out* out) {
  for (int j = 0; j < kLinearPanel; j += kLanes) {
    const int count = out_features - column - j;
    if (count <= 0) return;
    VecF value = load(c + j);
    if (bias != nullptr) value += load_partial(bias + column + j, count);
    store_partial(out + column + j, value, count);
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
