// The integer vocabulary without intrinsics: generic vectors, for any machine.
#pragma once
#include "../../cpu/simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr bool kSumsIn16Bits = false;

using ByteLanes = uint8_t __attribute__((vector_size(16)));
using SignedLanes = int8_t __attribute__((vector_size(16)));
using WideLanes = int16_t __attribute__((vector_size(32)));
using PairLanes = int32_t __attribute__((vector_size(32)));

struct VecB {
  ByteLanes v;
};
struct VecI {
  IntLanes v;
};

inline VecB load_bytes(const uint8_t* p) {
  VecB x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline VecB broadcast4(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  const IntLanes words = {word, word, word, word};
  return {reinterpret_cast<ByteLanes>(words)};
}
inline VecB low_nibbles(VecB x) { return {x.v & 15}; }
inline VecB high_nibbles(VecB x) { return {x.v >> 4}; }
inline VecB and_bytes(VecB x, uint8_t mask) { return {x.v & mask}; }
inline VecB or_bytes(VecB x, VecB y) { return {x.v | y.v}; }
template <int N>
inline VecB shift_left(VecB x) {
  return {x.v << N};
}
template <int N>
inline VecB shift_right(VecB x) {
  return {x.v >> N};
}

inline VecI zero_int() { return {IntLanes{}}; }
inline VecI set1_int(int32_t x) { return {IntLanes{x, x, x, x}}; }
inline VecI operator+(VecI a, VecI b) { return {a.v + b.v}; }
inline VecF to_float(VecI x) { return {__builtin_convertvector(x.v, FloatLanes)}; }
inline int32_t hsum(VecI x) { return x.v[0] + x.v[1] + x.v[2] + x.v[3]; }

template <int Capacity, bool HasStart>
class DotSum {
 public:
  inline void begin(const int32_t* start) { sum_ = HasStart ? set1_int(*start) : zero_int(); }
  inline void add(int, VecB weights, VecB activations) {
    // Each product fits 16 bits; the two of a word, and then those of two words, are added in 32.
    const WideLanes products = __builtin_convertvector(weights.v, WideLanes) *
                               __builtin_convertvector(reinterpret_cast<SignedLanes>(activations.v), WideLanes);
    const PairLanes words = reinterpret_cast<PairLanes>(products);
    const PairLanes pairs = (words << 16 >> 16) + (words >> 16);
    sum_.v += __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6) + __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7);
  }
  inline VecI finish(const int32_t*) const { return sum_; }

 private:
  VecI sum_;
};

inline VecF max_magnitude(VecF a, VecF b) {
  const IntLanes x = reinterpret_cast<IntLanes>(abs(a).v), y = reinterpret_cast<IntLanes>(abs(b).v);
  const IntLanes larger = x > y;
  return {reinterpret_cast<FloatLanes>((larger & x) | (~larger & y))};
}
inline uint32_t largest_lane_bits(VecF x) {
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; i++) largest = float_bits(x.v[i]) > largest ? float_bits(x.v[i]) : largest;
  return largest;
}
inline VecI store_integers(int8_t* p, VecF x) {
  const VecI integers = {__builtin_convertvector(round_to_int(x).v, IntLanes)};
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(integers.v[i]);
  return integers;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
