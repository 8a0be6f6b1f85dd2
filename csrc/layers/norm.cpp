// rms_norm, fused_add_rms_norm: checks and launch.
#include "../common/launch.h"
#include "launch.h"

namespace pyengine {
namespace {

// What both ops share: the input's shape and type, and the weight's.
RmsNormParams common_params(const TensorArg& input, const TensorArg& weight, double epsilon) {
  RmsNormParams p{};
  p.dtype = input.float_dtype(kFloatTypes);
  expect_same_dtype(weight, weight.float_dtype(kFloatTypes), input, p.dtype);
  weight.expect_same_device(input);
  p.num_tokens = input.size32(0, "num_tokens");
  p.hidden_size = input.size32(1, "hidden_size");
  weight.expect_size(0, "hidden_size", p.hidden_size, "input");
  input.expect_dense(1);
  weight.expect_dense(0);
  p.input = input.data();
  p.weight = weight.data();
  p.input_stride = input.stride(0);
  p.epsilon = static_cast<float>(epsilon);
  return p;
}

// `other` (out or residual) must look like the input.
void expect_like_input(const TensorArg& other, const TensorArg& input, DType dtype) {
  expect_same_dtype(other, other.float_dtype(kFloatTypes), input, dtype);
  other.expect_same_device(input);
  other.expect_size(0, "num_tokens", input.size(0), "input");
  other.expect_size(1, "hidden_size", input.size(1), "input");
  other.expect_dense(1);
}

// out, input [num_tokens, hidden_size]; weight [hidden_size]
template <Target target>
void rms_norm(Tensor out, const Tensor input, const Tensor weight, double epsilon) {
  const char* op = "rms_norm";
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2), weight_arg(op, "weight", weight, 1);
  RmsNormParams p = common_params(input_arg, weight_arg, epsilon);
  expect_like_input(out_arg, input_arg, p.dtype);
  p.out = out_arg.data();
  p.out_stride = out_arg.stride(0);
  if (p.num_tokens > 0 && p.hidden_size > 0) PE_LAUNCH(rms_norm, p, input_arg);
}

// input, residual [num_tokens, hidden_size]; weight [hidden_size]
template <Target target>
void fused_add_rms_norm(Tensor input, Tensor residual, const Tensor weight, double epsilon) {
  const char* op = "fused_add_rms_norm";
  const TensorArg input_arg(op, "input", input, 2), residual_arg(op, "residual", residual, 2),
      weight_arg(op, "weight", weight, 1);
  RmsNormParams p = common_params(input_arg, weight_arg, epsilon);
  expect_like_input(residual_arg, input_arg, p.dtype);
  p.out = input_arg.data();
  p.out_stride = input_arg.stride(0);
  p.residual = residual_arg.data();
  p.residual_stride = residual_arg.stride(0);
  if (p.num_tokens > 0 && p.hidden_size > 0) PE_LAUNCH(rms_norm, p, input_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm<target>));
  library.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
