// Activations that vectors compute, for products that apply them and for the op of their own.
#pragma once
#include "../../cpu/simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

struct Silu {
  static VecF apply(VecF x) { return x / (set1(1.0f) + exp(zero() - x)); }
};

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016).
struct GeluTanh {
  static VecF apply(VecF x) {
    const VecF u = x * set1(0.7978845608f) * fma(x * x, set1(0.044715f), set1(1.0f));
    return x / (set1(1.0f) + exp(u * set1(-2.0f)));
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
