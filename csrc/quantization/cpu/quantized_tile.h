// The micro-kernel: a few quantised rows times one packed panel of 16 columns.
//
// For each 32 values the dot products are exact integers; then f = fma(minimum, sum, f) and f = fma(product, scale, f), block
// after block. So a result's bits do not depend on the number of rows, and differ between instruction sets only where fma does.
#pragma once
#include "quantized_rows.h"

#define PE_ALWAYS_INLINE inline __attribute__((always_inline))

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kPanelVecs = kQuantPanel / kLanes;
// Rows of a tile at most: what the registers hold. Up to kFewRows the whole panel is multiplied in one pass, as memory gives
// it.
constexpr int kMaxRows = kLanes == 16 ? (kSumsIn16Bits ? 8 : 12) : kLanes == 8 ? 4 : 2;
constexpr int kFewRows = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 0;
// A row alone waits for memory, which gives more from two places: two panels are multiplied at once.
constexpr int kPairRows = kLanes == 8 ? 1 : 0;

struct QuantizedTileArgs {
  const uint8_t* panel;  // [num_blocks, tile_bytes]
  const uint8_t* rows;   // records, see quantized_rows.h
  int num_blocks;        // of F::kBlockSize values
  float* c;              // [MR, 16], written
};

// What to bring closer while a tile is computed, an equal part of it with each sub-block: a core has no more than some 20 lines
// on their way, and stops until it can ask for more.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const uint8_t* begin, const uint8_t* end, int num_steps)
      : at_(begin), end_(end), step_((end - begin + 64 * int64_t{num_steps} - 1) / (64 * int64_t{num_steps}) * 64) {}

  PE_ALWAYS_INLINE void step() {
    const uint8_t* end = end_ - at_ > step_ ? at_ + step_ : end_;
    for (; at_ < end; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const uint8_t *at_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
};

// The same of a panel that was unpacked for several row tiles, as an instruction set's header says.
struct UnpackedTileArgs {
  const uint8_t* panel;  // unpacked
  const uint8_t* rows;   // records of RowValue
  int num_sub_blocks;
  float* c;          // [MR, 16], written
  LinesAhead ahead;  // num_sub_blocks steps
};

// Groups of four products whose sum fits 16 bits: two pairs each, a pair at most 2 * largest weight * 127.
constexpr int dot_capacity(int bits) { return bits == 5 ? 4 : bits == 6 ? 2 : 8; }

// x's bits [From, From + Count) of each byte at bits [4, 4 + Count), the other bits zero.
template <int From, int Count>
PE_ALWAYS_INLINE VecB bits_above_nibble(VecB x) {
  if constexpr (From < 4) x = shift_left<4 - From>(x);
  if constexpr (From > 4) x = shift_right<From - 4>(x);
  return and_bytes(x, ((1 << Count) - 1) << 4);
}

// Completes the values of low[H] (groups H and H + 4 of four values) from the bits stored at `bits`.
template <int Bits, int H>
PE_ALWAYS_INLINE void add_high_bits(const uint8_t* bits, VecB& low, VecB& high) {
  if constexpr (Bits == 5) {
    const VecB fifth = load_bytes(bits);
    low = or_bytes(low, bits_above_nibble<H, 1>(fifth));
    high = or_bytes(high, bits_above_nibble<H + 4, 1>(fifth));
  } else if constexpr (Bits == 6) {
    low = or_bytes(low, bits_above_nibble<2 * H, 2>(load_bytes(bits)));
    high = or_bytes(high, bits_above_nibble<2 * H, 2>(load_bytes(bits + 64)));
  }
}

// put(g, values) for each group g of four values of kLanes columns, where they lie as nibbles and bits above them.
template <class F, int H = 0, class Put>
PE_ALWAYS_INLINE void unpack_nibbles(const uint8_t* quants, const Put& put) {
  const VecB nibbles = load_bytes(quants + 64 * H);
  VecB low = low_nibbles(nibbles), high = high_nibbles(nibbles);
  add_high_bits<F::kBits, H>(quants + F::kLowBytes, low, high);
  put(H, low);
  put(H + 4, high);
  if constexpr (H < 3) unpack_nibbles<F, H + 1>(quants, put);
}

// Integer products of MR rows' 32 values with kLanes columns.
template <class F, int MR>
class BlockProducts {
 public:
  // quants: the sub-block's first byte of these columns.
  PE_ALWAYS_INLINE BlockProducts(const uint8_t* quants, const uint8_t* record)
      : q_(reinterpret_cast<const int8_t*>(record)), starts_(reinterpret_cast<const int32_t*>(record + Record::kSums)) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      for (int s = 0; s < F::kScales; s++) sums_[r][s].begin(starts_ + s * MR + r);
    }
    if constexpr (F::kBits == 8) {
#pragma GCC unroll 8
      for (int g = 0; g < 8; g++) add_bytes(g, load_bytes(quants + 64 * g));
    } else {
      add_nibbles<0>(quants);
      add_nibbles<1>(quants);
      add_nibbles<2>(quants);
      add_nibbles<3>(quants);
    }
  }

  // Those of row r with the values that scale s applies to.
  PE_ALWAYS_INLINE VecI get(int r, int s) const {
    const VecI sum = sums_[r][s].finish(starts_ + s * MR + r);
    if constexpr (kSplitBytes) return sum + high_[r].finish_times_16();
    return sum;
  }

 private:
  using Record = RowRecord<F, MR>;
  static constexpr bool kSplitBytes = F::kBits == 8 && kSumsIn16Bits;  // 16 * high nibble + low nibble

  PE_ALWAYS_INLINE void add_bytes(int g, VecB weights) {
    const VecB low = low_nibbles(weights), high = high_nibbles(weights);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const VecB activations = broadcast4(q_ + r * kSubBlock + 4 * g);
      sums_[r][0].add(g, kSplitBytes ? low : weights, activations);
      if constexpr (kSplitBytes) high_[r].add(g, high, activations);
    }
  }

  template <int H>
  PE_ALWAYS_INLINE void add_nibbles(const uint8_t* quants) {
    const VecB nibbles = load_bytes(quants + 64 * H);
    VecB low = low_nibbles(nibbles), high = high_nibbles(nibbles);
    add_high_bits<F::kBits, H>(quants + F::kLowBytes, low, high);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const int8_t* row = q_ + r * kSubBlock + 4 * H;
      if constexpr (F::kScales == 1) {
        sums_[r][0].add(2 * H, low, broadcast4(row));
        sums_[r][0].add(2 * H + 1, high, broadcast4(row + 16));
      } else {
        sums_[r][0].add(H, low, broadcast4(row));
        sums_[r][1].add(H, high, broadcast4(row + 16));
      }
    }
  }

  const int8_t* q_;
  const int32_t* starts_;
  DotSum<dot_capacity(F::kBits), F::kOffset != 0> sums_[MR][F::kScales];
  DotSum<8, false> high_[kSplitBytes ? MR : 1];
};

// The factors of a sub-block of kLanes columns.
template <class F>
struct BlockScales {
  VecF scale[F::kScales], minimum;

  // at: the sub-block's scales; header: the tile's; both of the panel's vector `vec`.
  PE_ALWAYS_INLINE BlockScales(const uint8_t* at, const uint8_t* header, int vec) {
    if constexpr (F::kIsSuper) {
      const VecF factor = load(half_floats(header) + vec * kLanes);
      const int8_t* bytes = reinterpret_cast<const int8_t*>(at) + vec * kLanes;
      for (int s = 0; s < F::kScales; s++) scale[s] = factor * load(bytes + s * kQuantPanel);
      if constexpr (F::kHasMin) minimum = load(half_floats(header + 32) + vec * kLanes) * load(bytes + kQuantPanel);
    } else {
      scale[0] = load(half_floats(at) + vec * kLanes);
      if constexpr (F::kHasMin) minimum = load(half_floats(at + 32) + vec * kLanes);
    }
  }

 private:
  static PE_ALWAYS_INLINE const Float16* half_floats(const uint8_t* p) { return reinterpret_cast<const Float16*>(p); }
};

template <class F>
struct QuantizedTile {
  static constexpr int kPrefetchBytes = 1280;  // ahead, where a panel is read for few rows and so from memory

  template <int DISTANCE = kPrefetchBytes>
  static PE_ALWAYS_INLINE void prefetch(const uint8_t* sub_block) {
#pragma GCC unroll 9
    for (int i = 0; i < F::kSubBlockBytes; i += 64) __builtin_prefetch(sub_block + DISTANCE + i);
  }

  template <int MR>
  static void run(const QuantizedTileArgs& args) {
    constexpr int kVecs = MR <= kFewRows ? kPanelVecs : 1;
    for (int vec = 0; vec < kPanelVecs; vec += kVecs) multiply<MR, kVecs>({&args}, vec);
  }
  // Two panels times the same rows.
  template <int MR>
  static void run_pair(const QuantizedTileArgs& first, const QuantizedTileArgs& second) {
    static_assert(MR <= kFewRows);
    multiply<MR, kPanelVecs>({&first, &second}, 0);
  }

 private:
  // Columns of the panels' vectors [vec, vec + NV).
  template <int MR, int NV, int PANELS>
  static PE_ALWAYS_INLINE void multiply(const QuantizedTileArgs* const (&args)[PANELS], int vec) {
    VecF f[PANELS][MR][NV];
    const uint8_t* tile[PANELS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++) {
      tile[p] = args[p]->panel;
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) f[p][r][v] = zero();
      }
    }
    const uint8_t* record = args[0]->rows;
    for (int block = 0; block < args[0]->num_blocks; block++) {
      for (int i = 0; i < F::kSubBlocks; i++, record += RowRecord<F, MR>::kBytes) {
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
          const uint8_t* sub_block = tile[p] + F::kHeaderBytes + i * F::kSubBlockBytes;
          if constexpr (MR <= kFewRows) prefetch<kPrefetchBytes / PANELS>(sub_block);
#pragma GCC unroll 4
          for (int v = 0; v < NV; v++) add_sub_block<MR, NV>(f[p], v, tile[p], sub_block, record, vec + v);
        }
      }
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; p++) tile[p] += F::kTileBytes;
    }
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(args[p]->c + r * kQuantPanel + (vec + v) * kLanes, f[p][r][v]);
      }
    }
  }

  template <int MR, int NV>
  static PE_ALWAYS_INLINE void add_sub_block(VecF (&f)[MR][NV], int v, const uint8_t* header, const uint8_t* sub_block,
                                             const uint8_t* record, int vec) {
    const BlockProducts<F, MR> products(sub_block + 4 * kLanes * vec, record);
    const BlockScales<F> factors(sub_block + F::kQuantBytes, header, vec);
    const float* scales = reinterpret_cast<const float*>(record + RowRecord<F, MR>::kScales);
    const float* sums = reinterpret_cast<const float*>(record + RowRecord<F, MR>::kSums);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      if constexpr (F::kScales == 2) {
        const VecF product =
            fma(to_float(products.get(r, 1)), factors.scale[1], to_float(products.get(r, 0)) * factors.scale[0]);
        f[r][v] = fma(product, set1(scales[r]), f[r][v]);
      } else {
        if constexpr (F::kHasMin) f[r][v] = fma(factors.minimum, set1(sums[r]), f[r][v]);
        f[r][v] = fma(to_float(products.get(r, 0)), factors.scale[0] * set1(scales[r]), f[r][v]);
      }
    }
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
