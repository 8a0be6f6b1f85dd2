// The formats' properties at compile time, and where the parts of a tile lie (the layout: ../params.h).
#pragma once
#include <cstddef>

#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kSubBlock = 32;  // values that share one scale, and one scale of the activations

// Bits of a stored value; what to subtract from it; whether there are minima; sub-blocks of 32 in a block; scales in a
// sub-block.
template <int Bits, int Offset, bool HasMin, int SubBlocks, int Scales>
struct FormatTraits {
  static constexpr int kBits = Bits, kOffset = Offset, kSubBlocks = SubBlocks, kScales = Scales;
  static constexpr bool kHasMin = HasMin, kIsSuper = SubBlocks > 1;

  static constexpr int kLowBytes = Bits == 8 ? 512 : 256;
  static constexpr int kQuantBytes = kQuantPanel * kSubBlock * Bits / 8;
  static constexpr int kHeaderBytes = kIsSuper ? (HasMin ? 64 : 32) : 0;
  static constexpr int kScaleBytes = kIsSuper ? 32 : HasMin ? 64 : 32;
  static constexpr int kSubBlockBytes = kQuantBytes + kScaleBytes;
  static constexpr int kTileBytes = kHeaderBytes + SubBlocks * kSubBlockBytes;
  static constexpr int kBlockSize = SubBlocks * kSubBlock;
};

template <QuantFormat F>
struct TraitsOf;
template <>
struct TraitsOf<QuantFormat::kQ4_0> : FormatTraits<4, 8, false, 1, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ4_1> : FormatTraits<4, 0, true, 1, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ5_0> : FormatTraits<5, 16, false, 1, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ5_1> : FormatTraits<5, 0, true, 1, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ8_0> : FormatTraits<8, 128, false, 1, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ4_K> : FormatTraits<4, 0, true, 8, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ5_K> : FormatTraits<5, 0, true, 8, 1> {};
template <>
struct TraitsOf<QuantFormat::kQ6_K> : FormatTraits<6, 32, false, 8, 2> {};

template <QuantFormat F>
struct Format : TraitsOf<F> {
  static constexpr QuantFormat kFormat = F;
  static constexpr int kFileBytes = kQuantFormats[static_cast<int>(F)].block_bytes;
  static_assert(kQuantFormats[static_cast<int>(F)].block_size == TraitsOf<F>::kBlockSize);
  static_assert(kQuantFormats[static_cast<int>(F)].tile_bytes == TraitsOf<F>::kTileBytes);
};

// fn(Format<F>{}) for a format known at run time; fn returns a kernel's result.
template <class Fn>
inline const char* with_format(QuantFormat format, const Fn& fn) {
  switch (format) {
#define PE_FORMAT(F)   \
  case QuantFormat::F: \
    return fn(Format<QuantFormat::F>{});
    PE_FORMAT(kQ4_0)
    PE_FORMAT(kQ4_1)
    PE_FORMAT(kQ5_0)
    PE_FORMAT(kQ5_1)
    PE_FORMAT(kQ8_0)
    PE_FORMAT(kQ4_K)
    PE_FORMAT(kQ5_K)
    PE_FORMAT(kQ6_K)
#undef PE_FORMAT
  }
  return "unknown format";
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
