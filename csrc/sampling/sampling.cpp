// apply_penalties, apply_bitmask, sample_top_k_top_p: checks and launch.
#include "../common/launch.h"
#include "launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

// logits fp32 [num_rows, vocab_size]
void check_logits(const TensorArg& logits, int32_t* num_rows, int32_t* vocab_size) {
  logits.expect_dtype(ScalarType::Float);
  logits.expect_dense(1);
  *num_rows = logits.size32(0, "num_rows");
  *vocab_size = logits.size32(1, "vocab_size");
}

// [num_rows], dense
void check_per_row(const TensorArg& arg, ScalarType type, const TensorArg& logits) {
  arg.expect_dtype(type);
  arg.expect_same_device(logits);
  arg.expect_size(0, "num_rows", logits.size(0), "logits");
  arg.expect_dense(0);
}

// [num_rows, vocab_size], rows dense
void check_like_logits(const TensorArg& arg, ScalarType type, const TensorArg& logits) {
  arg.expect_dtype(type);
  arg.expect_same_device(logits);
  arg.expect_size(0, "num_rows", logits.size(0), "logits");
  arg.expect_size(1, "vocab_size", logits.size(1), "logits");
  arg.expect_dense(1);
}

// Shapes: params.h.
template <Target target>
void apply_penalties(Tensor logits, const Tensor prompt_mask, const Tensor output_counts, const Tensor repetition,
                     const Tensor presence, const Tensor frequency) {
  const char* op = "apply_penalties";
  const TensorArg logits_arg(op, "logits", logits, 2), mask_arg(op, "prompt_mask", prompt_mask, 2),
      counts_arg(op, "output_counts", output_counts, 2), repetition_arg(op, "repetition", repetition, 1),
      presence_arg(op, "presence", presence, 1), frequency_arg(op, "frequency", frequency, 1);
  PenaltiesParams p{};
  check_logits(logits_arg, &p.num_rows, &p.vocab_size);
  check_like_logits(mask_arg, ScalarType::Bool, logits_arg);
  check_like_logits(counts_arg, ScalarType::Int, logits_arg);
  for (const TensorArg* arg : {&repetition_arg, &presence_arg, &frequency_arg})
    check_per_row(*arg, ScalarType::Float, logits_arg);
  p.logits = logits_arg.data_as<float>();
  p.prompt_mask = mask_arg.data_as<bool>();
  p.output_counts = counts_arg.data_as<int32_t>();
  p.repetition = repetition_arg.data_as<float>();
  p.presence = presence_arg.data_as<float>();
  p.frequency = frequency_arg.data_as<float>();
  p.logits_stride = logits_arg.stride(0);
  p.prompt_mask_stride = mask_arg.stride(0);
  p.output_counts_stride = counts_arg.stride(0);
  if (p.num_rows > 0 && p.vocab_size > 0) PE_LAUNCH(apply_penalties, p, logits_arg);
}

// bitmask int32 [num_rows, ceil(vocab_size / 32)]
template <Target target>
void apply_bitmask(Tensor logits, const Tensor bitmask) {
  const char* op = "apply_bitmask";
  const TensorArg logits_arg(op, "logits", logits, 2), mask_arg(op, "bitmask", bitmask, 2);
  BitmaskParams p{};
  check_logits(logits_arg, &p.num_rows, &p.vocab_size);
  mask_arg.expect_dtype(ScalarType::Int);
  mask_arg.expect_same_device(logits_arg);
  mask_arg.expect_size(0, "num_rows", logits_arg.size(0), "logits");
  mask_arg.expect_dense(1);
  const int64_t words = (logits_arg.size(1) + 31) / 32;
  if (mask_arg.size(1) != words) {
    mask_arg.fail("has " + std::to_string(mask_arg.size(1)) + " words a row, logits with vocab_size " +
                  std::to_string(logits_arg.size(1)) + " needs " + std::to_string(words));
  }
  p.logits = logits_arg.data_as<float>();
  p.bitmask = mask_arg.data_as<int32_t>();
  p.logits_stride = logits_arg.stride(0);
  p.bitmask_stride = mask_arg.stride(0);
  if (p.num_rows > 0 && p.vocab_size > 0) PE_LAUNCH(apply_bitmask, p, logits_arg);
}

template <Target target>
void sample_top_k_top_p(Tensor token_ids, const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p,
                        const Tensor min_p, const Tensor seeds, const Tensor positions) {
  const char* op = "sample_top_k_top_p";
  const TensorArg ids_arg(op, "token_ids", token_ids, 1), logits_arg(op, "logits", logits, 2),
      temperature_arg(op, "temperature", temperature, 1), top_k_arg(op, "top_k", top_k, 1), top_p_arg(op, "top_p", top_p, 1),
      min_p_arg(op, "min_p", min_p, 1), seeds_arg(op, "seeds", seeds, 1), positions_arg(op, "positions", positions, 1);
  SampleParams p{};
  check_logits(logits_arg, &p.num_rows, &p.vocab_size);
  for (const TensorArg* arg : {&temperature_arg, &top_p_arg, &min_p_arg}) check_per_row(*arg, ScalarType::Float, logits_arg);
  check_per_row(top_k_arg, ScalarType::Int, logits_arg);
  for (const TensorArg* arg : {&ids_arg, &seeds_arg, &positions_arg}) check_per_row(*arg, ScalarType::Long, logits_arg);
  p.token_ids = ids_arg.data_as<int64_t>();
  p.logits = logits_arg.data_as<float>();
  p.temperature = temperature_arg.data_as<float>();
  p.top_k = top_k_arg.data_as<int32_t>();
  p.top_p = top_p_arg.data_as<float>();
  p.min_p = min_p_arg.data_as<float>();
  p.seeds = seeds_arg.data_as<int64_t>();
  p.positions = positions_arg.data_as<int64_t>();
  p.logits_stride = logits_arg.stride(0);
  if (p.num_rows > 0 && p.vocab_size == 0) logits_arg.fail("has an empty vocabulary");
  if (p.num_rows > 0) PE_LAUNCH(sample_top_k_top_p, p, logits_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("apply_penalties", TORCH_BOX(&apply_penalties<target>));
  library.impl("apply_bitmask", TORCH_BOX(&apply_bitmask<target>));
  library.impl("sample_top_k_top_p", TORCH_BOX(&sample_top_k_top_p<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
