// One tile of attention with a bf16 cache on AMX: a partition of keys at once, 16 rows at a time.
#pragma once
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
template <int PARTS>
struct AmxTileMemory {
  uint8_t* query;    // [ceil(rows / 16)][depth_steps][PARTS] tiles [16, kStep]
  uint8_t* keys;     // [kKeyGroups][depth_steps] tiles [kStep / 2, 16, 2]
  uint8_t* values;   // [kKeySteps][value_columns] tiles [kStep / 2, 16, 2]
  uint8_t* weights;  // [kKeySteps][PARTS] tiles [16, kStep]
  float* logits;     // [16, kPartition]
  float* states;     // two of [rows]

  static int depth_steps(int head_dim) { return (head_dim + kStep - 1) / kStep; }
  static int value_columns(int head_dim) { return (head_dim + kPanel - 1) / kPanel; }
  static int64_t query_bytes(const TileShape& shape, int head_dim) {
    return int64_t{kTileBytes} * ((shape.max_rows + kRegisterRows - 1) / kRegisterRows) * depth_steps(head_dim) * PARTS;
  }
  static int64_t floats(const TileShape& shape, int head_dim) {
    const int64_t tiles = kKeyGroups * depth_steps(head_dim) + kKeySteps * (value_columns(head_dim) + PARTS);
    return (query_bytes(shape, head_dim) + kTileBytes * tiles) / static_cast<int64_t>(sizeof(float)) +
           kRegisterRows * kPartition + 2 * shape.state_floats(shape.max_rows);
  }
  AmxTileMemory(float* memory, const TileShape& shape, int head_dim)
      : query(reinterpret_cast<uint8_t*>(memory)),
        keys(query + query_bytes(shape, head_dim)),
        values(keys + kTileBytes * kKeyGroups * depth_steps(head_dim)),
        weights(values + kTileBytes * kKeySteps * value_columns(head_dim)),
        logits(reinterpret_cast<float*>(weights + kTileBytes * kKeySteps * PARTS)),
        states(logits + kRegisterRows * kPartition) {}
};

// PARTS: of queries and weights. One serves bf16 queries, which it keeps as they are.
template <int PARTS>
class AmxTileRunner {
 public:
  static constexpr int kTileRows = 192;       // query rows of a prefill tile
  static constexpr int kOutColumns = kPanel;  // a state's rows are multiples of it
  static int64_t memory_floats(const TileShape& shape, int head_dim) { return AmxTileMemory<PARTS>::floats(shape, head_dim); }

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
        form_(options_) {
    with_float_type(p.dtype, [&](auto type) {
      pack_query<decltype(type)>();
      return nullptr;
    });
  }

  const TileRows& rows() const { return rows_; }
  SoftmaxState scratch_state(int i) const {
    return shape_.state(memory_.states + i * shape_.state_floats(shape_.max_rows), rows_.count());
  }

  // The state of all rows after partition `index` alone.
  void run_partition(int64_t index, const SoftmaxState& state) const {
    const int64_t start = index * kPartition;
    const KeyRange in_use = {tile_.begin > start ? static_cast<int>(tile_.begin - start) : 0,
                             tile_.end - start < kPartition ? static_cast<int>(tile_.end - start) : kPartition};
    pack_keys(start, in_use);
    uint32_t bad[kKeySteps];
    pack_values(start, in_use, bad);
    int configured = 0;
    for (int first = 0; first < rows_.count(); first += kRows) {
      const int count = rows_.count() - first < kRows ? rows_.count() - first : kRows;
      if (count != configured) configure_tiles(bf16_tile_config(count));
      configured = count;
      run_rows(first, count, start, in_use, bad, state);
    }
    release_tiles();
  }

 private:
  static constexpr int kRows = kRegisterRows;

  uint8_t* query_tiles(int row) const { return memory_.query + int64_t{kTileBytes} * (row / kRows) * depth_steps_ * PARTS; }

  template <class Q>
  void pack_query() const {
    for (int row = 0; row < rows_.count(); row++) {
      const Q* from = rows_.template query<Q>(row);
      uint8_t* to = query_tiles(row) + row % kRows * kTileStride;
      const auto part = [&](int d) { return d < p_.head_dim ? load_partial(from + d, p_.head_dim - d) : zero(); };
      for (int d = 0; d < p_.head_dim; d += kStep, to += PARTS * kTileBytes) store_parts<PARTS>(part(d), part(d + 16), to);
    }
  }

  // Takes every 16 keys that hold one in use; fetches the next ones, and the same tokens' values.
  void pack_keys(int64_t start, KeyRange in_use) const {
    for (int i = in_use.begin / kPanel; i * kPanel < in_use.end; i++) {
      const int64_t position = start + i * kPanel;
      const int64_t next = (i + 1) * kPanel < in_use.end ? position + kPanel : position;
      const BFloat16* ahead[2] = {pages_.key(next), pages_.value(position)};
      pack_key_group(pages_.key(position), p_.k_dim_stride, p_.head_dim, ahead,
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
      for (int i = 0; i < kStep / 2; i++, to += kTileStride) {
        const BFloat16 *low = value(step * kStep + i), *high = value(step * kStep + i + 16);
        const int not_finite = pack_value_pair(low, high, p_.head_dim, to);
        if (not_finite == 0) continue;
        pack_value_pair((not_finite & 1) != 0 ? nullptr : low, (not_finite & 2) != 0 ? nullptr : high, p_.head_dim, to);
        bad[step] |= static_cast<uint32_t>(not_finite & 1) << i | static_cast<uint32_t>(not_finite >> 1) << (i + 16);
      }
    }
  }

  void run_rows(int first, int count, int64_t start, KeyRange in_use, const uint32_t (&bad)[kKeySteps],
                const SoftmaxState& state) const {
    KeyRange visible[kRows], any = {kPartition, 0};
    for (int r = 0; r < count; r++) {
      visible[r] = rows_.visible(first + r, start, in_use);
      if (visible[r].empty()) continue;
      any.begin = visible[r].begin < any.begin ? visible[r].begin : any.begin;
      any.end = visible[r].end > any.end ? visible[r].end : any.end;
    }
    const SoftmaxState rows = {state.out + first * state.ld, state.max + first, state.sum + first, state.ld};
    if (any.empty()) return rows.clear(count);
    multiply_keys(first, any);
    const int first_step = any.begin / kStep, end_step = (any.end + kStep - 1) / kStep;
    weigh(first, count, start, visible, first_step, end_step, rows);
    add_values(first_step, end_step, rows);
    for (int r = 0; r < count; r++) {
      if (sees_bad_value(visible[r], bad)) add_values_one_by_one(r, start, visible[r], rows.out + r * rows.ld);
    }
  }

  // logits [rows, kPartition] = query * keys, for all groups of keys that hold one of `any`.
  void multiply_keys(int first, KeyRange any) const {
    const int64_t group_bytes = int64_t{kTileBytes} * depth_steps_;
    const int end = (any.end + kPanel - 1) / kPanel;
    for (int group = any.begin / kPanel; group < end; group += 4) {
      multiply_tiles<PARTS>(end - group, {query_tiles(first), memory_.keys + group * group_bytes, kTileBytes, group_bytes,
                                          depth_steps_, memory_.logits + group * kPanel, kPartition});
    }
  }

  // From logits to weights; gives the rows their max and sum.
  void weigh(int first, int count, int64_t start, const KeyRange (&visible)[kRows], int first_step, int end_step,
             const SoftmaxState& rows) const {
    float shift[kRows];
    for (int r = 0; r < count; r++) {
      float* s = memory_.logits + r * kPartition;
      if (form_.transformed) {
        transform_logits(s, visible[r], options_, rows_.alibi_slope(first + r),
                         static_cast<float>(start - rows_.position(first + r)), indices_);
      }
      const float largest = visible[r].empty() ? -__builtin_inff() : largest_logit(s, visible[r]);
      rows.max[r] = largest * form_.to_natural;
      // Without a finite logit there is nothing to subtract; weights come out as 0, or NaN.
      shift[r] = largest == -__builtin_inff() ? 0.0f : largest * form_.factor;
    }
    for (int r = 0; r < count; r++) {
      rows.sum[r] = store_weights<PARTS>(memory_.logits + r * kPartition, visible[r], first_step, end_step, form_.factor,
                                         shift[r], memory_.weights + r * kTileStride);
    }
  }

  // out [rows, head_dim, rounded up] = weights * values
  void add_values(int first_step, int end_step, const SoftmaxState& rows) const {
    const uint8_t* weights = memory_.weights + first_step * PARTS * kTileBytes;
    const int64_t step_bytes = int64_t{kTileBytes} * value_columns_;
    const uint8_t* values = memory_.values + first_step * step_bytes;
    for (int column = 0; column < value_columns_; column += 4) {
      multiply_tiles<PARTS>(value_columns_ - column, {weights, values + column * kTileBytes, step_bytes, kTileBytes,
                                                      end_step - first_step, rows.out + column * kPanel, rows.ld});
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

  // out [head_dim] anew, in fp32, for a row that sees a value that is not finite: a part that is 0 would make NaN of infinity.
  void add_values_one_by_one(int r, int64_t start, KeyRange keys, float* out) const {
    for (int d = 0; d < shape_.ld_out; d += kLanes) store(out + d, zero());
    for (int key = keys.begin; key < keys.end; key++) {
      const uint8_t* step = memory_.weights + key / kStep * PARTS * kTileBytes + r * kTileStride;
      const int word = key % 16 * 2 + key % kStep / 16;
      float weight = 0.0f;
      for (int part = 0; part < PARTS; part++)
        weight += to_float(reinterpret_cast<const BFloat16*>(step + part * kTileBytes)[word]);
      const BFloat16* value = pages_.value(start + key);
      for (int d = 0; d < p_.head_dim; d += kLanes)
        store(out + d, fma(set1(weight), load_partial(value + d, p_.head_dim - d), load(out + d)));
    }
  }

  const PagedAttentionParams& p_;
  const TileShape& shape_;
  const AttentionTile& tile_;
  const LaneIndices& indices_;
  TileRows rows_;
  AmxTileMemory<PARTS> memory_;
  SequencePages<BFloat16> pages_;
  int depth_steps_, value_columns_;
  LogitOptions options_;
  LogitForm form_;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
