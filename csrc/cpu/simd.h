// One SIMD vocabulary for the CPU kernels: VecF holds kLanes floats (4, 8 or 16; each divides 16).
//
// Every instruction set's header defines: VecF, kLanes, zero, set1, load (from each storage type), store (float, Float16,
// BFloat16), + - * /, fma(a, b, c) = a * b + c, fnma(a, b, c) = c - a * b, min, max (NaN in the second operand survives), abs,
// sqrt, round_to_int, mul_pow2, zero_below, select_less, hsum, hmax and first_lane. Units are compiled with -ffp-contract=off:
// nothing is fused but fma.
#pragma once
#include "scalar_convert.h"
#if defined(PE_SIMD_AVX512)
#include "simd_avx512.h"
#elif defined(PE_SIMD_AVX2)
#include "simd_avx2.h"
#else
#include "simd_scalar.h"
#endif

namespace pyengine::cpu {
namespace PE_ISA {

inline VecF& operator+=(VecF& a, VecF b) { return a = a + b; }
inline VecF& operator*=(VecF& a, VecF b) { return a = a * b; }

// The first n of kLanes elements, the rest zero; never reads past them.
template <class T>
inline VecF load_partial(const T* p, int n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes] = {};
  for (int i = 0; i < n; i++) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
inline void store_partial(T* p, VecF x, int n) {
  if (n >= kLanes) return store(p, x);
  T buffer[kLanes];
  store(buffer, x);
  for (int i = 0; i < n; i++) p[i] = buffer[i];
}

// e^x = 2^n e^r, |r| <= ln 2 / 2; e^r by the minimax polynomial of Cephes' expf.
inline VecF exp_unclamped(VecF x) {
  const VecF n = round_to_int(x * set1(1.44269504f));
  VecF r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  VecF p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return mul_pow2(p, n);
}

// Relative error below 2e-7 in [-87.33, 88.37]; 0 below, infinity above, NaN stays.
inline VecF exp(VecF x) { return zero_below(exp_unclamped(min(set1(89.0f), max(set1(-87.33f), x))), x, -87.33f); }

// The same for x <= 0 or NaN.
inline VecF exp_nonpositive(VecF x) { return zero_below(exp_unclamped(x), x, -87.33f); }

}  // namespace PE_ISA
}  // namespace pyengine::cpu
