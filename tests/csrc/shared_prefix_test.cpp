// What sequences share; built and run by tests/kernels/test_shared_prefix.py. Exits with 1 and a line on stderr at the first
// failure.
#include "../../csrc/attention/cpu/plan/shared_prefix.h"

#include <array>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using namespace pyengine;
using namespace pyengine::cpu;

constexpr int kPartition = 64;
constexpr PrefixLimits kLimits = {kPartition, 4, 2, 6, 1, 1000};

// Sequences of (query_len, seq_len), blocks of 16 tokens.
struct Batch {
  std::vector<int32_t> blocks, starts = {0}, seq_lens;
  int num_blocks;
  PagedAttentionParams params = {};

  Batch(std::vector<std::pair<int, int>> sequences, int max_blocks) : num_blocks(max_blocks) {
    for (const auto& [query_len, seq_len] : sequences) {
      starts.push_back(starts.back() + query_len);
      seq_lens.push_back(seq_len);
    }
    for (int i = 0; i < max_blocks * static_cast<int>(sequences.size()); i++) blocks.push_back(1000 - i);
  }
  // Sequence `seq` begins with the first blocks of `other`.
  void share(int seq, int other, int count) {
    for (int i = 0; i < count; i++) blocks[seq * num_blocks + i] = blocks[other * num_blocks + i];
  }
  SharedPrefixes find(PrefixLimits limits = kLimits) {
    params.num_seqs = static_cast<int32_t>(seq_lens.size());
    params.block_table = blocks.data();
    params.block_table_stride = num_blocks;
    params.query_start_loc = starts.data();
    params.seq_lens = seq_lens.data();
    params.block_size = 16;
    params.block_shift = 4;
    return find_shared_prefixes(params, limits);
  }
};

// Every sequence's every part is in a tile of its partition, with its own tokens; and all tokens of all tiles are somebody's.
int check(const Batch& batch, const SharedPrefixes& found, int max_tokens) {
  int tokens = 0, part_tokens = 0;
  for (int i = 0; i < found.num_tiles; i++) {
    tokens += found.tiles[i].num_tokens;
    CHECK(found.tiles[i].num_tokens <= max_tokens);
  }
  for (int seq = 0; seq < static_cast<int>(batch.seq_lens.size()); seq++) {
    const int begin = batch.starts[seq], end = batch.starts[seq + 1];
    for (int i = 0; i < found.seqs[seq].num_parts; i++) {
      const PrefixPart& part = found.parts[found.seqs[seq].first_part + i];
      const PrefixTile& tile = found.tiles[part.tile];
      CHECK(tile.partition == i);
      CHECK(part.first_token + end - begin <= tile.num_tokens);
      for (int block = 0; block < (i + 1) * kPartition / 16; block++)
        CHECK(batch.blocks[seq * batch.num_blocks + block] == batch.blocks[tile.seq * batch.num_blocks + block]);
      for (int row = begin; row < end; row++) {
        const QueryToken& token = found.tokens[tile.first_token + part.first_token + row - begin];
        CHECK(token.row == row);
        CHECK(token.position == batch.seq_lens[seq] - end + row);
        CHECK(token.position >= (i + 1) * kPartition - 1);
      }
      part_tokens += end - begin;
    }
  }
  CHECK(tokens == part_tokens);
  return tokens;
}

void what_is_shared() {
  // 0 and 3 share two partitions, 1 the first with them; 2 and 4 another one. 5 and 6 begin like 0, but 5 has too many tokens,
  // and 6's first token does not see all of the partition. 7 shares nothing.
  Batch batch({{1, 200}, {2, 140}, {1, 100}, {1, 150}, {1, 64}, {5, 200}, {3, 65}, {1, 300}}, 20);
  for (const auto& [seq, other, count] : std::vector<std::array<int, 3>>{{1, 0, 7}, {3, 0, 9}, {4, 2, 4}, {5, 0, 8}, {6, 0, 4}})
    batch.share(seq, other, count);
  const SharedPrefixes found = batch.find();
  const int expected[] = {2, 1, 1, 2, 1, 0, 0, 0};
  for (int seq = 0; seq < 8; seq++) CHECK(found.seqs[seq].num_parts == expected[seq]);
  CHECK(found.num_tiles == 3);
  CHECK(check(batch, found, 6) == 4 + 2 + 2);
}

void nothing() {
  Batch batch({{1, 200}, {1, 200}}, 13);
  CHECK(batch.find().num_tiles == 0);
  batch.share(1, 0, 3);  // less than a partition
  CHECK(batch.find().num_tiles == 0);
  batch.share(1, 0, 4);
  CHECK(batch.find().num_tiles == 1);
  batch.params.sliding_window = 500;
  CHECK(batch.find().num_tiles == 0);
}

void tiles_are_cut() {
  Batch batch(std::vector<std::pair<int, int>>(17, {1, 200}), 13);
  for (int seq = 1; seq < 17; seq++) batch.share(seq, 0, 8);
  const SharedPrefixes found = batch.find();
  CHECK(found.num_tiles == 6);  // of two partitions, six tokens at most
  CHECK(check(batch, found, 6) == 34);
  PrefixLimits limits = kLimits;
  limits.wanted_tiles = 100;
  CHECK(batch.find(limits).num_tiles == 18);  // two tokens at least
  check(batch, batch.find(limits), 2);
  limits.max_state_tokens = 20;  // one partition's
  const SharedPrefixes one = batch.find(limits);
  CHECK(check(batch, one, 2) == 17);
  limits.max_state_tokens = 16;
  CHECK(batch.find(limits).num_tiles == 0);
}

void members_stay_whole() {
  Batch batch(std::vector<std::pair<int, int>>(9, {4, 100}), 7);
  for (int seq = 1; seq < 9; seq++) batch.share(seq, 0, 4);
  const SharedPrefixes found = batch.find();
  CHECK(found.num_tiles == 9);  // a second sequence of four tokens does not fit
  CHECK(check(batch, found, 6) == 36);
}

}  // namespace

int main() {
  what_is_shared();
  nothing();
  tiles_are_cut();
  members_stay_whole();
}
