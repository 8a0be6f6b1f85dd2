// Draws one token a row, after temperature, min_p, top_k and top_p, without sorting the row.
//
// Cut-offs are found by radix selection over the logits' bits, 8 at a time: for top_k by counting tokens, for top_p by summing
// their weights. Weights are fixed-point integers, so every sum is exact and the result does not depend on the order of
// threads. The draw inverts the cumulative weights over token ids in ascending order, at a Philox 4x32-10 number of (seed,
// position).
#include "../../common/cuda_port.h"
#include "../launch.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kItems = 4, kBins = 256;
constexpr float kWeightOne = 1099511627776.0f;  // 2^40, the weight of the most likely token
constexpr float kSmallestTemperature = 1e-30f;  // below, as 0: the most likely token
using Weight = unsigned long long;

struct Shared {
  Weight histogram[kBins], warp_sums[kWarps], above;
  float largest[kWarps];
  int largest_id[kWarps], has_nan[kWarps], found;
};

// Larger keys for larger floats; NaN aside.
PYENGINE_DEVICE uint32_t order_key(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The row as the draw sees it.
struct Row {
  const float* logits;
  int vocab_size;
  float largest, inverse_temperature;
  uint32_t bound;  // keys below are cut off
  uint32_t last;   // of tokens with this key, only ids up to last_id stay
  int last_id;

  PYENGINE_DEVICE Weight weight(float x) const {
    return static_cast<Weight>(expf((x - largest) * inverse_temperature) * kWeightOne);
  }
  PYENGINE_DEVICE bool keeps(float x, int id) const {
    const uint32_t key = order_key(x);
    return key >= bound && !(key == last && id > last_id);
  }
};

struct Largest {
  float value;
  int id;  // the lowest of equals
  bool has_nan;
};

PYENGINE_DEVICE void take_larger(Largest& a, float value, int id) {
  if (value > a.value || (value == a.value && id < a.id)) {
    a.value = value;
    a.id = id;
  }
}

PYENGINE_DEVICE Largest find_largest(const float* logits, int vocab_size, Shared& shared) {
  Largest mine = {-INFINITY, 0x7fffffff, false};
  for (int id = threadIdx.x; id < vocab_size; id += kThreads) {
    const float x = logits[id];
    mine.has_nan |= x != x;
    take_larger(mine, x, id);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    const float value = __shfl_xor_sync(kFullWarp, mine.value, i);
    take_larger(mine, value, __shfl_xor_sync(kFullWarp, mine.id, i));
  }
  const bool warp_nan = __ballot_sync(kFullWarp, mine.has_nan) != 0;
  if ((threadIdx.x & 31) == 0) {
    const int warp = threadIdx.x >> 5;
    shared.largest[warp] = mine.value;
    shared.largest_id[warp] = mine.id;
    shared.has_nan[warp] = warp_nan;
  }
  __syncthreads();
  Largest all = {-INFINITY, 0x7fffffff, false};
  for (int w = 0; w < kWarps; w++) {
    take_larger(all, shared.largest[w], shared.largest_id[w]);
    all.has_nan |= shared.has_nan[w] != 0;
  }
  return all;
}

struct Selected {
  uint32_t key;
  Weight above, at;  // measure of the larger keys, and of this key
};

// The largest key such that the tokens of that key and larger ones measure at least `goal`, which is at most the whole.
template <typename Measure>
PYENGINE_DEVICE Selected select(const Row& row, Weight goal, Shared& shared, Measure measure) {
  Selected selected = {0u, 0, 0};
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared.histogram[bin] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
      const float x = row.logits[id];
      const uint32_t key = order_key(x);
      const bool same_prefix = shift == 24 || (key ^ selected.key) >> (shift + 8) == 0;
      if (key >= row.bound && same_prefix) atomicAdd(&shared.histogram[key >> shift & (kBins - 1)], measure(x));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Weight above = selected.above;
      int bin = kBins - 1;
      while (bin > 0 && above + shared.histogram[bin] < goal) above += shared.histogram[bin--];
      shared.found = bin;
      shared.above = above;
    }
    __syncthreads();
    selected.key |= static_cast<uint32_t>(shared.found) << shift;
    selected.above = shared.above;
    selected.at = shared.histogram[shared.found];
    __syncthreads();  // before the next round clears the histogram
  }
  return selected;
}

// The first token at which the running sum of `measure(logit, id)` over ascending ids exceeds `target`.
template <typename Measure>
PYENGINE_DEVICE int find_crossing(const Row& row, Weight target, Shared& shared, Measure measure) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Weight before_tile = 0;
  for (int tile = 0; tile < row.vocab_size; tile += kThreads * kItems) {
    const int first = tile + threadIdx.x * kItems;
    Weight mine[kItems], sum = 0;
    for (int i = 0; i < kItems; i++) {
      mine[i] = first + i < row.vocab_size ? measure(row.logits[first + i], first + i) : 0;
      sum += mine[i];
    }
    Weight inclusive = sum;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const Weight other = __shfl_up_sync(kFullWarp, inclusive, i);
      if (lane >= i) inclusive += other;
    }
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    Weight tile_sum = 0, running = before_tile + inclusive - sum;
    for (int w = 0; w < kWarps; w++) {
      if (w < warp) running += shared.warp_sums[w];
      tile_sum += shared.warp_sums[w];
    }
    for (int i = 0; i < kItems; i++) {
      if (running <= target && running + mine[i] > target) shared.found = first + i;
      running += mine[i];
    }
    before_tile += tile_sum;
    __syncthreads();
    if (before_tile > target) break;
  }
  return shared.found;
}

// 53 random bits of Philox 4x32-10 (Salmon et al., 2011), counter (position, 0), key seed.
PYENGINE_DEVICE Weight philox_bits(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0u, 0u};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t(c[0]) * 0xD2511F53u, product1 = uint64_t(c[2]) * 0xCD9E8D57u;
    c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(product1);
    c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return Weight(c[0]) << 21 | c[1] >> 11;
}

// The kept tokens' whole weight, for every thread.
PYENGINE_DEVICE Weight total_weight(const Row& row, Shared& shared) {
  Weight sum = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    const float x = row.logits[id];
    if (row.keeps(x, id)) sum += row.weight(x);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(kFullWarp, sum, i);
  if ((threadIdx.x & 31) == 0) shared.warp_sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; w++) sum += shared.warp_sums[w];
  __syncthreads();  // before the sums are overwritten
  return sum;
}

// Cuts by min_p, top_k and top_p; returns the weight of what is left.
PYENGINE_DEVICE Weight cut(const SampleParams& p, Row& row, Shared& shared, int64_t index) {
  const float min_p = p.min_p[index], top_p = p.top_p[index];
  const int top_k = p.top_k[index];
  if (min_p > 0.0f) row.bound = order_key(row.largest + logf(min_p) / row.inverse_temperature);
  if (top_k > 0 && top_k < row.vocab_size) {
    const uint32_t before = row.bound;
    row.bound = 0;
    const Selected kth = select(row, top_k, shared, [](float) { return Weight(1); });
    row.bound = max(before, kth.key);
  }
  const Weight total = total_weight(row, shared);
  if (top_p >= 1.0f) return total;
  const double share = static_cast<double>(top_p) * static_cast<double>(total);
  const Weight goal = min(max(static_cast<Weight>(ceil(share)), Weight(1)), total);
  const Selected nucleus = select(row, goal, shared, [&](float x) { return row.weight(x); });
  const Weight each = row.weight(bit_cast<float>(nucleus.key & 0x80000000u ? nucleus.key ^ 0x80000000u : ~nucleus.key));
  const Weight num_equal = nucleus.at / each, missing = goal - nucleus.above;
  const Weight num_kept = (missing + each - 1) / each;
  row.bound = nucleus.key;
  if (num_kept < num_equal) {  // of equally likely tokens the lowest ids
    const uint32_t key = nucleus.key;
    row.last_id = find_crossing(row, num_kept - 1, shared, [&](float x, int) { return Weight(order_key(x) == key); });
    row.last = key;
    __syncthreads();
  }
  return nucleus.above + num_kept * each;
}

// Grid: (num_rows).
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int64_t index = blockIdx.x;
  const float* logits = p.logits + index * p.logits_stride;
  const Largest largest = find_largest(logits, p.vocab_size, shared);
  const float temperature = p.temperature[index];
  const bool is_finite = !largest.has_nan && largest.value - largest.value == 0.0f;
  if (!is_finite || temperature < kSmallestTemperature) {
    if (threadIdx.x == 0) p.token_ids[index] = is_finite ? largest.id : -1;
    return;
  }
  Row row = {logits, p.vocab_size, largest.value, 1.0f / temperature, 0u, 0u, 0};
  const Weight total = cut(p, row, shared, index);
  // floor(uniform * total), the uniform number being bits / 2^53
  const Weight bits = philox_bits(static_cast<uint64_t>(p.seeds[index]), static_cast<uint64_t>(p.positions[index]));
  const Weight target = multiply_high(bits << 11, total);
  const int id =
      find_crossing(row, target, shared, [&](float x, int i) { return row.keeps(x, i) ? row.weight(x) : Weight(0); });
  if (threadIdx.x == 0) p.token_ids[index] = id;
}

}  // namespace

const char* sample_top_k_top_p(const SampleParams& p, void* stream) {
  return launch(sample_kernel, dim3(p.num_rows), dim3(kThreads), sizeof(Shared), stream, p);
}

}  // namespace pyengine::cuda
