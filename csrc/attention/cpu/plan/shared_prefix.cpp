#include "shared_prefix.h"

#include <algorithm>
#include <vector>

namespace pyengine::cpu {
namespace {

// Entries of a block table that hold the first `positions` positions.
int64_t num_entries(const PagedAttentionParams& p, int64_t positions) {
  return (positions + p.block_size - 1) >> p.block_shift;
}

// Leading entries that two tables have in common, of `count`.
int64_t common_entries(const int32_t* a, const int32_t* b, int64_t count) { return std::mismatch(a, a + count, b).first - a; }

class PrefixFinder {
 public:
  SharedPrefixes find(const PagedAttentionParams& p, const PrefixLimits& limits);

 private:
  struct Member {
    const int32_t* blocks;                              // of its block table
    int32_t seq, num_whole, num_shared, with_previous;  // partitions
    int32_t first_token;                                // of tokens_
  };

  void find_members(const PagedAttentionParams& p, const PrefixLimits& limits);
  void compare_members(const PagedAttentionParams& p, int partition);
  void list_tokens(const PagedAttentionParams& p, const PrefixLimits& limits);
  void cut_tiles(const PrefixLimits& limits);
  void cut_group(size_t begin, size_t end, int partition, int tile_tokens);
  int32_t end_token(size_t member) const {
    return member + 1 < members_.size() ? members_[member + 1].first_token : static_cast<int32_t>(tokens_.size());
  }

  std::vector<Member> members_;
  std::vector<QueryToken> tokens_;
  std::vector<PrefixTile> tiles_;
  std::vector<PrefixPart> parts_;
  std::vector<SequenceParts> seqs_;
};

SharedPrefixes PrefixFinder::find(const PagedAttentionParams& p, const PrefixLimits& limits) {
  members_.clear();
  tokens_.clear();
  tiles_.clear();
  if (p.sliding_window > 0) return {};
  find_members(p, limits);
  if (members_.size() < 2) return {};
  compare_members(p, limits.partition);
  if (members_.empty()) return {};
  list_tokens(p, limits);
  cut_tiles(limits);
  if (tiles_.empty()) return {};
  return {tiles_.data(), static_cast<int>(tiles_.size()), tokens_.data(), seqs_.data(), parts_.data()};
}

void PrefixFinder::find_members(const PagedAttentionParams& p, const PrefixLimits& limits) {
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int query_len = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    if (query_len == 0 || query_len > limits.max_query_len) continue;
    const int whole = (p.seq_lens[seq] - query_len + 1) / limits.partition;
    if (whole > 0) members_.push_back({p.block_table + seq * p.block_table_stride, seq, whole, 0, 0, 0});
  }
}

// Sorts the members by their blocks, so that those which share most are neighbours, and keeps those that share any.
void PrefixFinder::compare_members(const PagedAttentionParams& p, int partition) {
  const auto entries = [&](const Member& member) { return num_entries(p, int64_t{member.num_whole} * partition); };
  std::sort(members_.begin(), members_.end(), [&](const Member& a, const Member& b) {
    if (a.blocks[0] != b.blocks[0]) return a.blocks[0] < b.blocks[0];
    const int64_t a_count = entries(a), b_count = entries(b), count = std::min(a_count, b_count);
    const int64_t same = common_entries(a.blocks, b.blocks, count);
    if (same < count) return a.blocks[same] < b.blocks[same];
    return a_count != b_count ? a_count < b_count : a.seq < b.seq;
  });
  for (size_t i = 1; i < members_.size(); i++) {
    Member &before = members_[i - 1], &member = members_[i];
    const int whole = std::min(before.num_whole, member.num_whole);
    const int64_t same = common_entries(before.blocks, member.blocks, num_entries(p, int64_t{whole} * partition));
    member.with_previous = static_cast<int32_t>(std::min<int64_t>(whole, (same << p.block_shift) / partition));
    before.num_shared = std::max(before.num_shared, member.with_previous);
    member.num_shared = member.with_previous;
  }
  members_.erase(std::remove_if(members_.begin(), members_.end(), [](const Member& member) { return member.num_shared == 0; }),
                 members_.end());
}

void PrefixFinder::list_tokens(const PagedAttentionParams& p, const PrefixLimits& limits) {
  seqs_.assign(static_cast<size_t>(p.num_seqs), {0, 0});
  for (Member& member : members_) {
    member.first_token = static_cast<int32_t>(tokens_.size());
    const int begin = p.query_start_loc[member.seq], end = p.query_start_loc[member.seq + 1];
    for (int row = begin; row < end; row++) tokens_.push_back({row, p.seq_lens[member.seq] - end + row});
  }
  const int64_t most = limits.max_state_tokens / static_cast<int64_t>(tokens_.size());
  int32_t num_parts = 0;
  for (Member& member : members_) {
    member.num_shared = static_cast<int32_t>(std::min<int64_t>(member.num_shared, most));
    seqs_[member.seq] = {member.num_shared, num_parts};
    num_parts += member.num_shared;
  }
  parts_.resize(num_parts);
}

void PrefixFinder::cut_tiles(const PrefixLimits& limits) {
  int64_t total = 0;
  int last = 0;
  for (size_t i = 0; i < members_.size(); i++) {
    total += int64_t{end_token(i) - members_[i].first_token} * members_[i].num_shared;
    last = std::max(last, members_[i].num_shared);
  }
  const int64_t even = total / std::max<int64_t>(limits.wanted_tiles, 1);
  const int tile_tokens = static_cast<int>(std::clamp<int64_t>(even, limits.min_tokens, limits.max_tokens));
  for (int partition = 0; partition < last; partition++) {
    for (size_t begin = 0, end; begin < members_.size(); begin = end) {
      end = begin + 1;
      while (end < members_.size() && members_[end].with_previous > partition) end++;
      if (members_[begin].num_shared > partition) cut_group(begin, end, partition, tile_tokens);
    }
  }
}

// Members [begin, end) share a partition: even tiles of about tile_tokens tokens, no member in two of them.
void PrefixFinder::cut_group(size_t begin, size_t end, int partition, int tile_tokens) {
  const int total = end_token(end - 1) - members_[begin].first_token;
  const int count = (total + tile_tokens - 1) / tile_tokens, even = (total + count - 1) / count;
  for (size_t first = begin, next; first < end; first = next) {
    const int32_t first_token = members_[first].first_token;
    next = first + 1;
    while (next < end && end_token(next) - first_token <= even) next++;
    const auto tile = static_cast<int32_t>(tiles_.size());
    tiles_.push_back({members_[first].seq, partition, first_token, end_token(next - 1) - first_token, 0});
    for (size_t i = first; i < next; i++)
      parts_[seqs_[members_[i].seq].first_part + partition] = {tile, members_[i].first_token - first_token};
  }
}

}  // namespace

SharedPrefixes find_shared_prefixes(const PagedAttentionParams& p, const PrefixLimits& limits) {
  thread_local PrefixFinder finder;
  return finder.find(p, limits);
}

}  // namespace pyengine::cpu
