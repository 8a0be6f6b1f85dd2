// The micro-kernel on AVX2 where there are more than a few rows: up to 6 quantised rows times one panel of 16 columns.
//
// The integers are exact as everywhere, and what is done with them is what QuantizedTile does, so the bits are the same.
// For more than two small tiles, a panel is unpacked once, to where the first-level cache keeps it for all of them.
#pragma once
#include <type_traits>

#include "quantized_tile.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kUnpackedRows = 6, kUnpackedRowStep = 1;  // rows of a tile, at most, and the multiples that there are kernels for

// Values of 8 bits do not fit two products in 16 bits: they are widened, as are the rows.
template <class F>
constexpr bool kWidened = F::kBits == 8;
template <class F>
using RowValue = std::conditional_t<kWidened<F>, int16_t, int8_t>;
// With fewer rows, what unpacking a panel costs is more than it brings.
template <class F>
constexpr int kUnpackMinRows = kWidened<F> ? kFewRows + 1 : 2 * kMaxRows + 1;

// A sub-block, unpacked: the values, 64 bytes for each 4 (uint8) or 2 (int16, the offset subtracted) values of 16 columns, in
// two vectors of 8 columns | float scale[kScales][16] | float minimum[16] where there are minima.
template <class F>
struct UnpackedSubBlock {
  static constexpr int kSteps = kSubBlock * sizeof(RowValue<F>) / 4;
  static constexpr int kScales = 64 * kSteps, kMinima = kScales + 64 * F::kScales, kBytes = kMinima + (F::kHasMin ? 64 : 0);
};

template <class F>
class PanelUnpacker {
 public:
  // panel: num_blocks tiles; out: num_blocks * F::kSubBlocks sub-blocks, aligned to 64 bytes
  static void run(const uint8_t* panel, int num_blocks, uint8_t* out) {
    for (int block = 0; block < num_blocks; block++, panel += F::kTileBytes) {
      const uint8_t* sub_block = panel + F::kHeaderBytes;
      for (int i = 0; i < F::kSubBlocks; i++, sub_block += F::kSubBlockBytes, out += UnpackedSubBlock<F>::kBytes) {
        QuantizedTile<F>::prefetch(sub_block);
        for (int vec = 0; vec < kPanelVecs; vec++) {
          unpack_values(sub_block + 32 * vec, out + 32 * vec);
          const BlockScales<F> factors(sub_block + F::kQuantBytes, panel, vec);
          float* scales = reinterpret_cast<float*>(out + UnpackedSubBlock<F>::kScales) + kLanes * vec;
          for (int s = 0; s < F::kScales; s++) store(scales + s * kQuantPanel, factors.scale[s]);
          if constexpr (F::kHasMin) store(scales + F::kScales * kQuantPanel, factors.minimum);
        }
      }
    }
  }

 private:
  static PE_ALWAYS_INLINE void put(uint8_t* out, int step, __m256i values) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 * step), values);
  }
  // Bytes 4 c .. 4 c + 3 of column c become words 2 c, 2 c + 1 of the steps 2 `group` and 2 `group` + 1.
  static PE_ALWAYS_INLINE void put_widened(uint8_t* out, int group, VecB bytes) {
    const __m256i first_pairs_first =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256i pairs = _mm256_shuffle_epi8(bytes.v, first_pairs_first);
    const __m256i none = _mm256_setzero_si256(), offset = _mm256_set1_epi16(F::kOffset);
    put(out, 2 * group, _mm256_sub_epi16(_mm256_unpacklo_epi8(pairs, none), offset));
    put(out, 2 * group + 1, _mm256_sub_epi16(_mm256_unpackhi_epi8(pairs, none), offset));
  }
  static PE_ALWAYS_INLINE void unpack_values(const uint8_t* quants, uint8_t* out) {
    if constexpr (F::kBits == 8) {
      for (int g = 0; g < 8; g++) put_widened(out, g, load_bytes(quants + 64 * g));
    } else {
      unpack_nibbles<F>(quants, [out](int group, VecB values) { put(out, group, values.v); });
    }
  }
};

// One row's sums for 16 columns: 16 bits wide for bytes, 32 bits for words.
struct StepSums {
  __m256i v[2];
};

// sums = or += the products of one step: 16 columns times four bytes, or two words, of a row. A row's instructions are kept
// together: compilers bring forward what all rows load and multiply, more than the registers hold.
template <bool Widened, bool First>
PE_ALWAYS_INLINE void add_step(StepSums& sums, const __m256i (&columns)[2], const uint8_t (&row)[4]) {
#if defined(PE_SIMDE)
  int32_t word;
  memcpy(&word, row, sizeof word);
  for (int v = 0; v < 2; v++) {
    const __m256i x = _mm256_set1_epi32(word);
    const __m256i product = Widened ? _mm256_madd_epi16(columns[v], x) : _mm256_maddubs_epi16(columns[v], x);
    const __m256i sum = Widened ? _mm256_add_epi32(sums.v[v], product) : _mm256_add_epi16(sums.v[v], product);
    sums.v[v] = First ? product : sum;
  }
#else
  __m256i x, product;
#define PE_FIRST(multiply)                                                                     \
  __asm__ volatile("vpbroadcastd %4, %0\n\t" multiply " %0, %3, %1\n\t" multiply " %0, %2, %0" \
                   : "=&x"(sums.v[0]), "=&x"(sums.v[1])                                        \
                   : "x"(columns[0]), "x"(columns[1]), "m"(row))
#define PE_NEXT(multiply, add)                                                                                               \
  __asm__ volatile("vpbroadcastd %6, %2\n\t" multiply " %2, %4, %3\n\t" multiply " %2, %5, %2\n\t" add " %3, %0, %0\n\t" add \
                   " %2, %1, %1"                                                                                             \
                   : "+x"(sums.v[0]), "+x"(sums.v[1]), "=&x"(x), "=&x"(product)                                              \
                   : "x"(columns[0]), "x"(columns[1]), "m"(row))
  if constexpr (First) {
    if constexpr (Widened)
      PE_FIRST("vpmaddwd");
    else
      PE_FIRST("vpmaddubsw");
  } else {
    if constexpr (Widened)
      PE_NEXT("vpmaddwd", "vpaddd");
    else
      PE_NEXT("vpmaddubsw", "vpaddw");
  }
#undef PE_FIRST
#undef PE_NEXT
#endif
}

// f += (scale * row_scale) * sum, where F has minima after f += minimum * row_sum. f stays in memory: the sums of the next 32
// values need the registers.
template <class F>
PE_ALWAYS_INLINE void add_scaled(VecI sum, VecF scale, const float& row_scale, VecF minimum, const float& row_sum, VecF& f) {
#if defined(PE_SIMDE)
  if constexpr (F::kHasMin) f = fma(minimum, set1(row_sum), f);
  f = fma(to_float(sum), scale * set1(row_scale), f);
#else
  __m256 factor;
  if constexpr (F::kHasMin) {
    __m256 result;
    __asm__ volatile(
        "vcvtdq2ps %1, %1\n\t"
        "vbroadcastss %4, %2\n\t"
        "vbroadcastss %6, %3\n\t"
        "vmulps %5, %2, %2\n\t"
        "vfmadd213ps %0, %7, %3\n\t"
        "vfmadd231ps %2, %1, %3\n\t"
        "vmovaps %3, %0"
        : "+m"(f.v), "+x"(sum.v), "=&x"(factor), "=&x"(result)
        : "m"(row_scale), "x"(scale.v), "m"(row_sum), "x"(minimum.v));
  } else {
    __asm__ volatile(
        "vcvtdq2ps %1, %1\n\t"
        "vbroadcastss %3, %2\n\t"
        "vmulps %4, %2, %2\n\t"
        "vfmadd213ps %0, %1, %2\n\t"
        "vmovaps %2, %0"
        : "+m"(f.v), "+x"(sum.v), "=&x"(factor)
        : "m"(row_scale), "x"(scale.v));
  }
#endif
}

// Where a tile takes 32 values of the panel from: as unpacked above, or as packed, for so few row tiles that unpacking a panel
// would cost as much as it brings.
template <class F>
struct UnpackedSource {
  using Value = RowValue<F>;
  static constexpr int kSteps = UnpackedSubBlock<F>::kSteps;
  const uint8_t* at;

  template <int Step>
  PE_ALWAYS_INLINE __m256i columns(int vec) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 64 * Step + 32 * vec));
  }
  PE_ALWAYS_INLINE VecF scale(int s, int vec) const { return load(scales() + s * kQuantPanel + vec * kLanes); }
  PE_ALWAYS_INLINE VecF minimum(int vec) const { return load(scales() + F::kScales * kQuantPanel + vec * kLanes); }

 private:
  PE_ALWAYS_INLINE const float* scales() const { return reinterpret_cast<const float*>(at + UnpackedSubBlock<F>::kScales); }
};

template <class F>
struct PackedSource {
  static_assert(!kWidened<F>);
  using Value = int8_t;
  static constexpr int kSteps = 8;
  const uint8_t* at;
  const uint8_t* header;

  template <int Step>
  PE_ALWAYS_INLINE __m256i columns(int vec) const {
    constexpr int H = Step % 4;
    const VecB nibbles = load_bytes(at + 64 * H + 32 * vec);
    VecB values = Step < 4 ? low_nibbles(nibbles) : high_nibbles(nibbles);
    const uint8_t* high = at + F::kLowBytes + 32 * vec;
    if constexpr (F::kBits == 5) values = or_bytes(values, bits_above_nibble<Step, 1>(load_bytes(high)));
    if constexpr (F::kBits == 6) values = or_bytes(values, bits_above_nibble<2 * H, 2>(load_bytes(high + 64 * (Step / 4))));
    return values.v;
  }
  PE_ALWAYS_INLINE VecF scale(int s, int vec) const { return factors(vec).scale[s]; }
  PE_ALWAYS_INLINE VecF minimum(int vec) const { return factors(vec).minimum; }

 private:
  PE_ALWAYS_INLINE BlockScales<F> factors(int vec) const { return {at + F::kQuantBytes, header, vec}; }
};

// MR rows' records times 16 columns, 32 values after 32.
template <class F, int MR, class Source>
class RowsBySource {
 public:
  using Record = RowRecord<F, MR, typename Source::Value>;
  using Sums = VecF[MR][2];

  // f += the products of one sub-block.
  static PE_ALWAYS_INLINE void add(const Source& source, const uint8_t* record, Sums& f) {
    Work work;
    add_chunks<0>(source, record, work, f);
  }

 private:
  // Steps whose sums fit their width; how many times as many there are, and as many as share a scale.
  static constexpr int kChunkSteps = kWidened<F> ? Source::kSteps : dot_capacity(F::kBits);
  static constexpr int kChunks = Source::kSteps / kChunkSteps, kScaleChunks = kChunks / F::kScales;
  struct Work {
    VecI sums[MR][2];     // of the chunks before, where a scale has several
    VecF product[MR][2];  // of the first scale, where there are two
  };

  template <int Chunk>
  static PE_ALWAYS_INLINE void add_chunks(const Source& source, const uint8_t* record, Work& work, Sums& f) {
    StepSums sums[MR];
    add_steps<Chunk * kChunkSteps>(source, record, sums);
    constexpr bool kFirst = Chunk % kScaleChunks == 0, kLast = Chunk % kScaleChunks == kScaleChunks - 1;
    constexpr int kScale = Chunk / kScaleChunks;
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const VecF scale = kLast ? source.scale(kScale, v) : zero();
      const VecF minimum = kLast && F::kHasMin ? source.minimum(v) : zero();
#pragma GCC unroll 6
      for (int r = 0; r < MR; r++) {
        VecI sum = {kWidened<F> ? sums[r].v[v] : _mm256_madd_epi16(sums[r].v[v], _mm256_set1_epi16(1))};
        if constexpr (!kFirst) sum = sum + work.sums[r][v];
        if constexpr (kLast) {
          finish_scale<kScale>(sum, scale, minimum, record, r, work.product[r][v], f[r][v]);
        } else {
          work.sums[r][v] = sum;
        }
      }
    }
    if constexpr (Chunk + 1 < kChunks) add_chunks<Chunk + 1>(source, record, work, f);
  }

  template <int From, int Step = 0>
  static PE_ALWAYS_INLINE void add_steps(const Source& source, const uint8_t* record, StepSums (&sums)[MR]) {
    const __m256i columns[2] = {source.template columns<From + Step>(0), source.template columns<From + Step>(1)};
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) {
      const uint8_t* row = record + r * kSubBlock * sizeof(typename Source::Value) + 4 * (From + Step);
      add_step<kWidened<F>, Step == 0>(sums[r], columns, *reinterpret_cast<const uint8_t (*)[4]>(row));
    }
    if constexpr (Step + 1 < kChunkSteps) add_steps<From, Step + 1>(source, record, sums);
  }

  template <int S>
  static PE_ALWAYS_INLINE void finish_scale(VecI sum, VecF scale, VecF minimum, const uint8_t* record, int r, VecF& product,
                                            VecF& f) {
    const float* row_scales = reinterpret_cast<const float*>(record + Record::kScales);
    const float* row_sums = reinterpret_cast<const float*>(record + Record::kSums);
    const int32_t* starts = reinterpret_cast<const int32_t*>(record + Record::kSums);
    if constexpr (F::kOffset != 0 && !kWidened<F>) sum = sum + set1_int(starts[S * MR + r]);
    if constexpr (F::kScales == 1) {
      add_scaled<F>(sum, scale, row_scales[r], minimum, row_sums[r], f);
    } else if constexpr (S == 0) {
      product = to_float(sum) * scale;
    } else {
      f = fma(fma(to_float(sum), scale, product), set1(row_scales[r]), f);
    }
  }
};

template <class F, int MR>
struct UnpackedTile {
  static void run(const UnpackedTileArgs& args) {
    using Rows = RowsBySource<F, MR, UnpackedSource<F>>;
    auto& f = *reinterpret_cast<typename Rows::Sums*>(args.c);
    for (int r = 0; r < MR; r++) f[r][0] = f[r][1] = zero();
    UnpackedSource<F> source{args.panel};
    const uint8_t* record = args.rows;
    LinesAhead ahead = args.ahead;
    for (int i = 0; i < args.num_sub_blocks; i++, record += Rows::Record::kBytes, source.at += UnpackedSubBlock<F>::kBytes) {
      ahead.step();
      Rows::add(source, record, f);
    }
  }
};

template <class F, int MR>
struct PackedTile {
  static void run(const QuantizedTileArgs& args) {
    using Rows = RowsBySource<F, MR, PackedSource<F>>;
    auto& f = *reinterpret_cast<typename Rows::Sums*>(args.c);
    for (int r = 0; r < MR; r++) f[r][0] = f[r][1] = zero();
    const uint8_t* tile = args.panel;
    const uint8_t* record = args.rows;
    for (int block = 0; block < args.num_blocks; block++, tile += F::kTileBytes) {
      PackedSource<F> source{tile + F::kHeaderBytes, tile};
      for (int i = 0; i < F::kSubBlocks; i++, source.at += F::kSubBlockBytes, record += Rows::Record::kBytes) {
        QuantizedTile<F>::prefetch(source.at);
        Rows::add(source, record, f);
      }
    }
  }
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
