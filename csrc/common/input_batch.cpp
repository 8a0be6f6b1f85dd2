#include "input_batch.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace pyengine {
namespace {

void fill_tokens(const BatchRows& batch, const BatchBuffers& out, int64_t row, int64_t first, int64_t count, int64_t token) {
  const int64_t* token_ids = batch.token_ids + row * batch.max_model_len;
  const int32_t* blocks = batch.block_table + row * batch.max_blocks;
  const int64_t offset_mask = (int64_t{1} << batch.block_shift) - 1;
  for (int64_t position = first; position < first + count; position++, token++) {
    out.input_ids[token] = token_ids[position];
    out.positions[token] = position;
    out.slot_mapping[token] =
        (static_cast<int64_t>(blocks[position >> batch.block_shift]) << batch.block_shift) + (position & offset_mask);
  }
}

// Gathers the block tables of those of the step's sequences that `takes` says, up to the longest one's last block.
template <class Takes>
void gather_blocks(const BatchRows& batch, const BatchBuffers& out, const StepSizes& sizes, int64_t num_seqs, int32_t* to,
                   const Takes& takes) {
  const int64_t used = (sizes.max_seq_len + (int64_t{1} << batch.block_shift) - 1) >> batch.block_shift;
  for (int64_t i = 0; i < num_seqs; i++) {
    if (!takes(i)) continue;
    memcpy(to, batch.block_table + out.rows[i] * batch.max_blocks, used * sizeof(int32_t));
    to += batch.max_blocks;
  }
}

cpu::StepInputs logits_step(const BatchRows& batch, const BatchBuffers& out, const StepSizes& sizes,
                            const cpu::StepInputs& step) {
  cpu::StepInputs rows{};
  rows.num_tokens = rows.num_seqs = static_cast<int32_t>(sizes.num_samples);
  rows.max_query_len = 1;
  rows.max_seq_len = step.max_seq_len;
  rows.query_start_loc = out.logits_starts;
  rows.seq_lens = out.logits_seq_lens;
  rows.block_table = step.block_table;
  rows.block_table_stride = batch.max_blocks;
  rows.indices = out.logits_indices;
  if (sizes.num_samples != step.num_seqs) {
    gather_blocks(batch, out, sizes, step.num_seqs, out.logits_blocks, [&](int64_t i) { return out.samples[i]; });
    rows.block_table = out.logits_blocks;
  }
  return rows;
}

}  // namespace

StepSizes prepare_step(const BatchRows& batch, const BatchBuffers& out, const std::vector<int64_t>& rows,
                       const std::vector<int64_t>& query_lens) {
  StepSizes sizes = {0, 0, 0, 0, -1};
  std::vector<int64_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(rows.begin(), rows.end())) {
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows[a] < rows[b]; });
  }
  for (size_t i = 0; i < order.size(); i++) {
    const int64_t row = rows[order[i]], count = query_lens[order[i]], computed = batch.num_computed[row];
    const int64_t seq_len = computed + count;
    out.rows[i] = row;
    out.query_lens[i] = count;
    out.computed[i] = computed;
    if (count < 1 || seq_len > batch.num_tokens[row] || seq_len > batch.num_blocks[row] << batch.block_shift) {
      sizes.wrong_row = row;
      return sizes;
    }
    sizes.num_tokens += count;
  }
  if (sizes.num_tokens > out.max_num_tokens) return sizes;
  int64_t token = 0;
  out.query_start_loc[0] = 0;
  for (size_t i = 0; i < order.size(); i++) {
    const int64_t seq_len = out.computed[i] + out.query_lens[i];
    fill_tokens(batch, out, out.rows[i], out.computed[i], out.query_lens[i], token);
    token += out.query_lens[i];
    out.query_start_loc[i + 1] = static_cast<int32_t>(token);
    out.seq_lens[i] = static_cast<int32_t>(seq_len);
    out.samples[i] = seq_len == batch.num_tokens[out.rows[i]];
    if (out.samples[i]) {
      out.logits_indices[sizes.num_samples] = token - 1;
      out.logits_seq_lens[sizes.num_samples++] = out.seq_lens[i];
    }
    sizes.max_query_len = std::max(sizes.max_query_len, out.query_lens[i]);
    sizes.max_seq_len = std::max(sizes.max_seq_len, seq_len);
  }
  return sizes;
}

cpu::StepInputs step_inputs(const BatchRows& batch, const BatchBuffers& out, const StepSizes& sizes, int64_t num_seqs,
                            cpu::StepInputs* logits_rows) {
  cpu::StepInputs inputs{};
  inputs.num_tokens = static_cast<int32_t>(sizes.num_tokens);
  inputs.num_seqs = static_cast<int32_t>(num_seqs);
  inputs.max_query_len = static_cast<int32_t>(sizes.max_query_len);
  inputs.max_seq_len = static_cast<int32_t>(sizes.max_seq_len);
  inputs.input_ids = out.input_ids;
  inputs.positions = out.positions;
  inputs.slot_mapping = out.slot_mapping;
  inputs.query_start_loc = out.query_start_loc;
  inputs.seq_lens = out.seq_lens;
  inputs.block_table = batch.block_table;
  inputs.block_table_stride = batch.max_blocks;
  if (out.rows[num_seqs - 1] != num_seqs - 1) {
    gather_blocks(batch, out, sizes, num_seqs, out.gathered_blocks, [](int64_t) { return true; });
    inputs.block_table = out.gathered_blocks;
  }
  if (sizes.num_samples != sizes.num_tokens) {
    *logits_rows = logits_step(batch, out, sizes, inputs);
    inputs.logits_rows = logits_rows;
  }
  return inputs;
}

void append_sampled(const BatchRows& batch, const BatchBuffers& out, int64_t num_seqs, const std::vector<int64_t>& token_ids) {
  size_t next = 0;
  for (int64_t i = 0; i < num_seqs && next < token_ids.size(); i++) {
    if (!out.samples[i]) continue;
    const int64_t row = out.rows[i], column = batch.num_tokens[row]++;
    if (column < batch.max_model_len) batch.token_ids[row * batch.max_model_len + column] = token_ids[next];
    next++;
  }
}

}  // namespace pyengine
