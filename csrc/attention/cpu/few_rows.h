// Products of a few query rows with a block's pages, as they lie in the cache: for decodes, which wait for memory, so that what
// comes next is fetched meanwhile. Every element is the same chain of fma as in the products of many rows.
#pragma once
#include "key_block.h"

namespace pyengine::cpu {
namespace PE_ISA {

// Panels of 16 columns at once for so many rows: enough independent chains to hide the latency of fma, as far as they, a row's
// elements and a column fit into the registers.
constexpr int few_row_panels(int rows) {
  return kLanes == 16 ? kWidePanels : kLanes == 8 ? (rows == 1 ? 4 : rows <= 3 ? 2 : 1) : panels_for(rows);
}
constexpr int kMostPanels = few_row_panels(1) > kWidePanels ? few_row_panels(1) : kWidePanels;

// A panel's vectors in the order of the products, and back. Which column is in which lane does not matter until then.
template <class T>
struct PanelOrder {
  template <int J>
  static PE_ALWAYS_INLINE VecF columns(const T* from) {
    return load(from + J * kLanes);
  }
  static PE_ALWAYS_INLINE void from_memory(const float* from, VecF* panel) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVecs; j++) panel[j] = load(from + j * kLanes);
  }
  static PE_ALWAYS_INLINE void to_memory(const VecF* panel, float* to) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVecs; j++) store(to + j * kLanes, panel[j]);
  }
};

#if defined(PE_SIMD_AVX2)
alignas(32) inline const uint32_t kUpperHalves[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                     0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// The even columns, then the odd ones: two operations widen 16 numbers, where a vector of neighbours takes two each.
template <>
struct PanelOrder<BFloat16> {
  template <int J>
  static PE_ALWAYS_INLINE VecF columns(const BFloat16* from) {
    const __m256i* pairs = reinterpret_cast<const __m256i*>(from);
    if constexpr (J == 0) return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs), 16))};
#if defined(PE_SIMDE)
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs), _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
#else
    // The mask comes from memory, and the pairs a second time: twelve sums, three rows' elements and this fill the registers.
    __m256i odd;
    __asm__("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(odd) : "m"(*pairs), "m"(kUpperHalves));
    return {_mm256_castsi256_ps(odd)};
#endif
  }
  static PE_ALWAYS_INLINE void from_memory(const float* from, VecF* panel) {
    const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + 8);
    const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    panel[0].v = _mm256_shuffle_ps(low, high, 0x88);
    panel[1].v = _mm256_shuffle_ps(low, high, 0xdd);
  }
  static PE_ALWAYS_INLINE void to_memory(const VecF* panel, float* to) {
    const __m256 low = _mm256_unpacklo_ps(panel[0].v, panel[1].v), high = _mm256_unpackhi_ps(panel[0].v, panel[1].v);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }
};
#endif

// acc[r][first ..] += x[r] * from[0 .. 16], from the J-th vector on.
template <int MR, class T, int J = 0, int NV>
PE_ALWAYS_INLINE void add_columns(Accumulators<MR, NV>& acc, const VecF (&x)[MR], const T* from, int first) {
  const VecF columns = PanelOrder<T>::template columns<J>(from);
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++) acc.v[r][first + J] = fma(x[r], columns, acc.v[r][first + J]);
  if constexpr (J + 1 < kPanelVecs) add_columns<MR, T, J + 1>(acc, x, from, first);
}

// acc[r] += sum over k < count of a(r, k) * b[p][k * ldb .. + 16], in the products' order of columns.
template <int MR, int NP, class T, class Rows, class Ahead>
PE_ALWAYS_INLINE void accumulate_few(Accumulators<MR, NP * kPanelVecs>& acc, const Rows& a, const T* const (&b)[NP],
                                     int64_t ldb, int count, Ahead ahead) {
  for (int k = 0; k < count; k++) {
    ahead.step();
    VecF x[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) x[r] = set1(a.at(r, k));
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) add_columns<MR, T>(acc, x, b[p] + k * ldb, p * kPanelVecs);
  }
}

// logits [rows, 16 NP] of query rows and NP groups of keys; meanwhile the same tokens' values are fetched.
template <class T>
struct KeyProductArgs {
  const float* query;  // [rows, head_dim], ld_query apart
  int64_t ld_query;
  const T* const* keys;  // [NP], key_stride from a dimension to the next
  int64_t key_stride;
  int head_dim;
  float* logits;           // rows kKeyBlock apart
  const T* const* values;  // [NP]
};

struct KeyProduct {
  template <int MR, int NP, class T>
  static void run(const KeyProductArgs<T>& args) {
    Accumulators<MR, NP * kPanelVecs> acc;
    zero_tile(acc);
    const T* b[NP];
    Prefetch<NP, 1> ahead;
    ahead.stride = kPanel * sizeof(T);
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) {
      b[p] = args.keys[p];
      ahead.next[p] = reinterpret_cast<const char*>(args.values[p]);
    }
    accumulate_few(acc, StridedRows<MR>(args.query, args.ld_query), b, args.key_stride, args.head_dim, ahead);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++)
        PanelOrder<T>::to_memory(acc.v[r] + p * kPanelVecs, args.logits + r * kKeyBlock + p * kPanel);
    }
  }
};

// out [rows, 16 NP] += weights [rows, kKeyBlock] * values, over some keys of a block; meanwhile the next keys are fetched.
template <class T>
struct ValueSumArgs {
  const float* weights;
  const KeyBlock<T>* block;
  KeyRange keys;
  const int* panels;  // [NP], of 16 columns each
  float* out;         // [rows, ld_out]
  int ld_out;
};

struct ValueSum {
  template <int MR, int NP, class T>
  static void run(const ValueSumArgs<T>& args) {
    Accumulators<MR, NP * kPanelVecs> acc;
    each_panel<MR, NP>(args, [&](int r, int p, float* out) { PanelOrder<T>::from_memory(out, acc.v[r] + p * kPanelVecs); });
    for (int i = 0; i < args.block->num_runs; i++) {
      const ValueRun<T>& values = args.block->runs[i];
      const int begin = values.offset > args.keys.begin ? values.offset : args.keys.begin;
      const int run_end = values.offset + values.count, end = run_end < args.keys.end ? run_end : args.keys.end;
      if (begin >= end) continue;
      const T* b[NP];
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++)
        b[p] = values.values + (begin - values.offset) * args.block->value_stride + args.panels[p] * args.block->panel_stride;
      accumulate_few(acc, FixedRows<kKeyBlock>{args.weights + begin}, b, args.block->value_stride, end - begin,
                     ahead<NP>(args, begin / kPanel));
    }
    each_panel<MR, NP>(args, [&](int r, int p, float* out) { PanelOrder<T>::to_memory(acc.v[r] + p * kPanelVecs, out); });
  }

 private:
  template <int MR, int NP, class T, class Fn>
  static PE_ALWAYS_INLINE void each_panel(const ValueSumArgs<T>& args, const Fn& fn) {
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) fn(r, p, args.out + r * args.ld_out + args.panels[p] * kPanel);
    }
  }
  // 16 steps of this many lines fetch what the panels' share of a dense key page is.
  template <int NP, class T>
  static PE_ALWAYS_INLINE auto ahead(const ValueSumArgs<T>& args, int group) {
    constexpr int kLines = NP * sizeof(T) < 4 ? 1 : NP * sizeof(T) / 4;
    const T* next = args.block->next_keys[group];
    if (next == nullptr) return Prefetch<1, kLines>{{reinterpret_cast<const char*>(args.block->groups[group])}, 0};
    return Prefetch<1, kLines>{{reinterpret_cast<const char*>(next + args.panels[0] * kPanel * kPanel)}, 64 * kLines};
  }
};

// Op::run<rows, few_row_panels(rows)>(args) for 1 .. kMaxRows rows.
template <class Op, int MR = 1, class Args>
inline void with_row_panels(int rows, const Args& args) {
  if constexpr (MR < kMaxRows) {
    if (rows > MR) return with_row_panels<Op, MR + 1>(rows, args);
  }
  Op::template run<MR, few_row_panels(MR)>(args);
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
