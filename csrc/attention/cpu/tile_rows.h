// The query rows (token, head of the group) of one tile of attention: a run of a sequence's tokens, or tokens of sequences that
// share a prefix, against one KV head.
#pragma once
#include <type_traits>

#include "../../cpu/with_type.h"
#include "plan/shared_prefix.h"
#include "softmax.h"

namespace pyengine::cpu {
namespace PE_ISA {

struct AttentionTile {
  int seq, kv_head;             // whose keys and values
  int first_token, num_tokens;  // within the sequence's query
  int64_t first_position;       // of first_token
  int64_t begin, end;           // positions that any row sees
  const QueryToken* tokens;     // [num_tokens], of any sequences, in place of the sequence's own; or null
};

// Sizes that one launch's tiles share.
struct TileShape {
  int group;     // query heads of a KV head
  int max_rows;  // of a tile
  int ld_out;    // head_dim, rounded up to a multiple of out_columns
  int ld_value;  // head_dim, rounded up to whole panels

  TileShape(const PagedAttentionParams& p, int tokens, int out_columns)
      : group(p.num_heads / p.num_kv_heads),
        max_rows(tokens * group),
        ld_out(round_up(p.head_dim, out_columns)),
        ld_value(round_up(p.head_dim, kPanel)) {}

  int64_t state_floats(int rows) const { return round_up(rows * (ld_out + 2), kPanel); }
  SoftmaxState state(float* memory, int rows) const {
    return {memory, memory + rows * ld_out, memory + rows * ld_out + rows, ld_out};
  }
};

constexpr int kTokensAhead = 2;  // whose rows are fetched meanwhile

// Rows are ordered token by token, the heads of the group inside.
class TileRows {
 public:
  TileRows(const PagedAttentionParams& p, const TileShape& shape, const AttentionTile& tile)
      : p_(p), tile_(tile), group_(shape.group), count_(tile.num_tokens * shape.group) {}

  int count() const { return count_; }
  int64_t position(int row) const {
    return tile_.tokens != nullptr ? tile_.tokens[row / group_].position : tile_.first_position + row / group_;
  }
  float alibi_slope(int row) const { return p_.alibi_slopes != nullptr ? p_.alibi_slopes[head(row)] : 0.0f; }

  // [head_dim]
  template <class Q>
  const Q* query(int row) const {
    return static_cast<const Q*>(p_.query) + token(row) * p_.query_token_stride + int64_t{head(row)} * p_.head_dim;
  }

  // fn(row, head, token, x) for each row, whose x [head_dim] lies in a tensor of queries' shape that starts at `base`.
  template <class Q, class Fn>
  void each(Q* base, int64_t token_stride, const Fn& fn) const {
    const int heads = group_, first_head = tile_.kv_head * heads, head_dim = p_.head_dim;
    for (int i = 0, row = 0; i < tile_.num_tokens; i++) {
      const int64_t token = token_at(i);
      if (i + kTokensAhead < tile_.num_tokens) {
        const char* next =
            reinterpret_cast<const char*>(base + token_at(i + kTokensAhead) * token_stride + first_head * head_dim);
        for (int byte = 0; byte < heads * head_dim * static_cast<int>(sizeof(Q)); byte += 64)
          __builtin_prefetch(next + byte, !std::is_const_v<Q>, 3);
      }
      for (int head = first_head; head < first_head + heads; head++, row++)
        fn(row, head, token, base + token * token_stride + head * head_dim);
    }
  }

  // What a row sees of the keys from position `start` on, of which [in_use.begin, in_use.end) are in use.
  KeyRange visible(int row, int64_t start, KeyRange in_use) const {
    const int64_t last = position(row) - start;
    const int64_t begin = p_.sliding_window > 0 ? last - p_.sliding_window + 1 : 0;
    return {begin > in_use.begin ? static_cast<int>(begin < in_use.end ? begin : in_use.end) : in_use.begin,
            last + 1 < in_use.end ? static_cast<int>(last + 1) : in_use.end};
  }

  // Normalises and writes every row.
  void finish(const SoftmaxState& state) const {
    with_float_type(p_.dtype, [&](auto type) {
      finish_rows(state, static_cast<decltype(type)*>(p_.out));
      return nullptr;
    });
  }

 private:
  int head(int row) const { return tile_.kv_head * group_ + row % group_; }
  int64_t token(int row) const { return token_at(row / group_); }
  int64_t token_at(int index) const {
    return tile_.tokens != nullptr ? tile_.tokens[index].row : p_.query_start_loc[tile_.seq] + tile_.first_token + index;
  }

  template <class Q>
  void finish_rows(const SoftmaxState& state, Q* out) const {
    each(out, p_.out_token_stride, [&](int row, int head, int64_t token, Q* to) {
      const float* sink = p_.sinks != nullptr ? p_.sinks + head : nullptr;
      finish_row(state, row, sink, p_.head_dim, to, p_.lse != nullptr ? p_.lse + token * p_.num_heads + head : nullptr);
    });
  }

  const PagedAttentionParams& p_;
  const AttentionTile& tile_;
  int group_, count_;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
