// What the launchers of matrix products, out = input * weight^T + bias, check alike. P is the op's struct of parameters.
#pragma once
#include "tensor_arg.h"

namespace pyengine {

// Sizes, strides and data of out [num_tokens, out_features] and input [num_tokens, in_features].
template <class P>
void set_matrices(P* p, const TensorArg& out, const TensorArg& input) {
  out.expect_same_device(input);
  out.expect_dense(1);
  input.expect_dense(1);
  p->num_tokens = input.size32(0, "num_tokens");
  p->in_features = input.size32(1, "in_features");
  if (p->in_features == 0) input.fail("has no in_features");  // kernels divide by it
  p->out_features = out.size32(1, "out_features");
  out.expect_size(0, "num_tokens", p->num_tokens, "input");
  p->out = out.data();
  p->input = input.data();
  p->out_stride = out.stride(0);
  p->input_stride = input.stride(0);
}

// Types of the input, and of an output that has the same or fp32.
template <class P>
void set_types(P* p, const TensorArg& out, const TensorArg& input) {
  p->dtype = input.float_dtype(kFloatTypes);
  p->out_dtype = out.float_dtype(kFloatTypes);
  if (p->out_dtype != DType::kF32) expect_same_dtype(out, p->out_dtype, input, p->dtype);
}

// bias [columns], in the type p->dtype, which is `typed`'s.
template <class P>
void set_bias(P* p, const OptionalTensor& bias, const TensorArg& typed, int64_t columns, const char* what = "out_features") {
  if (!bias) return;
  const TensorArg arg(typed.op(), "bias", *bias, 1);
  expect_same_dtype(arg, arg.float_dtype(kFloatTypes), typed, p->dtype);
  arg.expect_same_device(typed);
  arg.expect_size(0, what, columns, "out");
  arg.expect_dense(0);
  p->bias = arg.data();
}

}  // namespace pyengine
