// Products of a tile's rows of 16-bit integers with one group of one panel, scaled and added to the rows' sums. The integers
// are exact: whoever multiplies, the bits are the same.
#pragma once
#include "w8a16_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kW8A16VectorRows = 4;  // at most, of a tile that is multiplied in vectors
#if defined(PE_SIMD_VNNI)
// Four products of bytes at a time take one operand unsigned. Of the activations, the high halves get 128 more, which the sums
// of the weights take back.
constexpr int kVectorHighBias = 128;
#else
constexpr int kVectorHighBias = 0;
#endif

// One group of one panel, for one tile of rows.
struct W8A16TileArgs {
  const uint8_t* rows;   // records, w8a16_record_bytes apart
  const int8_t* weight;  // [num_steps, 2048]
  const float* factors;  // scale[32] | sum[32]
  float* sums;           // [num_rows, 32], rows ld apart
  int64_t ld;
  int num_rows, num_steps;
  bool first;           // sums are written, not added to
  const int8_t* fetch;  // what is multiplied later, brought near meanwhile
  int fetch_lines;      // a step
};

#if !defined(PE_SIMD_VNNI)

class W8A16VectorProducts {
 public:
  static void run(const W8A16TileArgs& args) {
    for (int r = 0; r < args.num_rows; r++) {
      int32_t high[kW8A16Panel] = {}, low[kW8A16Panel] = {};
      for (int step = 0; step < args.num_steps; step++) {
        const uint8_t* x = args.rows + step * w8a16_record_bytes(args.num_rows) + r * kW8A16Step;
        add_step(x, x + args.num_rows * kW8A16Step, args.weight + step * kW8A16StepBytes, high, low);
      }
      float values[kW8A16Panel];
      for (int c = 0; c < kW8A16Panel; c++) values[c] = static_cast<float>(high[c]) * 256.0f + static_cast<float>(low[c]);
      float* sums = args.sums + r * args.ld;
      for (int c = 0; c < kW8A16Panel; c += kLanes) {
        store(sums + c, fma(load(values + c), load(args.factors + c), args.first ? zero() : load(sums + c)));
      }
    }
  }

 private:
  static void add_step(const uint8_t* x_high, const uint8_t* x_low, const int8_t* weight, int32_t (&high)[kW8A16Panel],
                       int32_t (&low)[kW8A16Panel]) {
    for (int k = 0; k < kW8A16Step; k++) {
      for (int c = 0; c < kW8A16Panel; c++) {
        const int8_t w = weight[1024 * (c / 16) + 64 * (k / 4) + 4 * (c % 16) + k % 4];
        high[c] += static_cast<int8_t>(x_high[k]) * w;
        low[c] += x_low[k] * w;
      }
    }
  }
};

#else

class W8A16VectorProducts {
 public:
  static void run(const W8A16TileArgs& args) {
    switch (args.num_rows) {
      case 1:
        return run_rows<1>(args);
      case 2:
        return run_rows<2>(args);
      case 3:
        return run_rows<3>(args);
      default:
        return run_rows<4>(args);
    }
  }

 private:
  template <int R>
  static void run_rows(const W8A16TileArgs& args) {
    // Of the even groups of 4 values and, for a single row, of the odd ones: more sums than that are not needed to be busy.
    constexpr int kChains = R == 1 ? 2 : 1;
    __m512i high[kChains][R][2], low[kChains][R][2];
#pragma GCC unroll 16
    for (int i = 0; i < kChains * R * 2; i++) (&high[0][0][0])[i] = (&low[0][0][0])[i] = _mm512_setzero_si512();
    for (int step = 0; step < args.num_steps; step++) {
      const uint8_t* x = args.rows + step * w8a16_record_bytes(R);
      const int8_t* weight = args.weight + step * kW8A16StepBytes;
      const int8_t* fetch = args.fetch + step * args.fetch_lines * 64;
#pragma GCC unroll 2
      for (int g = 0; g < kW8A16Step / 4; g++) {
        if (2 * g < args.fetch_lines) {
          __builtin_prefetch(fetch + 128 * g, 0, 2);
          __builtin_prefetch(fetch + 128 * g + 64, 0, 2);
        }
        const __m512i w[2] = {_mm512_loadu_si512(weight + 64 * g), _mm512_loadu_si512(weight + 64 * g + 1024)};
        const int chain = g % kChains;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const __m512i h = _mm512_set1_epi32(word(x + r * kW8A16Step + 4 * g));
          const __m512i l = _mm512_set1_epi32(word(x + (R + r) * kW8A16Step + 4 * g));
#pragma GCC unroll 2
          for (int c = 0; c < 2; c++) {
            high[chain][r][c] = _mm512_dpbusd_epi32(high[chain][r][c], h, w[c]);
            low[chain][r][c] = _mm512_dpbusd_epi32(low[chain][r][c], l, w[c]);
          }
        }
      }
    }
    for (int r = 0; r < R; r++) {
      for (int c = 0; c < 2; c++) {
        if constexpr (kChains == 2) {
          high[0][r][c] = _mm512_add_epi32(high[0][r][c], high[1][r][c]);
          low[0][r][c] = _mm512_add_epi32(low[0][r][c], low[1][r][c]);
        }
        const __m512i sum = _mm512_cvtps_epi32(_mm512_loadu_ps(args.factors + kW8A16Panel + 16 * c));
        const __m512i signed_high = _mm512_sub_epi32(high[0][r][c], _mm512_slli_epi32(sum, 7));
        const VecF product = fma(VecF{_mm512_cvtepi32_ps(signed_high)}, set1(256.0f), VecF{_mm512_cvtepi32_ps(low[0][r][c])});
        float* row = args.sums + r * args.ld + 16 * c;
        store(row, fma(product, load(args.factors + 16 * c), args.first ? zero() : load(row)));
      }
    }
  }

  static int32_t word(const uint8_t* p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return value;
  }
};

#endif

}  // namespace PE_ISA
}  // namespace pyengine::cpu
