// One block of kKeyBlock keys and values of one sequence and KV head, as operands for the micro-kernels: either the cache's own
// pages, or a widened copy.
#pragma once
#include "../../cpu/gemm_tile.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {

// Keys are reduced in blocks that start at multiples of kKeyBlock, blocks are gathered in partitions that start at multiples
// of kPartition, and partitions are merged in order: what a row's result looks like depends on its own position alone.
constexpr int kKeyBlock = 128;
constexpr int kPartition = 256;
constexpr int kGroups = kKeyBlock / kPanel;
constexpr int kDirectRows = 8;  // with more query rows than this, pages are brought into the products' order for all of them
static_assert(kPartition % kKeyBlock == 0);

constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Places [begin, end) among keys that follow each other.
struct KeyRange {
  int begin, end;
  bool empty() const { return begin >= end; }
  bool operator==(const KeyRange& other) const { return begin == other.begin && end == other.end; }
};

// A run of tokens whose values lie one stride apart. `offset` is the first token's place in the block.
template <class T>
struct ValueRun {
  const T* values;
  int offset, count;
};

template <class T>
struct KeyBlock {
  int begin, end;            // tokens of the block that are in use
  const T* groups[kGroups];  // keys [head_dim, 16], rows key_stride apart, of each 16 tokens that hold one in use
  int64_t key_stride;

  // Of a view of the pages. What was widened lies where its caller put it.
  ValueRun<T> runs[kGroups];  // of [begin, end)
  int num_runs;
  int64_t value_stride;            // from a token's value to the next one's
  int64_t panel_stride;            // from 16 of a value's dimensions to the next 16
  const T* value_groups[kGroups];  // the first value of each group in use, for fetching ahead
  const T* next_keys[kGroups];     // for each group in use one to fetch while its values are read, or null
};

// Positions whose keys a thread is likely to read; none if begin == end.
struct KeysToRead {
  int seq, kv_head;
  int64_t begin, end;
};
// What it reads after a partition: first the rest of the tile, then the next one.
struct NextKeys {
  KeysToRead tile, next;
};

// Where a sequence's keys and values of one KV head lie.
template <class T>
class SequencePages {
 public:
  SequencePages(const PagedAttentionParams& p, int seq, int kv_head)
      : p_(p),
        kv_head_(kv_head),
        table_(p.block_table + seq * p.block_table_stride),
        k_(static_cast<const T*>(p.k_cache) + kv_head * p.k_head_stride),
        v_(static_cast<const T*>(p.v_cache) + kv_head * p.v_head_stride) {}

  // Pages of 8-bit numbers are widened. Others feed the micro-kernels as they are when 16 tokens of a key page, and 16
  // dimensions of a value, can be read at once.
  bool direct(int rows) const { return p_.block_size % kPanel == 0 && p_.head_dim % kPanel == 0 && rows <= kDirectRows; }

  // Tokens [first + begin, first + end), `first` being the block's first position. next_key(): what to fetch meanwhile.
  template <class NextKey>
  KeyBlock<T> view(int64_t first, int begin, int end, const NextKey& next_key) const {
    KeyBlock<T> block;
    block.begin = begin, block.end = end, block.num_runs = 0;
    block.key_stride = p_.k_dim_stride, block.value_stride = p_.v_token_stride, block.panel_stride = kPanel;
    for (int group = begin / kPanel; group * kPanel < end; group++) {
      block.groups[group] = key(first + group * kPanel);
      block.value_groups[group] = value(first + group * kPanel);
      block.next_keys[group] = next_key();
      if ((end - group * kPanel) * 2 <= kPanel) fetch_values(first + group * kPanel, end - group * kPanel, block, group);
    }
    for (int token = begin; token < end;) {
      const int count = run_length(first + token, end - token);
      block.runs[block.num_runs++] = {value(first + token), token, count};
      token += count;
    }
    return block;
  }

  // The same, widened to fp32 and dequantised, each panel of 16 columns by itself, so that it fills the cache's sets evenly:
  // keys [kGroups, head_dim, 16], values [ceil(head_dim / 16), kKeyBlock, 16].
  KeyBlock<float> widened(int64_t first, int begin, int end, float* keys, float* values) const {
    const int64_t group_size = int64_t{kPanel} * p_.head_dim;
    for (int token = begin; token < end;) {
      const int count = run_length(first + token, end - token);
      widen_values(first + token, count, values + token * kPanel);
      for (const int run_end = token + count; token < run_end;) {
        const int column = token % kPanel, left = kPanel - column;
        const int columns = run_end - token < left ? run_end - token : left;
        widen_keys(first + token, columns, keys + token / kPanel * group_size + column);
        token += columns;
      }
    }
    KeyBlock<float> block;
    block.begin = begin, block.end = end;
    block.key_stride = kPanel;
    for (int group = begin / kPanel; group * kPanel < end; group++) block.groups[group] = keys + group * group_size;
    return block;
  }

  // Of one token.
  const T* key(int64_t position) const { return k_ + page(position) * p_.k_block_stride + slot(position) * p_.k_token_stride; }
  const T* value(int64_t position) const {
    return v_ + page(position) * p_.v_block_stride + slot(position) * p_.v_token_stride;
  }

 private:
  int64_t page(int64_t position) const { return table_[position >> p_.block_shift]; }
  int64_t slot(int64_t position) const { return position & (p_.block_size - 1); }

  // The few values in use of a group, in place of all 16.
  void fetch_values(int64_t position, int count, KeyBlock<T>& block, int group) const {
    constexpr int kLine = 64 / sizeof(T);
    for (int token = 0; token < count; token++) {
      for (int d = 0; d < p_.head_dim; d += kLine) __builtin_prefetch(value(position + token) + d, 0, 2);
    }
    block.value_groups[group] = block.groups[group];
  }

  // Tokens from `position` on that share its page, at most `limit`.
  int run_length(int64_t position, int limit) const {
    const int64_t left = p_.block_size - slot(position);
    return left < limit ? static_cast<int>(left) : limit;
  }

  // The factor of one token's keys or values, INT8 and FP8 only.
  float scale_of(const float* scale, int64_t block_stride, int64_t head_stride, int64_t position) const {
    if (scale == nullptr) return 1.0f;
    return p_.scale_per_token ? scale[page(position) * block_stride + kv_head_ * head_stride + slot(position)]
                              : scale[kv_head_];
  }

  // count keys of one page, at most 16, into out [head_dim, 16].
  void widen_keys(int64_t position, int count, float* out) const {
    const T* source = key(position);
    if (p_.k_scale == nullptr) return widen_columns(source, count, out, [](VecF x, int) { return x; });
    float scale[kPanel];
    for (int i = 0; i < count; i++)
      scale[i] = scale_of(p_.k_scale, p_.k_scale_block_stride, p_.k_scale_head_stride, position + i);
    widen_columns(source, count, out, [&](VecF x, int i) { return x * load_partial(scale + i, count - i); });
  }

  template <class Scaled>
  PE_ALWAYS_INLINE void widen_columns(const T* source, int count, float* out, const Scaled& scaled) const {
    if (count == kPanel) {
      for (int d = 0; d < p_.head_dim; d++, source += p_.k_dim_stride, out += kPanel) {
        for (int i = 0; i < kPanel; i += kLanes) store(out + i, scaled(load(source + i), i));
      }
      return;
    }
    for (int d = 0; d < p_.head_dim; d++, source += p_.k_dim_stride, out += kPanel) {
      for (int i = 0; i < count; i += kLanes) store_partial(out + i, scaled(load_partial(source + i, count - i), i), count - i);
    }
  }

  // count values of one page into out [ceil(head_dim / 16), kKeyBlock, 16], beyond head_dim zeros.
  void widen_values(int64_t position, int count, float* out) const {
    const int whole = p_.head_dim / kPanel * kPanel, columns = p_.head_dim - whole;
    for (int token = 0; token < count; token++, out += kPanel) {
      const T* source = value(position + token);
      float* to = out;
      const VecF scale = set1(scale_of(p_.v_scale, p_.v_scale_block_stride, p_.v_scale_head_stride, position + token));
      for (int d = 0; d < whole; d += kPanel, to += kPanel * kKeyBlock) {
        for (int i = 0; i < kPanel; i += kLanes) store(to + i, load(source + d + i) * scale);
      }
      for (int i = 0; i < kPanel && columns > 0; i += kLanes)
        store(to + i, i < columns ? load_partial(source + whole + i, columns - i) * scale : zero());
    }
  }

  const PagedAttentionParams& p_;
  int kv_head_;
  const int32_t* table_;
  const T* k_;
  const T* v_;
};

// The groups of keys that follow a block's, in the order in which they are read. Pages of fp32 are so long that processors
// fetch them in time by themselves, and those of the next tile would only be in the way.
template <class T>
class KeysAhead {
  static constexpr bool kFetchesNext = sizeof(T) < 4;

 public:
  // `own`: of the block's tile and partition; then those of `next`.
  KeysAhead(const PagedAttentionParams& p, const KeysToRead& own, const NextKeys& next)
      : p_(p), ranges_{own, next.tile, next.next}, position_(own.begin) {}

  // Null at the end.
  const T* take() {
    while (position_ >= ranges_[range_].end) {
      if (range_ == 2 || !kFetchesNext) return nullptr;
      position_ = ranges_[++range_].begin / kPanel * kPanel;
    }
    const T* key = SequencePages<T>(p_, ranges_[range_].seq, ranges_[range_].kv_head).key(position_);
    position_ += kPanel;
    return key;
  }

 private:
  const PagedAttentionParams& p_;
  KeysToRead ranges_[3];
  int range_ = 0;
  int64_t position_;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
