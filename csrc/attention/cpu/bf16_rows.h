// The sums of bf16_tiles.h, bit for bit, by fma on a few rows: pages feed the products as they are. For decodes, where packing
// tiles would cost more than it brings.
#pragma once
#include "bf16_tiles.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kFewQueryRows = 8;

// MXCSR, which says what fma does with subnormal numbers. Arithmetic stays on its side of a change, as it reads and writes
// memory.
PE_ALWAYS_INLINE void set_float_mode(unsigned mode) { __asm__ volatile("ldmxcsr %0" ::"m"(mode) : "memory"); }
// Subnormal numbers become zero, as operands and as results, which is what products of tiles do. Returns the mode before.
PE_ALWAYS_INLINE unsigned zero_subnormals() {
  const unsigned before = _mm_getcsr();
  set_float_mode(before | 0x8040);
  return before;
}

// Both chains of a step, for MR rows and NP times 16 columns.
template <int MR, int NP>
struct StepChains {
  Accumulators<MR, NP> first, second;

  PE_ALWAYS_INLINE StepChains() {
    zero_tile(first);
    zero_tile(second);
  }
  // Takes `count` values of both at once. b: the columns' first values; the second chain's lie b_half further on.
  template <class Rows, class Ahead>
  PE_ALWAYS_INLINE void add(const Rows& a, const BFloat16* const (&b)[NP], const BFloat16* const (&b_second)[NP], int64_t ldb,
                            int count, Ahead& ahead) {
    for (int k = 0; k < count; k++) {
      ahead.step();
      add_one(first, a, k, b, ldb, k);
      add_one(second, a, k + kHalfStep, b_second, ldb, k);
    }
  }
  template <class Rows>
  static PE_ALWAYS_INLINE void add_one(Accumulators<MR, NP>& chain, const Rows& a, int at, const BFloat16* const (&b)[NP],
                                       int64_t ldb, int k) {
    VecF columns[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) columns[p] = load(b[p] + k * ldb);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      const VecF x = set1(a.at(r, at));
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) chain.v[r][p] = fma(x, columns[p], chain.v[r][p]);
    }
  }
  PE_ALWAYS_INLINE void add_to(Accumulators<MR, NP>& sums) const {
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) sums.v[r][p] += first.v[r][p] + second.v[r][p];
    }
  }
};

// Rows of A, LDA apart.
template <int MR>
struct RowsFrom {
  const float* a;
  int64_t lda;
  PE_ALWAYS_INLINE float at(int r, int k) const { return a[r * lda + k]; }
};

// logits [MR, kPartition] = query * keys, 16 NP columns of it.
struct RowKeyArgs {
  const float* query;  // [MR, head_dim], ld_query apart, bf16's values
  int64_t ld_query;
  const BFloat16* groups[4];  // [NP] keys [head_dim, 16], rows key_stride apart
  int64_t key_stride;
  int head_dim;
  float* logits;
  const char* ahead[8];  // [2 NP], of what to fetch meanwhile, a cache line for each two dimensions
};

struct RowKeyProduct {
  template <int MR, int NP>
  static void run(const RowKeyArgs& args) {
    Accumulators<MR, NP> sums;
    zero_tile(sums);
    Prefetch<2 * NP, 1> ahead;
    ahead.stride = 64;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * NP; i++) ahead.next[i] = args.ahead[i];
    for (int d = 0; d < args.head_dim; d += kStep) {
      const BFloat16 *b[NP], *b_second[NP];
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) {
        b[p] = args.groups[p] + d * args.key_stride;
        b_second[p] = b[p] + kHalfStep * args.key_stride;
      }
      const RowsFrom<MR> rows{args.query + d, args.ld_query};
      const int left = args.head_dim - d, first = left < kHalfStep ? left : kHalfStep;
      const int second = left >= kStep ? kHalfStep : left - first;
      StepChains<MR, NP> chains;
      chains.add(rows, b, b_second, args.key_stride, second, ahead);
      for (int k = second; k < first; k++) chains.add_one(chains.first, rows, k, b, args.key_stride, k);
      chains.add_to(sums);
    }
    store_tile(sums, args.logits, kPartition);
  }
};

// out [MR, 16 NP] = weights * values over `keys` of a partition.
struct RowValueArgs {
  const float* weights;  // [MR, kPartition], bf16's values
  KeyRange keys;
  const BFloat16* const* groups;  // [kKeyGroups], the first value of each 16 tokens that hold one of `keys`
  int64_t value_stride;
  int columns[4];  // [NP], the first of each 16
  float* out;
  int64_t ld_out;
  const BFloat16* const* ahead;  // [kKeyGroups], keys [head_dim, 16] to fetch while such a group of values is read
};

struct RowValueProduct {
  template <int MR, int NP>
  static void run(const RowValueArgs& args) {
    Accumulators<MR, NP> sums;
    zero_tile(sums);
    for (int key = args.keys.begin / kStep * kStep; key < args.keys.end; key += kStep) {
      const FixedRows<kPartition> rows{args.weights + key};
      StepChains<MR, NP> chains;
      const BFloat16 *b[NP], *b_second[NP];
      auto next_keys = ahead<NP>(args, key);
      if (key >= args.keys.begin && key + kStep <= args.keys.end) {
        columns_of(args, key, b);
        columns_of(args, key + kHalfStep, b_second);
        chains.add(rows, b, b_second, args.value_stride, kHalfStep, next_keys);
      } else {
        for (int k = 0; k < kHalfStep; k++) next_keys.step();
        add_some(args, key, 0, rows, chains.first);
        add_some(args, key, kHalfStep, rows, chains.second);
      }
      chains.add_to(sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; p++) store(args.out + r * args.ld_out + args.columns[p], sums.v[r][p]);
    }
  }

 private:
  // 16 steps fetch the columns' share of both groups, 32 bytes of each column.
  template <int NP>
  static PE_ALWAYS_INLINE auto ahead(const RowValueArgs& args, int key) {
    const auto share = [&](int group_key) {
      const int first = args.keys.begin / kPanel, last = (args.keys.end - 1) / kPanel, group = group_key / kPanel;
      const int source = group < first ? first : group > last ? last : group;
      return reinterpret_cast<const char*>(args.ahead[source] + args.columns[0] * kPanel);
    };
    return Prefetch < 2, NP<4 ? 1 : 2>{{share(key), share(key + kHalfStep)}, 32 * NP};
  }
  template <int NP>
  static PE_ALWAYS_INLINE void columns_of(const RowValueArgs& args, int key, const BFloat16* (&b)[NP]) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) b[p] = args.groups[key / kPanel] + args.columns[p];
  }
  // Those of the chain's 16 keys that are in use.
  template <int MR, int NP>
  static void add_some(const RowValueArgs& args, int key, int half, const FixedRows<kPartition>& rows,
                       Accumulators<MR, NP>& chain) {
    const int first = key + half, end = first + kHalfStep;
    const int begin = args.keys.begin > first ? args.keys.begin : first, stop = args.keys.end < end ? args.keys.end : end;
    if (begin >= stop) return;
    const BFloat16* b[NP];
    columns_of(args, first, b);
    for (int k = begin - first; k < stop - first; k++)
      StepChains<MR, NP>::add_one(chain, rows, k + half, b, args.value_stride, k);
  }
};

// As many columns at once as fit into the registers, but enough for independent chains.
constexpr int columns_for(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }

// Op::run<rows, columns_for(rows)>(args)
template <class Op, int MR = 1, class Args>
inline void with_few_rows(int rows, const Args& args) {
  if constexpr (MR < kFewQueryRows) {
    if (rows > MR) return with_few_rows<Op, MR + 1>(rows, args);
  }
  Op::template run<MR, columns_for(MR)>(args);
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
