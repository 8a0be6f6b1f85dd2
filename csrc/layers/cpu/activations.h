// Activations that vectors compute, for products that apply them and for the op of their own.
#pragma once
#include "../../cpu/simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

// x / (1 + e^y). Where e^y is lost beside 1 it need not be 0, which saves a comparison.
inline __attribute__((always_inline)) VecF over_one_plus_exp(VecF x, VecF y) {
  return x / (set1(1.0f) + exp_unclamped(min(set1(89.0f), max(set1(-87.33f), y))));
}

struct Silu {
  static inline __attribute__((always_inline)) VecF apply(VecF x) { return over_one_plus_exp(x, zero() - x); }
};

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016).
struct GeluTanh {
  static inline __attribute__((always_inline)) VecF apply(VecF x) {
    const VecF u = x * set1(0.7978845608f) * fma(x * x, set1(0.044715f), set1(1.0f));
    return over_one_plus_exp(x, u * set1(-2.0f));
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
