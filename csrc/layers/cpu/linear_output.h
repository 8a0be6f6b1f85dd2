// How a linear layer's sums become its output.
#pragma once
#include "../../cpu/simd.h"
#include "../gated_linear_params.h"
#include "activations.h"

namespace pyengine::cpu {
namespace PE_ISA {

// A product, and whether its columns are those of gate and up.
struct Product : GatedLinearParams {
  bool gated;

  // Panels that become one panel of the output.
  int panels_per_output() const { return gated ? 2 : 1; }
};

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

// The same of a gate's panel and of the one that it gates.
inline void write_gated_row(const Product& p, const float* gate, const float* up, int column, float* out) {
  const float* gate_bias = static_cast<const float*>(p.bias);
  for (int j = 0; j < kLinearPanel; j += kLanes) {
    const int count = p.out_features - column - j;
    if (count <= 0) return;
    VecF x = load(gate + j), y = load(up + j);
    if (gate_bias != nullptr) {
      x += load_partial(gate_bias + column + j, count);
      y += load_partial(gate_bias + p.out_features + column + j, count);
    }
    const VecF act = p.activation == GatedActivation::kSilu ? Silu::apply(x) : GeluTanh::apply(x);
    store_partial(out + column + j, act * y, count);
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
