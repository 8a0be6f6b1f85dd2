// The integer vocabulary on AVX-512: 16 columns. With VNNI four products are added to 32 bits in one instruction; without it,
// as on AVX2.
#pragma once
#include "../../cpu/simd.h"

namespace pyengine::cpu {
namespace PE_ISA {

#if defined(PE_SIMD_VNNI)
constexpr bool kSumsIn16Bits = false;
#else
constexpr bool kSumsIn16Bits = true;
#endif

struct VecB {
  __m512i v;
};
struct VecI {
  __m512i v;
};

inline VecB load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline VecB broadcast4(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
inline VecB and_bytes(VecB x, uint8_t mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
inline VecB or_bytes(VecB x, VecB y) { return {_mm512_or_si512(x.v, y.v)}; }
template <int N>
inline VecB shift_left(VecB x) {
  return {_mm512_slli_epi16(x.v, N)};
}
template <int N>
inline VecB shift_right(VecB x) {
  return {_mm512_srli_epi16(x.v, N)};
}
inline VecB low_nibbles(VecB x) { return and_bytes(x, 15); }
inline VecB high_nibbles(VecB x) { return and_bytes(shift_right<4>(x), 15); }

inline VecI zero_int() { return {_mm512_setzero_si512()}; }
inline VecI set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline VecI operator+(VecI a, VecI b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline VecF to_float(VecI x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline int32_t hsum(VecI x) {
  const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

template <int Capacity, bool HasStart>
class DotSum {
 public:
#if defined(PE_SIMD_VNNI)
  inline void begin(const int32_t* start) { sum32_ = HasStart ? _mm512_set1_epi32(*start) : _mm512_setzero_si512(); }
  inline void add(int, VecB weights, VecB activations) { sum32_ = _mm512_dpbusd_epi32(sum32_, weights.v, activations.v); }
  inline VecI finish(const int32_t*) const { return {sum32_}; }

 private:
  __m512i sum32_;
#else
  inline void begin(const int32_t*) {}
  // The index-th group; called with 0, 1, 2, ... in order.
  inline void add(int index, VecB weights, VecB activations) {
    const __m512i product = _mm512_maddubs_epi16(weights.v, activations.v);
    sum16_ = index % Capacity == 0 ? product : _mm512_add_epi16(sum16_, product);
    if (Capacity < 8 && index % Capacity == Capacity - 1) {
      const __m512i wide = _mm512_madd_epi16(sum16_, _mm512_set1_epi16(1));
      sum32_ = index < Capacity ? wide : _mm512_add_epi32(sum32_, wide);
    }
  }
  // After a whole number of `Capacity` groups, or fewer than that.
  inline VecI finish(const int32_t* start) const {
    const VecI sum = {Capacity < 8 ? sum32_ : _mm512_madd_epi16(sum16_, _mm512_set1_epi16(1))};
    return HasStart ? sum + set1_int(*start) : sum;
  }
  inline VecI finish_times_16() const { return {_mm512_madd_epi16(sum16_, _mm512_set1_epi16(16))}; }

 private:
  __m512i sum16_, sum32_;
#endif
};

inline VecF max_magnitude(VecF a, VecF b) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(abs(a).v), _mm512_castps_si512(abs(b).v)))};
}
inline uint32_t largest_lane_bits(VecF x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m256i h = _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
}
inline VecI store_integers(int8_t* p, VecF x) {
  const __m512i integers = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(integers));
  return {integers};
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
