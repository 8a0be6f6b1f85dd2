#include "step_plan.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../common/tensor_arg.h"
#include "thread_pool.h"

namespace pyengine::cpu {
namespace {

thread_local StepPlan* recording_plan = nullptr;

double now_seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Which parameters are a step's own inputs, by type of parameters: fn(parameter, the same in StepInputs) for each.
template <class Params, class Inputs, class Fn>
void for_each_input(Params& p, Inputs& in, const Fn& fn) {
  using P = std::remove_const_t<Params>;
  if constexpr (std::is_same_v<P, QuantizedEmbeddingParams> || std::is_same_v<P, W8A16EmbeddingParams>) {
    fn(p.indices, in.input_ids);
  } else if constexpr (std::is_same_v<P, RotaryParams>) {
    fn(p.positions, in.positions);
  } else if constexpr (std::is_same_v<P, ReshapeAndCacheParams>) {
    if (p.positions != nullptr) fn(p.positions, in.positions);
    fn(p.slot_mapping, in.slot_mapping);
  } else if constexpr (std::is_same_v<P, PagedAttentionParams>) {
    fn(p.block_table, in.block_table);
    fn(p.block_table_stride, in.block_table_stride);
    fn(p.query_start_loc, in.query_start_loc);
    fn(p.seq_lens, in.seq_lens);
    fn(p.num_seqs, in.num_seqs);
    fn(p.max_query_len, in.max_query_len);
    fn(p.max_seq_len, in.max_seq_len);
  }
}

// How many rows an op has.
template <class P>
int32_t& num_rows(P& p) {
  return p.num_tokens;
}
int32_t& num_rows(ArgmaxParams& p) { return p.num_rows; }

// Ops whose rows are tokens, and which read nothing else that changes from step to step.
template <class P>
constexpr bool kRecordable =
    std::is_same_v<P, RmsNormParams> || std::is_same_v<P, RotaryParams> || std::is_same_v<P, ActAndMulParams> ||
    std::is_same_v<P, LinearParams> || std::is_same_v<P, GatedLinearParams> || std::is_same_v<P, QuantizedLinearParams> ||
    std::is_same_v<P, CheckpointLinearParams> || std::is_same_v<P, QuantizeRowsParams> ||
    std::is_same_v<P, ReshapeAndCacheParams> || std::is_same_v<P, PagedAttentionParams> ||
    std::is_same_v<P, QuantizedEmbeddingParams> || std::is_same_v<P, W8A16LinearParams> ||
    std::is_same_v<P, W8A16EmbeddingParams> || std::is_same_v<P, ArgmaxParams>;

const char* copy_rows(const CopyRowsParams& p) {
  for (int64_t row = 0; row < p.num_tokens; row++) {
    memcpy(static_cast<char*>(p.dst) + row * p.row_bytes, static_cast<const char*>(p.src) + row * p.src_stride, p.row_bytes);
  }
  return nullptr;
}

[[noreturn]] void fail(const std::string& message) { fail_op("step plan", message); }

// Launchers check the values of all inputs for each op. Here, once a step, query_start_loc and seq_lens are checked, as work is
// cut by them. Trusted are token ids (InputBatch.check_tokens in Python, and the sampler), and positions, slots and block
// tables: prepare_step makes them from a sequence's own row, which the scheduler has given blocks for all its tokens.
void check_batch(const StepInputs& inputs, const StepInputs& recorded) {
  if (inputs.num_tokens < 1 || inputs.num_tokens > recorded.num_tokens) {
    fail("has " + std::to_string(inputs.num_tokens) + " tokens, it was recorded for 1 to " +
         std::to_string(recorded.num_tokens));
  }
  if ((recorded.input_ids != nullptr && inputs.input_ids == nullptr) ||
      (recorded.positions != nullptr) != (inputs.positions != nullptr) ||
      (recorded.slot_mapping != nullptr) != (inputs.slot_mapping != nullptr) ||
      (recorded.block_table != nullptr) != (inputs.block_table != nullptr) ||
      (recorded.query_start_loc != nullptr) != (inputs.query_start_loc != nullptr) ||
      (recorded.seq_lens != nullptr) != (inputs.seq_lens != nullptr)) {
    fail("has other inputs than it was recorded with");
  }
  if (inputs.query_start_loc == nullptr || inputs.seq_lens == nullptr) return;
  const int32_t* start = inputs.query_start_loc;
  bool valid = inputs.num_seqs >= 1 && start[0] == 0 && start[inputs.num_seqs] == inputs.num_tokens;
  for (int32_t i = 0; valid && i < inputs.num_seqs; i++) {
    const int32_t query_len = start[i + 1] - start[i];
    valid = query_len >= 0 && query_len <= inputs.max_query_len && inputs.seq_lens[i] >= query_len &&
            inputs.seq_lens[i] <= inputs.max_seq_len;
  }
  if (!valid) fail("query_start_loc and seq_lens do not describe a batch of " + std::to_string(inputs.num_tokens) + " tokens");
}

void check_indices(const StepInputs& rows, int32_t num_tokens) {
  bool valid = rows.indices != nullptr;
  int64_t previous = -1;
  for (int32_t i = 0; valid && i < rows.num_tokens; i++) {
    valid = rows.indices[i] > previous && rows.indices[i] < num_tokens;
    previous = rows.indices[i];
  }
  if (!valid) fail("the logits rows are not tokens of the step in their order");
}

}  // namespace

StepPlan* StepPlan::recording() { return recording_plan; }

void StepPlan::begin_recording(const StepInputs& inputs) {
  if (recording_plan != nullptr) throw std::logic_error("this thread records a step already");
  if (recorded_.num_tokens != 0) throw std::logic_error("the plan has recorded a step already");
  const int32_t fewest = std::min(inputs.num_tokens, inputs.rows().num_tokens);
  if (fewest < 1) fail("a step to record has at least one token and one logits row, not " + std::to_string(fewest));
  recorded_ = inputs;
  recorded_.logits_rows = nullptr;  // may not live as long
  recorded_rows_ = inputs.rows();
  recording_plan = this;
}

void StepPlan::end_recording() {
  if (recording_plan != this) throw std::logic_error("the plan does not record in this thread");
  recording_plan = nullptr;
}

int32_t StepPlan::rows_per_token(const char* op, int32_t num_rows) const {
  const int32_t num_tokens = recorded().num_tokens;
  if (num_rows % num_tokens != 0 || num_rows == 0) {
    fail_op(op, "cannot be recorded: it has " + std::to_string(num_rows) + " rows in a step of " + std::to_string(num_tokens) +
                    (has_logits_rows() ? " logits rows" : " tokens"));
  }
  return num_rows / num_tokens;
}

template <class Params>
void StepPlan::record(const char* op, Kernel<Params> kernel, const Params& params) {
  if constexpr (kRecordable<Params>) {
    bool own = true;
    for_each_input(params, recorded(), [&](const auto& value, const auto& recorded) { own = own && value == recorded; });
    if (!own) fail_op(op, "cannot be recorded: it reads inputs of another step");
    Params recorded = params;
    const int32_t rows = rows_per_token(op, num_rows(recorded));
    ops_.push_back({op, [kernel, recorded, rows](const StepInputs& inputs) {
                      Params p = recorded;
                      for_each_input(p, inputs, [](auto& value, const auto& input) { value = input; });
                      num_rows(p) = rows * inputs.num_tokens;
                      return (kernels().*kernel)(p);
                    }});
  } else {
    (void)kernel;
    (void)params;
    fail_op(op, "cannot be recorded");
  }
}

void StepPlan::record_copy(const CopyRowsParams& params) {
  const int32_t rows = rows_per_token("copy", params.num_tokens);
  ops_.push_back({"copy", [params, rows](const StepInputs& inputs) {
                    CopyRowsParams p = params;
                    p.num_tokens = rows * inputs.num_tokens;
                    return copy_rows(p);
                  }});
}

void StepPlan::record_gather(const CopyRowsParams& params) {
  rows_per_token("gather", params.num_tokens);
  ops_.push_back({"gather", [params](const StepInputs& inputs) -> const char* {
                    for (int64_t row = 0; row < inputs.num_tokens; row++) {
                      memcpy(static_cast<char*>(params.dst) + row * params.row_bytes,
                             static_cast<const char*>(params.src) + inputs.input_ids[row] * params.src_stride,
                             params.row_bytes);
                    }
                    return nullptr;
                  }});
}

// In place, so that a step which wants all logits, as decode steps do, moves nothing. No row is overwritten before it has
// moved, for indices ascend.
void StepPlan::record_logits_rows(void* data, int64_t row_bytes, int64_t stride) {
  if (!has_logits_rows()) first_row_op_ = ops_.size();
  char* first = static_cast<char*>(data);
  ops_.push_back({"logits_rows", [first, row_bytes, stride](const StepInputs& rows) -> const char* {
                    for (int64_t row = 0; rows.indices != nullptr && row < rows.num_tokens; row++) {
                      if (rows.indices[row] != row) memcpy(first + row * stride, first + rows.indices[row] * stride, row_bytes);
                    }
                    return nullptr;
                  }});
}

void StepPlan::check(const StepInputs& inputs) const {
  if (recording_plan != nullptr) throw std::logic_error("a step cannot run while this thread records one");
  check_batch(inputs, recorded_);
  const StepInputs& rows = inputs.rows();
  if (rows.num_tokens > recorded_rows_.num_tokens) {
    fail("has " + std::to_string(rows.num_tokens) + " logits rows, it was recorded for up to " +
         std::to_string(recorded_rows_.num_tokens));
  }
  if (inputs.logits_rows == nullptr || rows.num_tokens == 0) return;
  check_batch(rows, recorded_rows_);
  check_indices(rows, inputs.num_tokens);
}

void StepPlan::run(const StepInputs& inputs, std::vector<double>* seconds) const {
  check(inputs);
  if (seconds != nullptr) seconds->assign(ops_.size(), 0.0);
  const StepInputs& rows = inputs.rows();
  const size_t end = rows.num_tokens > 0 || !has_logits_rows() ? ops_.size() : first_row_op_;
  // What kernels read outlives late workers: the plan's owner waits for them before it frees tensors, shared_scratch by itself.
  const TakeOverScope scope;
  for (size_t i = 0; i < end; i++) {
    const double start = seconds != nullptr ? now_seconds() : 0.0;
    check_launch(ops_[i].name, ops_[i].run(i < first_row_op_ ? inputs : rows));
    if (seconds != nullptr) (*seconds)[i] = now_seconds() - start;
  }
}

template <class Params>
void launch(const char* op, Kernel<Params> kernel, const Params& params) {
  if (recording_plan != nullptr) {
    recording_plan->record(op, kernel, params);
  } else {
    check_launch(op, (kernels().*kernel)(params));
  }
}

// Kernels may share a type of parameters, which an explicit instantiation could name once only.
#define PE_INSTANTIATE(name, Params) \
  [[gnu::used]] static void (*const launch_##name)(const char*, Kernel<Params>, const Params&) = &launch<Params>;
PE_CPU_KERNELS(PE_INSTANTIATE)
#undef PE_INSTANTIATE

}  // namespace pyengine::cpu
