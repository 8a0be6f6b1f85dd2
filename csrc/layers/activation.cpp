// silu_and_mul, gelu_and_mul: checks and launch.
#include "../common/launch.h"
#include "launch.h"

namespace pyengine {
namespace {

ActAndMulParams act_and_mul_params(const TensorArg& out, const TensorArg& input, GatedActivation activation) {
  ActAndMulParams p{};
  p.dtype = input.float_dtype(kFloatTypes);
  expect_same_dtype(out, out.float_dtype(kFloatTypes), input, p.dtype);
  out.expect_same_device(input);
  p.num_tokens = input.size32(0, "num_tokens");
  p.d = out.size32(1, "width");
  out.expect_size(0, "num_tokens", p.num_tokens, "input");
  if (input.size(1) != 2 * out.size(1)) {
    input.fail("has width " + std::to_string(input.size(1)) + ", twice out's is " + std::to_string(2 * out.size(1)));
  }
  out.expect_dense(1);
  input.expect_dense(1);
  p.out = out.data();
  p.input = input.data();
  p.out_stride = out.stride(0);
  p.input_stride = input.stride(0);
  p.activation = activation;
  return p;
}

template <Target target>
void act_and_mul(const char* op, const Tensor& out, const Tensor& input, GatedActivation activation) {
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2);
  const ActAndMulParams p = act_and_mul_params(out_arg, input_arg, activation);
  if (p.num_tokens > 0 && p.d > 0) PE_LAUNCH(act_and_mul, p, out_arg);
}

// out [num_tokens, d], input [num_tokens, 2 d]
template <Target target>
void silu_and_mul(Tensor out, const Tensor input) {
  act_and_mul<target>("silu_and_mul", out, input, GatedActivation::kSilu);
}

template <Target target>
void gelu_and_mul(Tensor out, const Tensor input, bool tanh_approximation) {
  act_and_mul<target>("gelu_and_mul", out, input, tanh_approximation ? GatedActivation::kGeluTanh : GatedActivation::kGelu);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul<target>));
  library.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
