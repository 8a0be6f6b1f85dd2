// VecF without intrinsics: the compiler's generic vectors, for any machine.
#pragma once
#include <cstdint>

#include "scalar_convert.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kLanes = 4;
using FloatLanes = float __attribute__((vector_size(16)));
using IntLanes = int32_t __attribute__((vector_size(16)));

struct VecF {
  FloatLanes v;
};

inline VecF set1(float x) { return {FloatLanes{x, x, x, x}}; }
inline VecF zero() { return set1(0.0f); }

template <class T>
inline VecF load(const T* p) {
  return {FloatLanes{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}};
}
template <class T>
inline void store(T* p, VecF x) {
  for (int i = 0; i < kLanes; i++) from_float(x.v[i], p + i);
}

inline VecF operator+(VecF a, VecF b) { return {a.v + b.v}; }
inline VecF operator-(VecF a, VecF b) { return {a.v - b.v}; }
inline VecF operator*(VecF a, VecF b) { return {a.v * b.v}; }
inline VecF operator/(VecF a, VecF b) { return {a.v / b.v}; }
inline VecF fma(VecF a, VecF b, VecF c) { return {a.v * b.v + c.v}; }
inline VecF fnma(VecF a, VecF b, VecF c) { return {c.v - a.v * b.v}; }
inline VecF select(IntLanes mask, VecF yes, VecF no) {
  return {
      reinterpret_cast<FloatLanes>((mask & reinterpret_cast<IntLanes>(yes.v)) | (~mask & reinterpret_cast<IntLanes>(no.v)))};
}
inline VecF min(VecF a, VecF b) { return select(a.v < b.v, a, b); }
inline VecF max(VecF a, VecF b) { return select(a.v > b.v, a, b); }
inline VecF abs(VecF a) { return {reinterpret_cast<FloatLanes>(reinterpret_cast<IntLanes>(a.v) & 0x7fffffff)}; }
inline VecF sqrt(VecF a) {
  for (int i = 0; i < kLanes; i++) a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
}

// To the nearest whole number, for |x| < 2^22.
inline VecF round_to_int(VecF x) {
  const VecF magic = set1(12582912.0f);  // 1.5 * 2^23: the sum has no room for a fraction
  return (x + magic) - magic;
}
// x * 2^n for whole n in [-126, 128], 2^128 being infinity; any value for other n.
inline VecF mul_pow2(VecF x, VecF n) {
  return {x.v * reinterpret_cast<FloatLanes>((__builtin_convertvector(n.v, IntLanes) + 127) << 23)};
}
// x where `key` >= bound or is NaN, 0 elsewhere.
inline VecF zero_below(VecF x, VecF key, float bound) { return select(key.v < set1(bound).v, zero(), x); }

// a < b ? yes : no, lane by lane; NaN compares false.
inline VecF select_less(VecF a, VecF b, VecF yes, VecF no) { return select(a.v < b.v, yes, no); }

inline float first_lane(VecF x) { return x.v[0]; }

// The order of the sum is fixed: halves, then neighbours.
inline float hsum(VecF x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
inline float hmax(VecF x) {
  const float a = x.v[0] > x.v[2] ? x.v[0] : x.v[2], b = x.v[1] > x.v[3] ? x.v[1] : x.v[3];
  return a > b ? a : b;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
