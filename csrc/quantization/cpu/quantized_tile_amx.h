// The micro-kernel on AMX: up to 16 quantised rows times one unpacked panel of 16 columns.
//
// The integers of 32 values come from one product of tiles, exact as everywhere; what is done with them is what QuantizedTile
// does, so the bits are the same.
#pragma once
#include "../../cpu/amx.h"
#include "quantized_tile.h"

namespace pyengine::cpu {
namespace PE_ISA {

// With a single row tile, or less, unpacking a panel costs as much as it brings.
template <class F>
constexpr int kUnpackMinRows = 17;
constexpr int kUnpackedRows = 16,
              kUnpackedRowStep = 4;  // rows of a tile, at most, and the multiples that there are kernels for

template <class F>
using RowValue = int8_t;

// A sub-block, unpacked: int8 value[8][64], the offset subtracted, as ../params.h has 8 bits | float scale[kScales][16] | float
// minimum[16] where there are minima.
template <class F>
struct UnpackedSubBlock {
  static constexpr int kScales = 512, kMinima = kScales + 64 * F::kScales, kBytes = kMinima + (F::kHasMin ? 64 : 0);
};

template <class F>
class PanelUnpacker {
 public:
  // panel: num_blocks tiles; out: num_blocks * F::kSubBlocks sub-blocks, aligned to 64 bytes
  static void run(const uint8_t* panel, int num_blocks, uint8_t* out) {
    for (int block = 0; block < num_blocks; block++, panel += F::kTileBytes) {
      const uint8_t* sub_block = panel + F::kHeaderBytes;
      for (int i = 0; i < F::kSubBlocks; i++, sub_block += F::kSubBlockBytes, out += UnpackedSubBlock<F>::kBytes) {
        unpack_values(sub_block, out);
        const BlockScales<F> factors(sub_block + F::kQuantBytes, panel, 0);
        float* scales = reinterpret_cast<float*>(out + UnpackedSubBlock<F>::kScales);
        for (int s = 0; s < F::kScales; s++) store(scales + s * kQuantPanel, factors.scale[s]);
        if constexpr (F::kHasMin) store(scales + F::kScales * kQuantPanel, factors.minimum);
      }
    }
  }

 private:
  static PE_ALWAYS_INLINE void put(uint8_t* out, int group, VecB values) {
    if constexpr (F::kOffset != 0) values.v = _mm512_sub_epi8(values.v, _mm512_set1_epi8(static_cast<char>(F::kOffset)));
    _mm512_store_si512(out + 64 * group, values.v);
  }
  static PE_ALWAYS_INLINE void unpack_values(const uint8_t* quants, uint8_t* out) {
    if constexpr (F::kBits == 8) {
      for (int g = 0; g < 8; g++) put(out, g, load_bytes(quants + 64 * g));
    } else {
      unpack_nibbles<F>(quants, [out](int group, VecB values) { put(out, group, values); });
    }
  }
};

// Registers: 0 .. 3 integers, two a sub-block where that has two scales; 4, 5 rows; 6, 7 columns.
template <class F>
TileConfig amx_tile_config(int rows) {
  TileConfig config;
  for (int i = 0; i < 4; i++) config.set(i, rows, 4 * kQuantPanel);
  for (int i = 4; i < 6; i++) config.set(i, rows, kSubBlock / F::kScales);
  for (int i = 6; i < 8; i++) config.set(i, 8 / F::kScales, 4 * kQuantPanel);
  return config;
}

template <class F, int MR>
class UnpackedTile {
 public:
  // Several sub-blocks are under way at any time: one is multiplied, one stored, and the integers of an earlier one are used.
  static void run(const UnpackedTileArgs& args) {
    alignas(64) int32_t integers[kBuffers][F::kScales][kUnpackedRows * kQuantPanel];
    Sums sums;
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) sums.f[r] = zero();
    const int n = args.num_sub_blocks;
    LinesAhead ahead = args.ahead;
    multiply<0>(args, 0);
    int i = 0;
    for (; i + 1 < n; i += 2) {
      ahead.step();
      ahead.step();
      multiply<1>(args, i + 1);
      store_integers<0>(integers[i % kBuffers]);
      if (i >= kDelay) add(args, i - kDelay, integers, sums);
      if (i + 2 < n) multiply<0>(args, i + 2);
      store_integers<1>(integers[(i + 1) % kBuffers]);
      if (i + 1 >= kDelay) add(args, i + 1 - kDelay, integers, sums);
    }
    if (i < n) {
      ahead.step();
      store_integers<0>(integers[i % kBuffers]);
      if (i >= kDelay) add(args, i - kDelay, integers, sums);
    }
    for (int left = n > kDelay ? n - kDelay : 0; left < n; left++) add(args, left, integers, sums);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) store(args.c + r * kQuantPanel, sums.f[r]);
  }

 private:
  using Record = RowRecord<F, MR>;
  using SubBlock = UnpackedSubBlock<F>;
  static constexpr int kBuffers = 4, kDelay = 2;
  struct Sums {
    VecF f[MR];
  };

  template <int Parity>
  static PE_ALWAYS_INLINE void multiply(const UnpackedTileArgs& args, int i) {
    const uint8_t* rows = args.rows + int64_t{i} * Record::kBytes;
    const uint8_t* columns = args.panel + int64_t{i} * SubBlock::kBytes;
    if constexpr (F::kScales == 1) {
      multiply_half<Parity, 4 + Parity, 6 + Parity>(rows, columns);
    } else {
      multiply_half<2 * Parity, 4, 6>(rows, columns);
      multiply_half<2 * Parity + 1, 5, 7>(rows + 16, columns + 256);
    }
  }
  template <int C, int A, int B>
  static PE_ALWAYS_INLINE void multiply_half(const uint8_t* rows, const uint8_t* columns) {
    zero_tile_register<C>();
    load_tile_register<A>(rows, kSubBlock);
    load_tile_register<B>(columns, 4 * kQuantPanel);
    multiply_int8_tiles<C, A, B>();
  }

  template <int Parity>
  static PE_ALWAYS_INLINE void store_integers(int32_t (&to)[F::kScales][kUnpackedRows * kQuantPanel]) {
    if constexpr (F::kScales == 1) {
      store_tile_register<Parity>(to[0], 4 * kQuantPanel);
    } else {
      store_tile_register<2 * Parity>(to[0], 4 * kQuantPanel);
      store_tile_register<2 * Parity + 1>(to[1], 4 * kQuantPanel);
    }
  }

  static PE_ALWAYS_INLINE void add(const UnpackedTileArgs& args, int i,
                                   const int32_t (&integers)[kBuffers][F::kScales][kUnpackedRows * kQuantPanel], Sums& sums) {
    const uint8_t* record = args.rows + int64_t{i} * Record::kBytes;
    const uint8_t* sub_block = args.panel + int64_t{i} * SubBlock::kBytes;
    const float* row_scales = reinterpret_cast<const float*>(record + Record::kScales);
    const float* row_sums = reinterpret_cast<const float*>(record + Record::kSums);
    const float* scales = reinterpret_cast<const float*>(sub_block + SubBlock::kScales);
    const auto& from = integers[i % kBuffers];
    const VecF scale = load(scales), second = F::kScales == 2 ? load(scales + kQuantPanel) : scale;
    const VecF minimum = F::kHasMin ? load(scales + F::kScales * kQuantPanel) : scale;
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      if constexpr (F::kHasMin) add_minimum(sums.f[r], minimum, row_sums[r]);
      if constexpr (F::kScales == 2) {
        add_products(sums.f[r], from[0] + r * kQuantPanel, scale, from[1] + r * kQuantPanel, second, row_scales[r]);
      } else {
        add_product(sums.f[r], from[0] + r * kQuantPanel, scale, row_scales[r]);
      }
    }
  }

  // A row's steps are kept together: compilers bring forward what all rows load and convert, more than the registers hold.
  static PE_ALWAYS_INLINE void add_minimum(VecF& f, VecF minimum, const float& row_sum) {
    __asm__ volatile("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(f.v) : "v"(minimum.v), "m"(row_sum));
  }
  // f += product * (scale * row_scale)
  static PE_ALWAYS_INLINE void add_product(VecF& f, const int32_t* product, VecF scale, const float& row_scale) {
    __m512 x, factor;
    __asm__ volatile(
        "vcvtdq2ps %3, %1\n\t"
        "vmulps %5%{1to16%}, %4, %2\n\t"
        "vfmadd231ps %2, %1, %0"
        : "+v"(f.v), "=&v"(x), "=&v"(factor)
        : "m"(*reinterpret_cast<const __m512i*>(product)), "v"(scale.v), "m"(row_scale));
  }
  // f += (second_product * second + product * scale) * row_scale
  static PE_ALWAYS_INLINE void add_products(VecF& f, const int32_t* product, VecF scale, const int32_t* second_product,
                                            VecF second, const float& row_scale) {
    __m512 x, y;
    __asm__ volatile(
        "vcvtdq2ps %3, %1\n\t"
        "vcvtdq2ps %5, %2\n\t"
        "vmulps %4, %1, %1\n\t"
        "vfmadd231ps %6, %2, %1\n\t"
        "vfmadd231ps %7%{1to16%}, %1, %0"
        : "+v"(f.v), "=&v"(x), "=&v"(y)
        : "m"(*reinterpret_cast<const __m512i*>(product)), "v"(scale.v), "m"(*reinterpret_cast<const __m512i*>(second_product)),
          "v"(second.v), "m"(row_scale));
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
