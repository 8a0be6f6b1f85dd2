// Packs the blocks of a GGUF tensor into panels of 16 rows, once when a model is loaded. No value changes.
#include "../../cpu/parallel.h"
#include "tile_values.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return bits;
}
void put_half(uint8_t* halves, int column, uint16_t bits) { memcpy(halves + 2 * column, &bits, sizeof bits); }

// q[i] += 16 times bit `i` of `bits`.
void add_fifth_bits(uint32_t bits, uint8_t* q) {
  for (int i = 0; i < kSubBlock; i++) q[i] = static_cast<uint8_t>(q[i] | (bits >> i & 1) << 4);
}
void unpack_nibbles(const uint8_t* bytes, uint8_t* q) {  // 16 bytes: the first 16 values are the low nibbles
  for (int i = 0; i < 16; i++) {
    q[i] = bytes[i] & 15;
    q[i + 16] = bytes[i] >> 4;
  }
}

// A block of 32: fp16 scale, then what the format has of fp16 minimum, uint32 fifth bits and values.
template <class F>
void pack_small_block(const uint8_t* block, int column, uint8_t* tile) {
  uint8_t* scales = tile + F::kQuantBytes;
  put_half(scales, column, half_at(block));
  const uint8_t* at = block + 2;
  if constexpr (F::kHasMin) {
    put_half(scales + 32, column, half_at(at));
    at += 2;
  }
  uint8_t q[kSubBlock];
  if constexpr (F::kBits == 8) {
    for (int i = 0; i < kSubBlock; i++) q[i] = static_cast<uint8_t>(at[i] + 128);
  } else if constexpr (F::kBits == 5) {
    uint32_t fifth;
    memcpy(&fifth, at, sizeof fifth);
    unpack_nibbles(at + 4, q);
    add_fifth_bits(fifth, q);
  } else {
    unpack_nibbles(at, q);
  }
  put_values<F::kBits>(q, column, tile);
}

// Q4_K, Q5_K: fp16 scale and minimum, 12 bytes with eight 6-bit scales and minima, 32 bytes with fifth bits (Q5_K: bit i of
// byte l belongs to value l of sub-block i), and 32 bytes with the nibbles of each two sub-blocks.
template <class F>
void pack_k_block(const uint8_t* block, int column, uint8_t* tile) {
  put_half(tile, column, half_at(block));
  put_half(tile + 32, column, half_at(block + 2) ^ 0x8000);  // the minimum is subtracted
  const uint8_t* packed = block + 4;
  const uint8_t* fifth = block + 16;
  const uint8_t* nibbles = fifth + (F::kBits == 5 ? 32 : 0);
  for (int i = 0; i < F::kSubBlocks; i++) {
    uint8_t q[kSubBlock];
    for (int l = 0; l < kSubBlock; l++) {
      const uint8_t byte = nibbles[32 * (i / 2) + l];
      q[l] = i % 2 == 0 ? byte & 15 : byte >> 4;
      if constexpr (F::kBits == 5) q[l] = static_cast<uint8_t>(q[l] | (fifth[l] >> i & 1) << 4);
    }
    uint8_t* sub_block = tile + F::kHeaderBytes + i * F::kSubBlockBytes;
    put_values<F::kBits>(q, column, sub_block);
    uint8_t* scales = sub_block + F::kQuantBytes;
    if (i < 4) {
      scales[column] = packed[i] & 63;
      scales[kQuantPanel + column] = packed[i + 4] & 63;
    } else {
      scales[column] = static_cast<uint8_t>((packed[i + 4] & 15) | packed[i - 4] >> 6 << 4);
      scales[kQuantPanel + column] = static_cast<uint8_t>(packed[i + 4] >> 4 | packed[i] >> 6 << 4);
    }
  }
}

// Q6_K: 128 bytes with the low nibbles, 64 with the high bits, 16 int8 scales, fp16 scale. Each half of the block (128 values)
// has 64 and 32 of those bytes; its value 32 i + l has its nibble in byte 32 (i % 2) + l (the low one in the first two of four
// sub-blocks) and its bits at 2 i of byte l.
template <class F>
void pack_six_bit_block(const uint8_t* block, int column, uint8_t* tile) {
  put_half(tile, column, half_at(block + 208));
  for (int i = 0; i < F::kSubBlocks; i++) {
    const uint8_t* nibbles = block + 64 * (i / 4) + 32 * (i % 2);
    const uint8_t* high = block + 128 + 32 * (i / 4);
    uint8_t q[kSubBlock];
    for (int l = 0; l < kSubBlock; l++) {
      const int low = i % 4 < 2 ? nibbles[l] & 15 : nibbles[l] >> 4;
      q[l] = static_cast<uint8_t>(low | (high[l] >> 2 * (i % 4) & 3) << 4);
    }
    uint8_t* sub_block = tile + F::kHeaderBytes + i * F::kSubBlockBytes;
    put_values<F::kBits>(q, column, sub_block);
    for (int s = 0; s < F::kScales; s++) sub_block[F::kQuantBytes + s * kQuantPanel + column] = block[192 + 2 * i + s];
  }
}

template <class F>
void pack_panel(const PackQuantizedParams& p, int64_t panel) {
  const int64_t first = panel * kQuantPanel, left = p.out_features - first;
  const int columns = left < kQuantPanel ? static_cast<int>(left) : kQuantPanel;
  const int num_blocks = p.in_features / F::kBlockSize;
  uint8_t* tile = static_cast<uint8_t*>(p.packed) + panel * num_blocks * F::kTileBytes;
  memset(tile, 0, static_cast<size_t>(num_blocks) * F::kTileBytes);
  for (int b = 0; b < num_blocks; b++, tile += F::kTileBytes) {
    for (int c = 0; c < columns; c++) {
      const uint8_t* block = static_cast<const uint8_t*>(p.weight) + (first + c) * p.weight_stride + b * F::kFileBytes;
      if constexpr (!F::kIsSuper) {
        pack_small_block<F>(block, c, tile);
      } else if constexpr (F::kBits == 6) {
        pack_six_bit_block<F>(block, c, tile);
      } else {
        pack_k_block<F>(block, c, tile);
      }
    }
  }
}

}  // namespace

const char* pack_quantized_weight(const PackQuantizedParams& p) {
  const int64_t panels = (int64_t{p.out_features} + kQuantPanel - 1) / kQuantPanel;
  return with_format(p.format, [&](auto format) -> const char* {
    parallel_for(panels, [&](int64_t panel, int) { pack_panel<decltype(format)>(p, panel); });
    return nullptr;
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
