// Attention's operands as bf16 tiles for AMX, and products of them.
//
// A product sums 32 values in fp32: the first 16 in one chain of fma from zero, the others in a second one, both of which are
// then added up and to what there was, subnormal numbers being zero (Intel's manual, TDPBF16PS). Weight 0 times a finite value
// changes no such sum, so a row's bits are the same whichever other rows' keys stand between its own. bf16_rows.h has the same
// sums without tiles.
#pragma once
#include <utility>

#include "../../cpu/amx.h"
#include "../../cpu/bf16_pairs.h"
#include "key_block.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kRegisterRows = 16, kTileStride = 64, kTileBytes = 1024;  // a register: rows, bytes of a row, bytes
constexpr int kStep = 32, kHalfStep = kStep / 2;                        // values that a product sums over, and a chain of it
constexpr int kKeyGroups = kPartition / kPanel, kKeySteps = kPartition / kStep;

// The first `count` of 16 values, the rest zero.
PE_ALWAYS_INLINE __m256i load_words(const BFloat16* p, int count) {
  if (count >= 16) return load_32_bytes(p);
  return count <= 0 ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
}

// A query [head_dim], rounded to bf16, to a row of [ceil(head_dim / kStep)] tiles.
template <class Q>
inline void pack_query_row(const Q* query, int head_dim, uint8_t* to) {
  for (int d = 0; d < head_dim; d += kStep, to += kTileBytes) {
    BFloat16 words[kStep] = {};
    for (int i = 0; i < kStep && d + i < head_dim; i += kLanes) store(words + i, load_partial(query + d + i, head_dim - d - i));
    _mm512_store_si512(to, pair_words(load_32_bytes(words), load_32_bytes(words + kHalfStep)));
  }
}

// 16 keys [head_dim, 16], rows `stride` apart, to [ceil(head_dim / kStep)] tiles [16, 16, 2].
inline void pack_key_group(const BFloat16* keys, int64_t stride, int head_dim, uint8_t* to) {
  for (int first = 0; first < head_dim; first += kStep) {
    for (int d = first; d < first + kHalfStep; d++, to += kTileStride) {
      const auto words = [&](int i) { return i < head_dim ? load_32_bytes(keys + i * stride) : _mm256_setzero_si256(); };
      _mm512_store_si512(to, pair_words(words(d), words(d + kHalfStep)));
    }
  }
}

// Values of two tokens (null: zeros), [head_dim], to a row of [ceil(head_dim / 16)] tiles [16, 16, 2]. Bit 0 and bit 1 of the
// result: the first's or the second's values are not all finite.
inline int pack_value_pair(const BFloat16* first, const BFloat16* second, int head_dim, uint8_t* to) {
  const auto words = [](const BFloat16* p, int d, int count) {
    return p != nullptr ? load_words(p + d, count) : _mm256_setzero_si256();
  };
  __m512i largest = _mm512_setzero_si512();
  for (int d = 0; d < head_dim; d += kPanel, to += kTileBytes) {
    const __m512i pairs = pair_words(words(first, d, head_dim - d), words(second, d, head_dim - d));
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
struct TileProductArgs {
  const uint8_t* a;  // [steps] tiles
  const uint8_t* b;  // [steps][N] tiles, b_step_bytes and b_column_bytes apart
  int64_t b_step_bytes, b_column_bytes;
  int steps;
  float* c;
  int64_t ldc;
};

template <int N>
class TileProduct {
 public:
  static void run(const TileProductArgs& args) {
    zero_sums(std::make_integer_sequence<int, N>());
    const uint8_t *a = args.a, *b = args.b;
    for (int step = 0; step < args.steps; step++, a += kTileBytes, b += args.b_step_bytes) {
      load_tile_register<4>(a, kTileStride);
      add_columns(b, args.b_column_bytes, std::make_integer_sequence<int, N>());
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

// With `columns` tiles side by side, four at most.
inline void multiply_tiles(int columns, const TileProductArgs& args) {
  switch (columns) {
    case 1:
      return TileProduct<1>::run(args);
    case 2:
      return TileProduct<2>::run(args);
    case 3:
      return TileProduct<3>::run(args);
    default:
      return TileProduct<4>::run(args);
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
