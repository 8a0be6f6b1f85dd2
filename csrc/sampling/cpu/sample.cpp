// Draws one token a row: the rules of csrc/sampling/cuda/sample.cu, one row a thread.
#include <cmath>
#include <cstring>

#include "../../cpu/parallel.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int kBins = 256;
constexpr float kWeightOne = 1099511627776.0f;  // 2^40, the weight of the most likely token
constexpr float kSmallestTemperature = 1e-30f;  // below, as 0: the most likely token

// Larger keys for larger floats; NaN aside.
uint32_t order_key(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
float key_value(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct Row {
  const float* logits;
  int vocab_size;
  float largest, inverse_temperature;
  uint32_t bound;  // keys below are cut off
  uint32_t last;   // of tokens with this key, only ids up to last_id stay
  int last_id;

  uint64_t weight(float x) const { return static_cast<uint64_t>(std::exp((x - largest) * inverse_temperature) * kWeightOne); }
  bool keeps(int id) const {
    const uint32_t key = order_key(logits[id]);
    return key >= bound && !(key == last && id > last_id);
  }
};

struct Selected {
  uint32_t key;
  uint64_t above, at;  // measure of the larger keys, and of this key
};

// The largest key such that the tokens of that key and larger ones measure at least `goal`, which is at most the whole.
template <class Measure>
Selected select(const Row& row, uint64_t goal, Measure measure) {
  Selected selected = {0, 0, 0};
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t histogram[kBins] = {};
    for (int id = 0; id < row.vocab_size; id++) {
      const uint32_t key = order_key(row.logits[id]);
      const bool same_prefix = shift == 24 || (key ^ selected.key) >> (shift + 8) == 0;
      if (key >= row.bound && same_prefix) histogram[key >> shift & (kBins - 1)] += measure(row.logits[id]);
    }
    int bin = kBins - 1;
    while (bin > 0 && selected.above + histogram[bin] < goal) selected.above += histogram[bin--];
    selected.key |= static_cast<uint32_t>(bin) << shift;
    selected.at = histogram[bin];
  }
  return selected;
}

// 53 random bits of Philox 4x32-10 (Salmon et al., 2011), counter (position, 0), key seed.
uint64_t philox_bits(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t{c[0]} * 0xD2511F53u, product1 = uint64_t{c[2]} * 0xCD9E8D57u;
    c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(product1);
    c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return uint64_t{c[0]} << 21 | c[1] >> 11;
}

// Keeps the fewest most likely tokens that weigh `goal` together, of equals the lowest ids; returns their weight.
uint64_t keep_nucleus(Row* row, uint64_t goal) {
  const Selected nucleus = select(*row, goal, [&](float x) { return row->weight(x); });
  const uint64_t each = row->weight(key_value(nucleus.key));
  const uint64_t num_kept = (goal - nucleus.above + each - 1) / each;
  row->bound = nucleus.key;
  uint64_t seen = 0;
  for (int id = 0; id < row->vocab_size && seen < num_kept; id++) {
    if (order_key(row->logits[id]) != nucleus.key) continue;
    seen++;
    row->last_id = id;
  }
  row->last = nucleus.key;
  return nucleus.above + num_kept * each;
}

// Cuts by min_p, top_k and top_p; returns the weight of what is left.
uint64_t cut(const SampleParams& p, int64_t index, Row* row) {
  if (p.min_p[index] > 0.0f) row->bound = order_key(row->largest + std::log(p.min_p[index]) / row->inverse_temperature);
  if (p.top_k[index] > 0 && p.top_k[index] < row->vocab_size) {
    const uint32_t before = row->bound;
    row->bound = 0;
    const uint32_t kth = select(*row, static_cast<uint64_t>(p.top_k[index]), [](float) { return uint64_t{1}; }).key;
    row->bound = before > kth ? before : kth;
  }
  uint64_t total = 0;
  for (int id = 0; id < row->vocab_size; id++)
    if (row->keeps(id)) total += row->weight(row->logits[id]);
  if (p.top_p[index] >= 1.0f) return total;
  const uint64_t share = static_cast<uint64_t>(std::ceil(static_cast<double>(p.top_p[index]) * static_cast<double>(total)));
  const uint64_t at_least_one = share > 0 ? share : 1;
  return keep_nucleus(row, at_least_one < total ? at_least_one : total);
}

int64_t sample_row(const SampleParams& p, int64_t index) {
  const float* logits = p.logits + index * p.logits_stride;
  int best = 0;
  for (int id = 0; id < p.vocab_size; id++) {
    if (logits[id] != logits[id]) return -1;
    if (logits[id] > logits[best]) best = id;
  }
  if (!std::isfinite(logits[best])) return -1;
  if (p.temperature[index] < kSmallestTemperature) return best;
  Row row = {logits, p.vocab_size, logits[best], 1.0f / p.temperature[index], 0, 0, 0};
  const uint64_t total = cut(p, index, &row);
  // floor(uniform * total), the uniform number being bits / 2^53
  const uint64_t bits = philox_bits(static_cast<uint64_t>(p.seeds[index]), static_cast<uint64_t>(p.positions[index]));
  const uint64_t target = static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * total >> 53);
  uint64_t running = 0;
  for (int id = 0; id < p.vocab_size; id++) {
    if (row.keeps(id)) running += row.weight(logits[id]);
    if (running > target) return id;
  }
  return best;  // not reached: target is below the whole
}

}  // namespace

const char* sample_top_k_top_p(const SampleParams& p) {
  parallel_for(p.num_rows, [&](int64_t row, int) { p.token_ids[row] = sample_row(p, row); });
  return nullptr;
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
