// One tile of attention with a bf16 cache, queries and weights rounded to bf16: a partition of keys at once, on AMX 16 rows at
// a time, or a few rows without. Both give the same bits.
#pragma once
#include "bf16_rows.h"
#include "bf16_tiles.h"
#include "key_block.h"
#include "softmax_amx.h"
#include "tile_rows.h"

namespace pyengine::cpu {
namespace PE_ISA {

// The choice depends on the launch's types and sizes alone, never on what is in the batch.
inline bool serves_in_amx(const PagedAttentionParams& p) {
  return p.kv_dtype == DType::kBF16 && p.block_size % kPanel == 0;  // 16 keys of a page are read at once
}

// A tile's working memory, cut from one allocation.
struct AmxTileMemory {
  uint8_t* query;    // [ceil(rows / 16)][depth_steps] tiles [16, kStep]; or fp32 [rows, kStep * depth_steps], a few rows
  uint8_t* keys;     // [kKeyGroups][depth_steps] tiles [16, 16, 2]
  uint8_t* values;   // [kKeySteps][value_columns] tiles [16, 16, 2]
  uint8_t* weights;  // [kKeySteps] tiles [16, kStep]
  float* logits;     // [16, kPartition]
  float* states;     // two of [rows]

  static int depth_steps(int head_dim) { return (head_dim + kStep - 1) / kStep; }
  static int value_columns(int head_dim) { return (head_dim + kPanel - 1) / kPanel; }
  static int64_t query_bytes(const TileShape& shape, int head_dim) {
    static_assert(kFewQueryRows * sizeof(float) <= kRegisterRows * sizeof(BFloat16));
    return int64_t{kTileBytes} * ((shape.max_rows + kRegisterRows - 1) / kRegisterRows) * depth_steps(head_dim);
  }
  static int64_t floats(const TileShape& shape, int head_dim) {
    const int64_t tiles = kKeyGroups * depth_steps(head_dim) + kKeySteps * (value_columns(head_dim) + 1);
    return (query_bytes(shape, head_dim) + kTileBytes * tiles) / static_cast<int64_t>(sizeof(float)) +
           kRegisterRows * kPartition + 2 * shape.state_floats(shape.max_rows);
  }
  AmxTileMemory(float* memory, const TileShape& shape, int head_dim)
      : query(reinterpret_cast<uint8_t*>(memory)),
        keys(query + query_bytes(shape, head_dim)),
        values(keys + kTileBytes * kKeyGroups * depth_steps(head_dim)),
        weights(values + kTileBytes * kKeySteps * value_columns(head_dim)),
        logits(reinterpret_cast<float*>(weights + kTileBytes * kKeySteps)),
        states(logits + kRegisterRows * kPartition) {}
};

class AmxTileRunner {
 public:
  static constexpr int kTileRows = 192;       // query rows of a prefill tile
  static constexpr int kOutColumns = kPanel;  // a state's rows are multiples of it
  static int64_t memory_floats(const TileShape& shape, int head_dim) { return AmxTileMemory::floats(shape, head_dim); }

  AmxTileRunner(const PagedAttentionParams& p, const TileShape& shape, const AttentionTile& tile, const LaneIndices& indices,
                float* memory)
      : p_(p),
        shape_(shape),
        tile_(tile),
        indices_(indices),
        rows_(p, shape, tile),
        memory_(memory, shape, p.head_dim),
        pages_(p, tile.seq, tile.kv_head),
        depth_steps_(memory_.depth_steps(p.head_dim)),
        value_columns_(memory_.value_columns(p.head_dim)),
        options_{p.scale, p.logit_softcap, p.alibi_slopes != nullptr},
        form_(options_),
        few_(rows_.count() <= kFewQueryRows && p.head_dim % kPanel == 0) {  // 16 dimensions of a value are read at once
    with_float_type(p.dtype, [&](auto type) {
      take_query<decltype(type)>();
      return nullptr;
    });
  }

  const TileRows& rows() const { return rows_; }
  SoftmaxState scratch_state(int i) const {
    return shape_.state(memory_.states + i * shape_.state_floats(shape_.max_rows), rows_.count());
  }

  // The state of all rows after partition `index` alone. Meanwhile the first of `next` are fetched.
  void run_partition(int64_t index, const SoftmaxState& state, const NextKeys& next) const {
    const int64_t start = index * kPartition;
    const KeyRange in_use = {tile_.begin > start ? static_cast<int>(tile_.begin - start) : 0,
                             tile_.end - start < kPartition ? static_cast<int>(tile_.end - start) : kPartition};
    const unsigned mode = zero_subnormals();
    if (few_) {
      run_few_rows(RowBlock(*this, 0, rows_.count(), start, in_use), state, next);
    } else {
      run_tiles(start, in_use, state);
    }
    set_float_mode(mode);
  }

 private:
  // Some rows, and what each sees of a partition that starts at position `start`.
  struct RowBlock {
    int first, count;
    int64_t start;
    KeyRange visible[kRegisterRows], any;

    RowBlock(const AmxTileRunner& tile, int first_row, int num_rows, int64_t first_position, KeyRange in_use)
        : first(first_row), count(num_rows), start(first_position), any{kPartition, 0} {
      for (int r = 0; r < count; r++) {
        visible[r] = tile.rows_.visible(first + r, start, in_use);
        if (visible[r].empty()) continue;
        any.begin = visible[r].begin < any.begin ? visible[r].begin : any.begin;
        any.end = visible[r].end > any.end ? visible[r].end : any.end;
      }
    }
    int first_step() const { return any.begin / kStep; }
    int end_step() const { return (any.end + kStep - 1) / kStep; }
    SoftmaxState state_of(const SoftmaxState& all) const {
      return {all.out + first * all.ld, all.max + first, all.sum + first, all.ld};
    }
  };

  uint8_t* query_tiles(int row) const { return memory_.query + int64_t{kTileBytes} * (row / kRegisterRows) * depth_steps_; }
  float* query_row(int row) const { return reinterpret_cast<float*>(memory_.query) + row * kStep * depth_steps_; }

  template <class Q>
  void take_query() const {
    for (int row = 0; row < rows_.count(); row++) {
      const Q* from = rows_.template query<Q>(row);
      if (few_) {
        for (int d = 0; d < p_.head_dim; d += kLanes) {
          BFloat16 words[kLanes];
          store(words, load_partial(from + d, p_.head_dim - d));
          store(query_row(row) + d, load(words));
        }
      } else {
        pack_query_row(from, p_.head_dim, query_tiles(row) + row % kRegisterRows * kTileStride);
      }
    }
  }

  // Takes every 16 keys that hold one in use.
  void pack_keys(int64_t start, KeyRange in_use) const {
    for (int i = in_use.begin / kPanel; i * kPanel < in_use.end; i++) {
      pack_key_group(pages_.key(start + i * kPanel), p_.k_dim_stride, p_.head_dim,
                     memory_.keys + int64_t{kTileBytes} * i * depth_steps_);
    }
  }

  // Takes the values in use, and zeros in place of the others and of those that are not finite, each of which has a bit in
  // `bad`.
  void pack_values(int64_t start, KeyRange in_use, uint32_t (&bad)[kKeySteps]) const {
    for (int step = in_use.begin / kStep; step * kStep < in_use.end; step++) {
      uint8_t* to = memory_.values + int64_t{kTileBytes} * step * value_columns_;
      bad[step] = 0;
      const auto value = [&](int key) { return key >= in_use.begin && key < in_use.end ? pages_.value(start + key) : nullptr; };
      for (int i = 0; i < kHalfStep; i++, to += kTileStride) {
        const BFloat16 *first = value(step * kStep + i), *second = value(step * kStep + i + kHalfStep);
        const int not_finite = pack_value_pair(first, second, p_.head_dim, to);
        if (not_finite == 0) continue;
        pack_value_pair((not_finite & 1) != 0 ? nullptr : first, (not_finite & 2) != 0 ? nullptr : second, p_.head_dim, to);
        bad[step] |= static_cast<uint32_t>(not_finite & 1) << i | static_cast<uint32_t>(not_finite >> 1) << (i + kHalfStep);
      }
    }
  }

  void run_tiles(int64_t start, KeyRange in_use, const SoftmaxState& state) const {
    pack_keys(start, in_use);
    uint32_t bad[kKeySteps];
    pack_values(start, in_use, bad);
    int configured = 0;
    for (int first = 0; first < rows_.count(); first += kRegisterRows) {
      const int count = rows_.count() - first < kRegisterRows ? rows_.count() - first : kRegisterRows;
      if (count != configured) configure_tiles(bf16_tile_config(count));
      configured = count;
      run_tile(RowBlock(*this, first, count, start, in_use), bad, state);
    }
    release_tiles();
  }

  void run_tile(const RowBlock& rows, const uint32_t (&bad)[kKeySteps], const SoftmaxState& all) const {
    const SoftmaxState state = rows.state_of(all);
    if (rows.any.empty()) return state.clear(rows.count);
    multiply_keys(rows);
    uint8_t* weights = memory_.weights;
    weigh(rows, state, [weights](int r, int step, VecF a, VecF b) {
      _mm512_store_si512(weights + step * kTileBytes + r * kTileStride, pair_upper_words(a, b));
    });
    add_values(rows, state);
    for (int r = 0; r < rows.count; r++) {
      if (!sees_bad_value(rows.visible[r], bad)) continue;
      add_values_in_order(rows.start, rows.visible[r], state.out + r * state.ld, [&](int key) {
        const uint8_t* row = weights + key / kStep * kTileBytes + r * kTileStride;
        return to_float(reinterpret_cast<const BFloat16*>(row)[key % kHalfStep * 2 + key % kStep / kHalfStep]);
      });
    }
  }

  // logits [rows, kPartition] = query * keys, for all groups of keys that hold one that is seen.
  void multiply_keys(const RowBlock& rows) const {
    const int64_t group_bytes = int64_t{kTileBytes} * depth_steps_;
    const int end = (rows.any.end + kPanel - 1) / kPanel;
    for (int group = rows.any.begin / kPanel; group < end; group += 4) {
      multiply_tiles(end - group, {query_tiles(rows.first), memory_.keys + group * group_bytes, kTileBytes, group_bytes,
                                   depth_steps_, memory_.logits + group * kPanel, kPartition});
    }
  }

  // From logits to weights, which put(row, step, a, b) takes; gives the rows their max and sum.
  template <class Put>
  void weigh(const RowBlock& rows, const SoftmaxState& state, const Put& put) const {
    float shift[kRegisterRows];
    for (int r = 0; r < rows.count; r++) {
      float* s = memory_.logits + r * kPartition;
      const int row = rows.first + r;
      if (form_.transformed) {
        transform_logits(s, rows.visible[r], options_, rows_.alibi_slope(row),
                         static_cast<float>(rows.start - rows_.position(row)), indices_);
      }
      const float largest = rows.visible[r].empty() ? -__builtin_inff() : largest_logit(s, rows.visible[r]);
      state.max[r] = largest * form_.to_natural;
      // Without a finite logit there is nothing to subtract; weights come out as 0, or NaN.
      shift[r] = largest == -__builtin_inff() ? 0.0f : largest * form_.factor;
    }
    for (int r = 0; r < rows.count; r++) {
      state.sum[r] = weigh_row(memory_.logits + r * kPartition, rows.visible[r], rows.first_step(), rows.end_step(),
                               form_.factor, shift[r], [&put, r](int step, VecF a, VecF b) { put(r, step, a, b); });
    }
  }

  // out [rows, head_dim, rounded up] = weights * values
  void add_values(const RowBlock& rows, const SoftmaxState& state) const {
    const int64_t step_bytes = int64_t{kTileBytes} * value_columns_;
    const uint8_t* weights = memory_.weights + rows.first_step() * kTileBytes;
    const uint8_t* values = memory_.values + rows.first_step() * step_bytes;
    for (int column = 0; column < value_columns_; column += 4) {
      multiply_tiles(value_columns_ - column, {weights, values + column * kTileBytes, step_bytes, kTileBytes,
                                               rows.end_step() - rows.first_step(), state.out + column * kPanel, state.ld});
    }
  }

  static bool sees_bad_value(KeyRange keys, const uint32_t (&bad)[kKeySteps]) {
    if (keys.empty()) return false;
    for (int step = keys.begin / kStep; step * kStep < keys.end; step++) {
      const uint32_t lanes = lanes_within(keys, 2 * step) | static_cast<uint32_t>(lanes_within(keys, 2 * step + 1)) << 16;
      if ((bad[step] & lanes) != 0) return true;
    }
    return false;
  }

  // out [head_dim] anew for a row that sees a value that is not finite: key by key, none but what it sees.
  template <class Weight>
  void add_values_in_order(int64_t start, KeyRange keys, float* out, const Weight& weight) const {
    for (int d = 0; d < shape_.ld_out; d += kLanes) store(out + d, zero());
    for (int key = keys.begin; key < keys.end; key++) {
      const VecF w = set1(weight(key));
      const BFloat16* value = pages_.value(start + key);
      for (int d = 0; d < p_.head_dim; d += kLanes)
        store(out + d, fma(w, load_partial(value + d, p_.head_dim - d), load(out + d)));
    }
  }

  // --- A few rows, without tiles

  void run_few_rows(const RowBlock& rows, const SoftmaxState& state, const NextKeys& next) const {
    if (rows.any.empty()) return state.clear(rows.count);
    multiply_pages_of_keys(rows);
    float* logits = memory_.logits;
    weigh(rows, state, [logits](int r, int step, VecF a, VecF b) {
      const __m512 upper = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000)));
      store(logits + r * kPartition + step * kStep, VecF{_mm512_and_ps(a.v, upper)});
      store(logits + r * kPartition + step * kStep + kHalfStep, VecF{_mm512_and_ps(b.v, upper)});
    });
    const BFloat16 *groups[kKeyGroups], *ahead[kKeyGroups];
    take_value_groups(rows, next, groups, ahead);
    add_pages_of_values(groups, ahead, 0, rows.count, rows.any, state);
    for (int r = 0; r < rows.count; r++) {
      if (rows.visible[r].empty() || all_finite(state.out + r * state.ld)) continue;
      // Somebody's value is not finite.
      if (sees_bad_value(rows.start, rows.visible[r])) {
        add_values_in_order(rows.start, rows.visible[r], state.out + r * state.ld,
                            [&](int key) { return logits[r * kPartition + key]; });
      } else {
        add_pages_of_values(groups, groups, r, 1, rows.visible[r], state);
      }
    }
  }

  bool all_finite(const float* out) const {
    __mmask16 bad = 0;
    for (int d = 0; d < p_.head_dim; d += kLanes) bad |= _mm512_fpclass_ps_mask(_mm512_loadu_ps(out + d), 0x99);  // NaN, inf
    return bad == 0;
  }

  bool sees_bad_value(int64_t start, KeyRange keys) const {
    for (int key = keys.begin; key < keys.end; key++) {
      const BFloat16* value = pages_.value(start + key);
      __mmask16 bad = 0;
      for (int d = 0; d < p_.head_dim; d += kLanes) bad |= _mm512_fpclass_ps_mask(load(value + d).v, 0x99);
      if (bad != 0) return true;
    }
    return false;
  }

  // The first value of each 16 tokens, and what to fetch while they are read: keys of `next`, or what is there already.
  void take_value_groups(const RowBlock& rows, const NextKeys& next, const BFloat16* (&groups)[kKeyGroups],
                         const BFloat16* (&ahead)[kKeyGroups]) const {
    KeysAhead<BFloat16> keys(p_, next.tile, {next.next, {}});
    for (int group = rows.any.begin / kPanel; group * kPanel < rows.any.end; group++) {
      groups[group] = pages_.value(rows.start + group * kPanel);
      ahead[group] = keys.take();
      if (ahead[group] == nullptr) ahead[group] = groups[group];
    }
  }

  void multiply_pages_of_keys(const RowBlock& rows) const {
    const int columns = columns_for(rows.count), first = rows.any.begin / kPanel, last = (rows.any.end - 1) / kPanel;
    for (int group = first / columns * columns; group <= last; group += columns) {
      RowKeyArgs args{
          query_row(0), kStep * depth_steps_, {}, p_.k_dim_stride, p_.head_dim, memory_.logits + group * kPanel, {}};
      for (int i = 0; i < columns; i++) {
        const int source = group + i < first ? first : group + i > last ? last : group + i;
        const int64_t position = rows.start + source * kPanel;
        const int64_t next = position + 4 * kPanel;
        args.groups[i] = pages_.key(position);
        args.ahead[2 * i] = reinterpret_cast<const char*>(pages_.value(position));
        args.ahead[2 * i + 1] =
            next < rows.start + rows.any.end ? reinterpret_cast<const char*>(pages_.key(next)) : args.ahead[2 * i];
      }
      with_few_rows<RowKeyProduct>(rows.count, args);
    }
  }

  void add_pages_of_values(const BFloat16* const* groups, const BFloat16* const* ahead, int row, int count, KeyRange keys,
                           const SoftmaxState& state) const {
    const int columns = columns_for(count);
    for (int column = 0; column < value_columns_; column += columns) {
      RowValueArgs args{memory_.logits + row * kPartition, keys,     groups, p_.v_token_stride, {},
                        state.out + row * state.ld,        state.ld, ahead};
      for (int i = 0; i < columns; i++)
        args.columns[i] = kPanel * (column + i < value_columns_ ? column + i : value_columns_ - 1);
      with_few_rows<RowValueProduct>(count, args);
    }
  }

  const PagedAttentionParams& p_;
  const TileShape& shape_;
  const AttentionTile& tile_;
  const LaneIndices& indices_;
  TileRows rows_;
  AmxTileMemory memory_;
  SequencePages<BFloat16> pages_;
  int depth_steps_, value_columns_;
  LogitOptions options_;
  LogitForm form_;
  bool few_;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
