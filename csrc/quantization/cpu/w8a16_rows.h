// Rows rounded to 16 bits, laid out for the products: tiles of rows, a record for each 64 values of k, in which the halves of
// the integers lie apart: high[rows][64] | low[rows][64], q = 256 (high - bias) + low. `low` is unsigned, `high` only with a
// bias.
#pragma once
#include <cstring>

#include "../params.h"
#include "int8_dot.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int64_t w8a16_record_bytes(int rows) { return int64_t{rows} * 2 * kW8A16Step; }

// kLanes integers x, |x| < 2^15, rounded to nearest even.
inline void store_halves(uint8_t* high, uint8_t* low, VecF x, int bias) {
#if defined(PE_SIMD_AVX512) && !defined(PE_SIMDE)
  const __m512i q = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high),
                   _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_srai_epi32(q, 8), _mm512_set1_epi32(bias))));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(q));
#else
  float whole[kLanes];
  store(whole, round_to_int(x));
  for (int i = 0; i < kLanes; i++) {
    const int32_t q = static_cast<int32_t>(whole[i]);
    high[i] = static_cast<uint8_t>((q >> 8) + bias);
    low[i] = static_cast<uint8_t>(q);
  }
#endif
}

// Row `row` of a tile of `rows`: k values to its records at `records`, zeros beyond. Returns the scale.
template <class T>
inline float quantize_row_16(const T* x, int k, int row, int rows, int bias, uint8_t* records) {
  VecF largest = zero();
  for (int i = 0; i < k; i += kLanes) largest = max_magnitude(load_partial(x + i, k - i), largest);
  const uint32_t bits = largest_lane_bits(largest);
  const float magnitude = bits_float(bits);
  const bool finite = bits < 0x7f800000, any = finite && magnitude >= 0x1p-100f;
  const VecF inverse = set1(any ? 32767.0f / magnitude : 0.0f);
  for (int start = 0; start < k; start += kW8A16Step, records += w8a16_record_bytes(rows)) {
    uint8_t* high = records + row * kW8A16Step;
    uint8_t* low = high + rows * kW8A16Step;
    for (int i = 0; i < kW8A16Step; i += kLanes) {
      const int left = k - start - i;
      VecF value = zero();
      if (any && left > 0) value = load_partial(x + start + i, left) * inverse;
      store_halves(high + i, low + i, value, bias);
    }
  }
  if (!finite) return bits_float(0x7fc00000);
  return any ? magnitude / 32767.0f : 0.0f;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
