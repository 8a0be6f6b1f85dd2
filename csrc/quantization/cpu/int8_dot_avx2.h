// The integer vocabulary on AVX2: 8 columns. maddubs adds two products in 16 bits; so many pairs as fit are added there too,
// which costs half of widening each.
#pragma once
#include "../../cpu/simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr bool kSumsIn16Bits = true;

struct VecB {
  __m256i v;
};
struct VecI {
  __m256i v;
};

inline VecB load_bytes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline VecB broadcast4(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}
inline VecB and_bytes(VecB x, uint8_t mask) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(static_cast<char>(mask)))}; }
inline VecB or_bytes(VecB x, VecB y) { return {_mm256_or_si256(x.v, y.v)}; }
template <int N>
inline VecB shift_left(VecB x) {
  return {_mm256_slli_epi16(x.v, N)};
}
template <int N>
inline VecB shift_right(VecB x) {
  return {_mm256_srli_epi16(x.v, N)};
}
inline VecB low_nibbles(VecB x) { return and_bytes(x, 15); }
inline VecB high_nibbles(VecB x) { return and_bytes(shift_right<4>(x), 15); }

inline VecI zero_int() { return {_mm256_setzero_si256()}; }
inline VecI set1_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline VecI operator+(VecI a, VecI b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline VecF to_float(VecI x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline int32_t hsum(VecI x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

template <int Capacity, bool HasStart>
class DotSum {
 public:
  inline void begin(const int32_t*) {}
  // The index-th group; called with 0, 1, 2, ... in order.
  inline void add(int index, VecB weights, VecB activations) {
    const __m256i product = _mm256_maddubs_epi16(weights.v, activations.v);
    sum16_ = index % Capacity == 0 ? product : _mm256_add_epi16(sum16_, product);
    keep_in_order(sum16_);
    if (Capacity < 8 && index % Capacity == Capacity - 1) {
      const __m256i wide = _mm256_madd_epi16(sum16_, _mm256_set1_epi16(1));
      sum32_ = index < Capacity ? wide : _mm256_add_epi32(sum32_, wide);
      keep_in_order(sum32_);
    }
  }
  // After a whole number of `Capacity` groups, or fewer than that.
  inline VecI finish(const int32_t* start) const {
    const VecI sum = {Capacity < 8 ? sum32_ : _mm256_madd_epi16(sum16_, _mm256_set1_epi16(1))};
    return HasStart ? sum + set1_int(*start) : sum;
  }
  inline VecI finish_times_16() const { return {_mm256_madd_epi16(sum16_, _mm256_set1_epi16(16))}; }

 private:
  // Compilers reassociate integer sums, which here takes more registers than there are.
  static inline void keep_in_order(__m256i& x) {
#if !defined(PE_SIMDE)
    __asm__("" : "+x"(x));
#endif
  }
  __m256i sum16_, sum32_;
};

inline VecF max_magnitude(VecF a, VecF b) {
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(abs(a).v), _mm256_castps_si256(abs(b).v)))};
}
inline uint32_t largest_lane_bits(VecF x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
}
inline VecI store_integers(int8_t* p, VecF x) {
  const __m256i integers = _mm256_cvtps_epi32(x.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  return {integers};
}
inline VecI store_integers(int16_t* p, VecF x) {
  const __m256i integers = _mm256_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1)));
  return {integers};
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
