// Operands of attention in bf16 tiles for AMX, and products of them, summed in fp32.
//
// The cache's values are operands as they are. What stands on the other side, queries or weights, is fp32 cut into one or two
// parts, each rounded to bf16; two keep 16 bits of it. A row's sum is one chain of tile products in a fixed order, whatever the
// other rows of the tile are; and weight 0 times value 0, which is what other rows' keys are to a row, changes no sum.
#pragma once
#include <utility>

#include "../../cpu/amx.h"
#include "key_block.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kRegisterRows = 16, kTileStride = 64, kTileBytes = 1024;  // a register: rows, bytes of a row, bytes
constexpr int kStep = 32;                                               // values that a product of tiles sums over
constexpr int kKeyGroups = kPartition / kPanel, kKeySteps = kPartition / kStep;

// Pairs of adjacent words: those of `low` at even places, those of `high` at odd ones. Every operand is made so, from the two
// halves of kStep values.
PE_ALWAYS_INLINE __m512i pair_upper_words(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}
PE_ALWAYS_INLINE __m512i pair_words(__m256i low, __m256i high) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// kStep fp32 values, in a register's row of each part. One part: rounded to bf16. Two: the second is what the first leaves, cut
// to bf16. (Rounding may carry a NaN's payload away, but not from the second part, nor where the values were bf16.)
template <int PARTS>
PE_ALWAYS_INLINE void store_parts(VecF low, VecF high, uint8_t* to) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(_mm512_castps_si512(low.v), half), b = _mm512_add_epi32(_mm512_castps_si512(high.v), half);
  _mm512_store_si512(to, pair_upper_words(a, b));
  if constexpr (PARTS == 2) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512 a_rest = _mm512_sub_ps(low.v, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
    const __m512 b_rest = _mm512_sub_ps(high.v, _mm512_castsi512_ps(_mm512_and_si512(b, upper)));
    _mm512_store_si512(to + kTileBytes, pair_upper_words(_mm512_castps_si512(a_rest), _mm512_castps_si512(b_rest)));
  }
}
// The same of zeros.
template <int PARTS>
PE_ALWAYS_INLINE void store_zero_parts(uint8_t* to) {
  for (int part = 0; part < PARTS; part++) _mm512_store_si512(to + part * kTileBytes, _mm512_setzero_si512());
}

// The first `count` of 16 values, the rest zero.
PE_ALWAYS_INLINE __m256i load_words(const BFloat16* p, int count) {
  if (count >= 16) return load_32_bytes(p);
  return count <= 0 ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
}

// 16 keys [head_dim, 16], rows `stride` apart, to [ceil(head_dim / kStep)] tiles [16, 16, 2]. Meanwhile fetches cache lines
// from `ahead` on, two for each row of a tile.
inline void pack_key_group(const BFloat16* keys, int64_t stride, int head_dim, const BFloat16* (&ahead)[2], uint8_t* to) {
  const char* lines[2] = {reinterpret_cast<const char*>(ahead[0]), reinterpret_cast<const char*>(ahead[1])};
  for (int first = 0; first < head_dim; first += kStep) {
    for (int d = first; d < first + kStep / 2; d++, to += kTileStride) {
      const __m256i low = d < head_dim ? load_32_bytes(keys + d * stride) : _mm256_setzero_si256();
      const __m256i high = d + 16 < head_dim ? load_32_bytes(keys + (d + 16) * stride) : _mm256_setzero_si256();
      _mm512_store_si512(to, pair_words(low, high));
      for (const char*& line : lines) __builtin_prefetch(line), line += 64;
    }
  }
}

// Values of two tokens (null: zeros), [head_dim], to a row of [ceil(head_dim / 16)] tiles [16, 16, 2]. Bit 0 and bit 1 of the
// result: the first's or the second's values are not all finite.
inline int pack_value_pair(const BFloat16* low, const BFloat16* high, int head_dim, uint8_t* to) {
  const auto words = [](const BFloat16* p, int d, int count) {
    return p != nullptr ? load_words(p + d, count) : _mm256_setzero_si256();
  };
  __m512i largest = _mm512_setzero_si512();
  for (int d = 0; d < head_dim; d += kPanel, to += kTileBytes) {
    const __m512i pairs = pair_words(words(low, d, head_dim - d), words(high, d, head_dim - d));
    _mm512_store_si512(to, pairs);
    largest = _mm512_max_epu16(largest, _mm512_add_epi16(pairs, pairs));  // without the sign
  }
  const __mmask32 bad = _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(static_cast<int16_t>(0xff00)));
  return ((bad & 0x55555555) != 0 ? 1 : 0) | ((bad & 0xaaaaaaaa) != 0 ? 2 : 0);
}

// Registers 0 .. 3 are sums, 4 rows of queries or weights, 5 .. 7 columns of keys or values.
inline TileConfig bf16_tile_config(int rows) {
  TileConfig config;
  for (int i = 0; i < 5; i++) config.set(i, rows, kTileStride);
  for (int i = 5; i < 8; i++) config.set(i, kRegisterRows, kTileStride);
  return config;
}

// c [rows, 16 N] fp32, rows ldc apart, = a * b over `steps` tiles.
template <int PARTS>
struct TileProductArgs {
  const uint8_t* a;  // [steps][PARTS] tiles
  const uint8_t* b;  // [steps][N] tiles, b_step_bytes and b_column_bytes apart
  int64_t b_step_bytes, b_column_bytes;
  int steps;
  float* c;
  int64_t ldc;
};

template <int N, int PARTS>
class TileProduct {
 public:
  static void run(const TileProductArgs<PARTS>& args) {
    zero_sums(std::make_integer_sequence<int, N>());
    const uint8_t *a = args.a, *b = args.b;
    for (int step = 0; step < args.steps; step++, a += PARTS * kTileBytes, b += args.b_step_bytes) {
      // The parts one after the other: a register's products follow each other at a distance that hides their latency.
      for (int part = 0; part < PARTS; part++) {
        load_tile_register<4>(a + part * kTileBytes, kTileStride);
        add_columns(b, args.b_column_bytes, std::make_integer_sequence<int, N>());
      }
    }
    store_sums(args.c, 4 * args.ldc, std::make_integer_sequence<int, N>());
  }

 private:
  template <int... J>
  static PE_ALWAYS_INLINE void zero_sums(std::integer_sequence<int, J...>) {
    (zero_tile_register<J>(), ...);
  }
  template <int... J>
  static PE_ALWAYS_INLINE void store_sums(float* c, int64_t stride, std::integer_sequence<int, J...>) {
    (store_tile_register<J>(c + 16 * J, stride), ...);
  }
  template <int... J>
  static PE_ALWAYS_INLINE void add_columns(const uint8_t* b, int64_t stride, std::integer_sequence<int, J...>) {
    (add_column<J, 5 + J % 3>(b + J * stride), ...);
  }
  template <int C, int B>
  static PE_ALWAYS_INLINE void add_column(const uint8_t* b) {
    load_tile_register<B>(b, kTileStride);
    multiply_bf16_tiles<C, 4, B>();
  }
};

// With `columns` tiles side by side, 1 .. 4.
template <int PARTS>
inline void multiply_tiles(int columns, const TileProductArgs<PARTS>& args) {
  switch (columns) {
    case 1:
      return TileProduct<1, PARTS>::run(args);
    case 2:
      return TileProduct<2, PARTS>::run(args);
    case 3:
      return TileProduct<3, PARTS>::run(args);
    default:
      return TileProduct<4, PARTS>::run(args);
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
