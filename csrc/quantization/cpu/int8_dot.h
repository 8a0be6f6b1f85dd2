// Integer vocabulary of the quantised kernels, beside simd.h's floats.
//
// Every instruction set's header defines: VecB (4 kLanes bytes: four consecutive values of kLanes columns), VecI (kLanes
// int32), load_bytes, broadcast4 (four int8 to every column), low_nibbles, high_nibbles, and_bytes, or_bytes, shift_left<N>,
// shift_right<N> (bits may cross bytes: mask them), zero_int, set1_int, +, to_float(VecI), and
//   kSumsIn16Bits: whether DotSum adds in 16 bits;
//   DotSum<Capacity, HasStart>: the exact sum, over groups of four values, of unsigned weights times signed activations, plus
//   *start. `Capacity` (2, 4 or 8) groups fit 16 bits, for instruction sets that add in 16 bits. begin(start), then
//   add(0, ...), add(1, ...), ... to a multiple of Capacity, then finish(start); finish_times_16, of
//   16-bit sums with Capacity 8, gives 16 times the sum;
//   max_magnitude(VecF a, VecF b): the larger of |a|, |b| as bit patterns, so that NaN is above infinity;
//   largest_lane_bits(VecF): the largest bit pattern; store_integers(p, VecF): rounds to nearest even, stores, returns the
//   integers.
#pragma once
#include "../../cpu/simd.h"
#if defined(PE_SIMD_AVX512)
#include "int8_dot_avx512.h"
#elif defined(PE_SIMD_AVX2)
#include "int8_dot_avx2.h"
#else
#include "int8_dot_scalar.h"
#endif
