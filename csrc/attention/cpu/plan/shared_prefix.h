// Partitions of positions that several sequences of a batch have in common, because their block tables begin with the same
// blocks: attention reads such a partition once for all of them (as Hydragen, Juravsky et al., 2024, and FlashInfer's cascade).
#pragma once
#include <cstdint>

#include "../../params.h"

namespace pyengine::cpu {

// A query token: its row of the batch, and its position in its sequence.
struct QueryToken {
  int32_t row, position;
};

// One partition for some of the sequences that share it: their query tokens, [first_token, first_token + num_tokens) of all
// those listed. `seq` is any of the sequences, for its block table; `state` is for the caller to remember where results go.
struct PrefixTile {
  int32_t seq, partition, first_token, num_tokens;
  int64_t state;
};

// Where one sequence's tokens are found: a tile, and the first one's place in it.
struct PrefixPart {
  int32_t tile, first_token;
};

struct PrefixLimits {
  int partition;             // positions
  int max_query_len;         // sequences with more query tokens stay on their own
  int min_tokens;            // tokens of a tile: no fewer, where there are more,
  int max_tokens;            //   and no more; at least max_query_len
  int64_t wanted_tiles;      // in all, so that every thread gets some
  int64_t max_state_tokens;  // of all tiles together, whose results have to be kept
};

// A sequence's shared partitions, which are its first: parts[first_part .. first_part + num_parts).
struct SequenceParts {
  int32_t num_parts, first_part;
};

struct SharedPrefixes {
  PrefixTile* tiles = nullptr;  // [num_tiles]
  int num_tiles = 0;            // 0: nothing is shared, and all else is null
  const QueryToken* tokens = nullptr;
  const SequenceParts* seqs = nullptr;  // [num_seqs]
  const PrefixPart* parts = nullptr;
};

// What the sequences of a batch share. Each counts from position 0 to where it parts from all others, in whole partitions that
// its first query token sees; none with a sliding window. The arrays are the calling thread's, valid until its next call.
SharedPrefixes find_shared_prefixes(const PagedAttentionParams& p, const PrefixLimits& limits);

}  // namespace pyengine::cpu
