// Merges attention over disjoint sets of keys: each part's output counts by its share of the softmax's sum.
#include <cmath>

#include "../../cpu/parallel.h"
#include "../../cpu/simd.h"
#include "../../cpu/with_type.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

template <class T>
void merge_head(const MergeAttentionParams& p, int64_t row, int head) {
  const int begin = p.part_start[row], end = p.part_start[row + 1];
  float largest = -INFINITY, sum = 0.0f;
  for (int i = begin; i < end; i++) largest = std::fmax(largest, p.part_lse[int64_t{i} * p.num_heads + head]);
  for (int i = begin; i < end && largest != -INFINITY; i++)
    sum += std::exp(p.part_lse[int64_t{i} * p.num_heads + head] - largest);
  T* out = static_cast<T*>(p.out) + row * p.out_row_stride + int64_t{head} * p.head_dim;
  for (int d = 0; d < p.head_dim; d++) {
    float x = 0.0f;
    for (int i = begin; i < end; i++) {
      const float lse = p.part_lse[int64_t{i} * p.num_heads + head];
      if (lse == -INFINITY) continue;  // an empty part
      x += std::exp(lse - largest) * p.part_out[(int64_t{i} * p.num_heads + head) * p.head_dim + d];
    }
    from_float(sum == 0.0f ? 0.0f : x / sum, out + d);
  }
  if (p.lse != nullptr) p.lse[row * p.num_heads + head] = sum == 0.0f ? -INFINITY : largest + std::log(sum);
}

}  // namespace

const char* merge_attention_states(const MergeAttentionParams& p) {
  return with_float_type(p.dtype, [&](auto type) -> const char* {
    parallel_for(int64_t{p.num_rows} * p.num_heads, [&](int64_t unit, int) {
      merge_head<decltype(type)>(p, unit / p.num_heads, static_cast<int>(unit % p.num_heads));
    });
    return nullptr;
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
