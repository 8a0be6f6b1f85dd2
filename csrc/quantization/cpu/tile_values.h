// One column's 32 values in a tile, in and out (the layout: ../params.h). For packing and for single rows, not for products.
#pragma once
#include <cstring>

#include "format_traits.h"

namespace pyengine::cpu {
namespace PE_ISA {

// Values 0 .. 2^Bits - 1 to column `column` of a zeroed sub-block.
template <int Bits>
inline void put_values(const uint8_t* q, int column, uint8_t* sub_block) {
  uint8_t* at = sub_block + 4 * column;
  if constexpr (Bits == 8) {
    for (int g = 0; g < 8; g++) memcpy(at + 64 * g, q + 4 * g, 4);
    return;
  }
  uint8_t nibbles[16];
  for (int i = 0; i < 16; i++) nibbles[i] = static_cast<uint8_t>((q[i] & 15) | (q[i + 16] & 15) << 4);
  for (int h = 0; h < 4; h++) memcpy(at + 64 * h, nibbles + 4 * h, 4);
  uint8_t* high = at + 256;
  if constexpr (Bits == 5) {
    for (int g = 0; g < 8; g++) {
      for (int j = 0; j < 4; j++) high[j] = static_cast<uint8_t>(high[j] | q[4 * g + j] >> 4 << g);
    }
  } else if constexpr (Bits == 6) {
    for (int g = 0; g < 8; g++) {
      uint8_t* bits = high + 64 * (g / 4);
      for (int j = 0; j < 4; j++) bits[j] = static_cast<uint8_t>(bits[j] | q[4 * g + j] >> 4 << 2 * (g % 4));
    }
  }
}

// The reverse.
template <int Bits>
inline void get_values(const uint8_t* sub_block, int column, uint8_t* q) {
  const uint8_t* at = sub_block + 4 * column;
  for (int g = 0; g < 8; g++) {
    for (int j = 0; j < 4; j++) {
      if constexpr (Bits == 8) {
        q[4 * g + j] = at[64 * g + j];
      } else {
        int value = g < 4 ? at[64 * g + j] & 15 : at[64 * (g - 4) + j] >> 4;
        if constexpr (Bits == 5) value |= (at[256 + j] >> g & 1) << 4;
        if constexpr (Bits == 6) value |= (at[256 + 64 * (g / 4) + j] >> 2 * (g % 4) & 3) << 4;
        q[4 * g + j] = static_cast<uint8_t>(value);
      }
    }
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
