// Storage types of elements. Plain bits without member functions, so that units compiled for different instruction sets
// can share them: conversions live in csrc/cpu/simd.h, once per instruction set.
#pragma once
#include <cstdint>

namespace pyengine {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {  // OCP FP8 "FN": no infinity, largest 448, NaN is 0x7f
  uint8_t bits;
};
struct Float8E5M2 {  // OCP FP8: IEEE-like, largest 57344
  uint8_t bits;
};

}  // namespace pyengine
