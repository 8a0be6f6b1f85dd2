// A tile of keys and values in shared memory, and its way from the paged cache into tensor-core operands.
// Rows have an odd number of 16-byte chunks, so that the eight rows of an ldmatrix phase lie in different banks.
#pragma once
#include "query_rows.cuh"

namespace pyengine::cuda {

// T: type of queries and outputs. kHeadDim: head size rounded up; channels beyond p.head_dim are zero.
template <typename T, KvFormat kFormat, int kHeadDim, int kTokens>
struct KvTile {
  static constexpr int kElementBytes = kFormat == KvFormat::kModel ? 2 : 1;
  static constexpr int kChunks = kHeadDim * kElementBytes / 16;
  static constexpr int kPitch = (kChunks | 1) * 16;
  static constexpr int kMatrixBytes = kTokens * kPitch;
  static constexpr int kScaleBytes = kFormat == KvFormat::kInt8 ? kTokens * 4 : 0;
  static constexpr int kBytes = 2 * (kMatrixBytes + kScaleBytes);  // K, V, their scales
  // Values that multiply probabilities. INT8 values carry a scale a token, which joins the probability: bf16 has the range.
  using Value = std::conditional_t<kFormat == KvFormat::kInt8, BFloat16, T>;

  unsigned char* base;

  PYENGINE_DEVICE unsigned char* keys() const { return base; }
  PYENGINE_DEVICE unsigned char* values() const { return base + kMatrixBytes; }
  PYENGINE_DEVICE float* key_scales() const { return reinterpret_cast<float*>(base + 2 * kMatrixBytes); }
  PYENGINE_DEVICE float* value_scales() const { return key_scales() + kTokens; }
};

// The cache as one KV head sees it. Strides in bytes; a token's fits 32 bits.
template <KvFormat kFormat>
struct PagedKv {
  const char *k, *v;  // at the KV head
  int64_t k_block_bytes, v_block_bytes;
  int k_token_bytes, v_token_bytes;
  const float *k_scale, *v_scale;
  const int32_t* table;

  PYENGINE_DEVICE PagedKv(const PagedAttentionParams& p, const QueryRows& rows, int element_bytes)
      : k(static_cast<const char*>(p.k_cache) + rows.kv_head * p.k_head_stride * element_bytes),
        v(static_cast<const char*>(p.v_cache) + rows.kv_head * p.v_head_stride * element_bytes),
        k_block_bytes(p.k_block_stride * element_bytes),
        v_block_bytes(p.v_block_stride * element_bytes),
        k_token_bytes(static_cast<int>(p.k_token_stride) * element_bytes),
        v_token_bytes(static_cast<int>(p.v_token_stride) * element_bytes),
        k_scale(nullptr),
        v_scale(nullptr),
        table(p.block_table + rows.seq * p.block_table_stride) {
    if constexpr (kFormat == KvFormat::kInt8) {
      k_scale = p.k_scale + rows.kv_head * p.k_scale_head_stride;
      v_scale = p.v_scale + rows.kv_head * p.v_scale_head_stride;
    }
  }
};

// FP8 with one scale a KV head.
template <KvFormat kFormat>
PYENGINE_DEVICE float head_scale(const float* scales, int kv_head) {
  return kFormat == KvFormat::kFp8 && scales ? scales[kv_head] : 1.0f;
}

// Copies 16 bytes of a row, of which `valid` exist; the rest becomes zero. kPiece 8: rows of one-byte elements that are no
// multiple of 16 bytes long, and so start at multiples of 8.
template <int kPiece>
PYENGINE_DEVICE void copy_chunk(unsigned char* shared, const char* global, int valid) {
  if constexpr (kPiece == 16) {
    cp_async<16>(shared, global, valid);
  } else {
    cp_async<8>(shared, global, min(valid, 8));
    cp_async<8>(shared + 8, global + 8, max(valid - 8, 0));
  }
}

// A thread's share of a tile's rows. Eight rows, of one cache block, share the block's address. kWhole: every token of the
// tile is in `range`; else those that are not become zero.
template <typename Tile, KvFormat kFormat, int kTokens, int kThreads, int kPiece, bool kWhole>
PYENGINE_DEVICE void copy_rows(const PagedAttentionParams& p, const PagedKv<kFormat>& kv, const Tile& tile, int first,
                               KeyRange range, int thread) {
  constexpr int kGroup = 8, kGroupPieces = kGroup * Tile::kChunks / kThreads > 1 ? kGroup * Tile::kChunks / kThreads : 1;
  constexpr int kBases = kTokens * Tile::kChunks / kThreads / kGroupPieces;
  [[maybe_unused]] constexpr int kUnroll = kBases * kGroupPieces > 16 ? 1 : kBases;  // large heads have no registers to spare
  static_assert(kBases * kGroupPieces * kThreads == kTokens * Tile::kChunks, "every thread copies the same number of chunks");
  static_assert(kThreads > kGroup * Tile::kChunks || kGroup * Tile::kChunks % kThreads == 0,
                "a thread changes group at a piece");
  const int row_bytes = p.head_dim * Tile::kElementBytes;
#pragma unroll kUnroll
  for (int base = 0; base < kBases; base++) {
    const int first_chunk = base * kGroupPieces * kThreads + thread;
    int token = first + first_chunk / (kGroup * Tile::kChunks) * kGroup;
    if (!kWhole) token = max(min(token, range.end - 1), range.begin) & ~(kGroup - 1);
    const int64_t block = kv.table[token >> p.block_shift];
    const int offset = token & (p.block_size - 1);
    const char* k = kv.k + block * kv.k_block_bytes + offset * kv.k_token_bytes;
    const char* v = kv.v + block * kv.v_block_bytes + offset * kv.v_token_bytes;
#pragma unroll
    for (int i = 0; i < kGroupPieces; i++) {
      const int c = first_chunk + i * kThreads, row = c / Tile::kChunks, byte = c % Tile::kChunks * 16;
      int valid = max(min(row_bytes - byte, 16), 0);
      if (!kWhole && (first + row < range.begin || first + row >= range.end)) valid = 0;
      unsigned char* to = tile.keys() + row * Tile::kPitch + byte;
      copy_chunk<kPiece>(to, k + row % kGroup * kv.k_token_bytes + byte, valid);
      copy_chunk<kPiece>(to + Tile::kMatrixBytes, v + row % kGroup * kv.v_token_bytes + byte, valid);
    }
  }
}

// INT8's scales of the tile's tokens, four at a time.
template <typename Tile, KvFormat kFormat, int kTokens, int kThreads>
PYENGINE_DEVICE void copy_scales(const PagedAttentionParams& p, const PagedKv<kFormat>& kv, const Tile& tile, int first,
                                 KeyRange range, int thread) {
  constexpr int kPieces = kTokens / 4;  // each inside one block
  static_assert(2 * kPieces <= kThreads, "one piece a thread");
  if (thread >= 2 * kPieces) return;
  const bool is_value = thread >= kPieces;
  const int row = thread % kPieces * 4, token = first + row;
  const bool live = token + 4 > range.begin && token < range.end;
  const int from = live ? token : range.begin & ~3;
  const int64_t block = kv.table[from >> p.block_shift], offset = from & (p.block_size - 1);
  const float* source = is_value ? kv.v_scale + block * p.v_scale_block_stride : kv.k_scale + block * p.k_scale_block_stride;
  cp_async<16>((is_value ? tile.value_scales() : tile.key_scales()) + row, source + offset,
               live ? min(range.end - token, 4) * 4 : 0);
}

// Starts copying tokens [first, first + kTokens) into the tile; `thread` of kThreads does its share. Tokens outside `range`
// are not read but zero-filled: their slots may never have been written. The caller commits.
template <typename Tile, KvFormat kFormat, int kTokens, int kThreads>
PYENGINE_DEVICE void copy_tile(const PagedAttentionParams& p, const PagedKv<kFormat>& kv, const Tile& tile, int first,
                               KeyRange range, int thread) {
  if (Tile::kElementBytes == 1 && p.head_dim % 16 != 0)
    copy_rows<Tile, kFormat, kTokens, kThreads, 8, false>(p, kv, tile, first, range, thread);
  else if (first >= range.begin && first + kTokens <= range.end)
    copy_rows<Tile, kFormat, kTokens, kThreads, 16, true>(p, kv, tile, first, range, thread);
  else
    copy_rows<Tile, kFormat, kTokens, kThreads, 16, false>(p, kv, tile, first, range, thread);
  if constexpr (kFormat == KvFormat::kInt8) copy_scales<Tile, kFormat, kTokens, kThreads>(p, kv, tile, first, range, thread);
}

// ---- one-byte elements to operands -------------------------------------------------------------------------------------
// FP8 becomes 16-bit by moving its bits below the sign and multiplying by a power of two, which rebases the exponent and
// gets subnormals right: exact for every finite code. INT8 becomes 16-bit by two exact sums around a magic number.
template <typename T, KvFormat kFormat>
struct Widen {
  uint32_t multiplier;  // FP8: a pair of T
  int shift;

  PYENGINE_DEVICE explicit Widen(const PagedAttentionParams& p) {
    const bool e4m3 = p.kv_dtype == DType::kFp8E4M3;
    if constexpr (std::is_same_v<T, BFloat16>) {
      multiplier = e4m3 ? 0x7B807B80u : 0x77807780u;  // 2^120, 2^112
      shift = e4m3 ? 4 : 3;
    } else {
      multiplier = e4m3 ? 0x5C005C00u : 0x3C003C00u;  // 2^8, 1
      shift = e4m3 ? 1 : 0;
    }
  }
  // Bytes `first` and `second` of x as a pair of T.
  template <int kFirst, int kSecond>
  PYENGINE_DEVICE uint32_t pair(uint32_t x) const {
    if constexpr (kFormat == KvFormat::kFp8) {
      const uint32_t v = select_bytes(x, 0x0404u | kFirst << 4 | kSecond << 12);  // in the high byte of each half
      return fma2<T>((v & 0x80008000u) | ((v & 0x7f007f00u) >> shift), multiplier, 0x80008000u);
    } else {
      constexpr uint32_t kMagic = std::is_same_v<T, BFloat16> ? 0x43004300u : 0x64006400u, kMinus = 0x80008000u;
      constexpr uint32_t kOne = std::is_same_v<T, BFloat16> ? 0x3F803F80u : 0x3C003C00u;
      const uint32_t v = select_bytes(x, 0x4040u | kFirst | kSecond << 8);  // in the low byte of each half
      return fma2<T>(kMagic | (v & 0x007f007fu), kOne, kMinus | kMagic | (v & 0x00800080u));
    }
  }
};

// Queries as the A operand of 16 channels. The contraction may run in any order so long as keys follow the same one: with
// one-byte keys a lane takes four neighbouring channels, as ldmatrix on byte pairs delivers them.
template <typename T, KvFormat kFormat>
PYENGINE_DEVICE void load_query_fragment(uint32_t (&a)[4], const T* row0, const T* row1, int step, int tig, int head_dim) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const T* row = r ? row1 : row0;
    if constexpr (kFormat == KvFormat::kModel) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int column = step * 16 + h * 8 + tig * 2;
        a[2 * h + r] = row && column < head_dim ? load_vector<uint32_t>(row + column) : 0u;
      }
    } else {
      const int column = step * 16 + tig * 4;
      const uint2 v = row && column < head_dim ? load_vector<uint2>(row + column) : uint2{0u, 0u};
      a[r] = v.x;
      a[2 + r] = v.y;
    }
  }
}

// Channel of accumulator o[i][e]: tile i covers 8 channels, or, with one-byte values, tiles 2 c and 2 c + 1 the even and odd
// ones of 16.
template <KvFormat kFormat>
PYENGINE_DEVICE int output_column(int i, int e, int tig) {
  return kFormat == KvFormat::kModel ? i * 8 + tig * 2 + (e & 1) : (i >> 1) * 16 + tig * 4 + (e & 1) * 2 + (i & 1);
}

}  // namespace pyengine::cuda
