// A step's inputs, from the rows that the batch keeps of its sequences: the arithmetic of pyengine/worker/input_batch.py.
#pragma once
#include <cstdint>
#include <vector>

#include "../cpu/step_plan.h"

namespace pyengine {

// What is kept of each sequence, a row each; InputBatch (Python) owns the memory.
struct BatchRows {
  int64_t* token_ids;          // [max_num_seqs, max_model_len]
  const int32_t* block_table;  // [max_num_seqs, max_blocks]
  int64_t* num_tokens;         // [max_num_seqs]
  const int64_t* num_blocks;   // [max_num_seqs]
  int64_t* num_computed;       // [max_num_seqs], tokens whose KV is in the blocks
  int64_t max_num_seqs, max_model_len, max_blocks;
  int block_shift;  // log2 of the block size
};

// Where a step's inputs go, sequences in the order of their rows.
struct BatchBuffers {
  int64_t* input_ids;        // [max_num_tokens]
  int64_t* positions;        // [max_num_tokens]
  int64_t* slot_mapping;     // [max_num_tokens]
  int32_t* query_start_loc;  // [max_num_seqs + 1]
  int32_t* seq_lens;         // [max_num_seqs]
  int64_t* rows;             // [max_num_seqs]
  int64_t* query_lens;       // [max_num_seqs]
  int64_t* computed;         // [max_num_seqs]
  bool* samples;             // [max_num_seqs], whether the step reaches the sequence's last token
  int32_t* gathered_blocks;  // [max_num_seqs, max_blocks], block tables where they are not the first rows'
  // Of the sequences that sample, each the logits row that its last token is.
  int64_t* logits_indices;       // [max_num_seqs], of the step's tokens
  const int32_t* logits_starts;  // [max_num_seqs + 1]: 0, 1, 2, ...
  int32_t* logits_seq_lens;      // [max_num_seqs]
  int32_t* logits_blocks;        // [max_num_seqs, max_blocks], block tables where some sequences do not sample
  int64_t max_num_tokens;
};

struct StepSizes {
  int64_t num_tokens, max_query_len, max_seq_len, num_samples;
  int64_t wrong_row;  // of a sequence that the schedule does not fit; -1: none. Nothing else is valid then
};

// Fills the buffers for query_lens[i] tokens of row rows[i]. Where there are more than max_num_tokens in all, only num_tokens
// is valid.
StepSizes prepare_step(const BatchRows& batch, const BatchBuffers& out, const std::vector<int64_t>& rows,
                       const std::vector<int64_t>& query_lens);

// The same as a StepInputs. Block tables are the first rows where these are the step's, and gathered otherwise. `logits_rows`
// gets the tokens that are sampled after, to which the result points unless these are all tokens.
cpu::StepInputs step_inputs(const BatchRows& batch, const BatchBuffers& out, const StepSizes& sizes, int64_t num_seqs,
                            cpu::StepInputs* logits_rows);

// Appends token_ids[i] to the i-th row of the prepared step that samples. One that reaches beyond max_model_len ends its
// sequence, and nothing reads it again.
void append_sampled(const BatchRows& batch, const BatchBuffers& out, int64_t num_seqs, const std::vector<int64_t>& token_ids);

}  // namespace pyengine
