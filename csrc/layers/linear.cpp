// pack_linear_weight, linear: checks and launch. CPU only: other devices multiply with their vendor's library.
#if !defined(PE_EMULATED)
#include "../common/launch.h"

namespace pyengine {
namespace {

void expect_panels(const TensorArg& packed, int64_t out_features, const char* other) {
  const int64_t panels = (out_features + kLinearPanel - 1) / kLinearPanel;
  if (packed.size(0) != panels || packed.size(2) != kLinearPanel) {
    packed.fail("is [" + std::to_string(packed.size(0)) + ", ., " + std::to_string(packed.size(2)) + "], " + other + " with " +
                std::to_string(out_features) + " output features needs [" + std::to_string(panels) + ", ., " +
                std::to_string(kLinearPanel) + "]");
  }
}

// packed [ceil(out_features / 16), in_features, 16]; weight [out_features, in_features]
void pack_linear_weight(Tensor packed, const Tensor weight) {
  const char* op = "pack_linear_weight";
  const TensorArg packed_arg(op, "packed", packed, 3), weight_arg(op, "weight", weight, 2);
  PackLinearParams p{};
  p.dtype = weight_arg.float_dtype(kFloatTypes);
  expect_same_dtype(packed_arg, packed_arg.float_dtype(kFloatTypes), weight_arg, p.dtype);
  packed_arg.expect_same_device(weight_arg);
  p.out_features = weight_arg.size32(0, "out_features");
  p.in_features = weight_arg.size32(1, "in_features");
  expect_panels(packed_arg, p.out_features, "weight");
  packed_arg.expect_size(1, "in_features", p.in_features, "weight");
  packed_arg.expect_dense(0);
  weight_arg.expect_dense(1);
  p.packed = packed_arg.data();
  p.weight = weight_arg.data();
  p.weight_stride = weight_arg.stride(0);
  if (p.out_features > 0 && p.in_features > 0) cpu::launch(op, &cpu::KernelTable::pack_linear_weight, p);
}

// out [num_tokens, out_features]; input [num_tokens, in_features]; packed_weight as above; bias [out_features]
void linear(Tensor out, const Tensor input, const Tensor packed_weight, OptionalTensor bias) {
  const char* op = "linear";
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2),
      weight_arg(op, "packed_weight", packed_weight, 3);
  LinearParams p{};
  p.dtype = input_arg.float_dtype(kFloatTypes);
  p.weight_dtype = weight_arg.float_dtype(kFloatTypes);
  p.out_dtype = out_arg.float_dtype(kFloatTypes);
  if (p.out_dtype != DType::kF32) expect_same_dtype(out_arg, p.out_dtype, input_arg, p.dtype);
  out_arg.expect_same_device(input_arg);
  weight_arg.expect_same_device(input_arg);
  p.num_tokens = input_arg.size32(0, "num_tokens");
  p.in_features = input_arg.size32(1, "in_features");
  p.out_features = out_arg.size32(1, "out_features");
  out_arg.expect_size(0, "num_tokens", p.num_tokens, "input");
  weight_arg.expect_size(1, "in_features", p.in_features, "input");
  expect_panels(weight_arg, p.out_features, "out");
  out_arg.expect_dense(1);
  input_arg.expect_dense(1);
  weight_arg.expect_dense(0);
  if (bias) {
    const TensorArg bias_arg(op, "bias", *bias, 1);
    expect_same_dtype(bias_arg, bias_arg.float_dtype(kFloatTypes), input_arg, p.dtype);
    bias_arg.expect_same_device(input_arg);
    bias_arg.expect_size(0, "out_features", p.out_features, "out");
    bias_arg.expect_dense(0);
    p.bias = bias_arg.data();
  }
  p.out = out_arg.data();
  p.input = input_arg.data();
  p.weight = weight_arg.data();
  p.out_stride = out_arg.stride(0);
  p.input_stride = input_arg.stride(0);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch(op, &cpu::KernelTable::linear, p);
}

STABLE_TORCH_LIBRARY_IMPL(pyengine, CPU, library) {
  library.impl("pack_linear_weight", TORCH_BOX(&pack_linear_weight));
  library.impl("linear", TORCH_BOX(&linear));
}

}  // namespace
}  // namespace pyengine

#endif
