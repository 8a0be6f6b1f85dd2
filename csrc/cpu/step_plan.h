// A step recorded once and run again from one call: on the CPU, what a CUDA graph is on a GPU.
//
// While a plan records, the launchers of its thread check their arguments as ever, but hand kernel and parameters to the plan
// instead of running them. A replay runs those kernels for a step of any size up to the recorded one: rows of what the model
// computes are the step's tokens, so only their number changes, and the few inputs that the step itself brings (StepInputs).
// Everything else that parameters point at must stay where it is as long as the plan lives.
//
// A plan may go on with a part of the tokens, those whose logits are wanted: their rows move to the front of the tensors that
// it still needs, and from there on its rows are these tokens alone. A step that wants no logits ends there.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "launch.h"

namespace pyengine::cpu {

// What a step brings. Pointers may be null where the recorded ops read no such thing.
struct StepInputs {
  int32_t num_tokens, num_seqs, max_query_len, max_seq_len;
  const int64_t* input_ids;        // [num_tokens]
  const int64_t* positions;        // [num_tokens]
  const int64_t* slot_mapping;     // [num_tokens]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* block_table;      // [num_seqs, max_blocks], rows block_table_stride apart
  int64_t block_table_stride;
  // The tokens whose logits are wanted, as a step of their own, and for that one: which tokens of the whole step they are.
  const StepInputs* logits_rows;  // null: all tokens
  const int64_t* indices;         // [num_tokens], ascending

  const StepInputs& rows() const { return logits_rows != nullptr ? *logits_rows : *this; }
};

// Rows copied to where they lie end to end, for tensors that a model makes dense.
struct CopyRowsParams {
  void* dst;        // [num_tokens, row_bytes]
  const void* src;  // [num_tokens, row_bytes], rows src_stride bytes apart
  int64_t row_bytes, src_stride;
  int32_t num_tokens;
};

class StepPlan {
 public:
  // Records what this thread launches until end_recording(). `inputs` are those of the recorded step: its pointers tell which
  // parameters are the step's. Throws std::logic_error if the thread records already, or the plan has recorded before.
  void begin_recording(const StepInputs& inputs);
  void end_recording();
  // The plan that this thread records, or null.
  static StepPlan* recording();

  // Throws std::invalid_argument for an op whose rows are not the step's tokens (after record_logits_rows: its logits rows),
  // or that reads inputs of another step.
  template <class Params>
  void record(const char* op, Kernel<Params> kernel, const Params& params);
  void record_copy(const CopyRowsParams& params);
  // Row i of dst will be row input_ids[i] of src.
  void record_gather(const CopyRowsParams& params);
  // Moves the logits rows of a tensor to its front: row i of `data` will be row indices[i], where a row is row_bytes long and
  // starts stride bytes after the one before. All ops that follow have the logits rows for rows.
  void record_logits_rows(void* data, int64_t row_bytes, int64_t stride);

  // Runs the step. `seconds`, if given, gets the time of each op. Throws std::invalid_argument where the inputs do not fit the
  // plan or each other, or a kernel says that it cannot run.
  void run(const StepInputs& inputs, std::vector<double>* seconds = nullptr) const;

  int num_ops() const { return static_cast<int>(ops_.size()); }
  const char* op_name(int index) const { return ops_[index].name; }

 private:
  struct Op {
    const char* name;
    std::function<const char*(const StepInputs&)> run;  // returns as a kernel does
  };

  bool has_logits_rows() const { return first_row_op_ <= ops_.size(); }
  // What the op that is recorded next has for its step.
  const StepInputs& recorded() const { return has_logits_rows() ? recorded_rows_ : recorded_; }
  int32_t rows_per_token(const char* op, int32_t num_rows) const;
  void check(const StepInputs& inputs) const;

  StepInputs recorded_{}, recorded_rows_{};
  std::vector<Op> ops_;
  size_t first_row_op_ = SIZE_MAX;  // of ops_, with the logits rows for rows; there may be none
};

}  // namespace pyengine::cpu
