// pack_linear_weight, linear, gated_linear: checks and launch. CPU only: other devices multiply with their vendor's library.
#if !defined(PE_EMULATED)
#include "../common/launch.h"
#include "../common/product_args.h"
#include "fused_activation.h"

namespace pyengine {
namespace {

void expect_panels(const TensorArg& packed, int64_t out_features, const char* other, int columns_per_output = 1) {
  const int64_t panels = columns_per_output * ((out_features + kLinearPanel - 1) / kLinearPanel);
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

// Everything but what `gated` says. out [num_tokens, out_features]; input [num_tokens, in_features]; packed_weight as above,
// with `columns_per_output` times the columns; bias [columns_per_output * out_features].
LinearParams linear_params(const char* op, const Tensor& out, const Tensor& input, const Tensor& packed_weight,
                           const OptionalTensor& bias, int columns_per_output) {
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2),
      weight_arg(op, "packed_weight", packed_weight, 3);
  LinearParams p{};
  set_types(&p, out_arg, input_arg);
  p.weight_dtype = weight_arg.float_dtype(kFloatTypes);
  set_matrices(&p, out_arg, input_arg);
  weight_arg.expect_same_device(input_arg);
  weight_arg.expect_size(1, "in_features", p.in_features, "input");
  expect_panels(weight_arg, p.out_features, "out", columns_per_output);
  weight_arg.expect_dense(0);
  set_bias(&p, bias, input_arg, int64_t{columns_per_output} * p.out_features,
           columns_per_output == 1 ? "out_features" : "features of gate and up");
  p.weight = weight_arg.data();
  return p;
}

void linear(Tensor out, const Tensor input, const Tensor packed_weight, OptionalTensor bias) {
  const LinearParams p = linear_params("linear", out, input, packed_weight, bias, 1);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch("linear", &cpu::KernelTable::linear, p);
}

void gated_linear(Tensor out, const Tensor input, const Tensor packed_weight, std::string activation, OptionalTensor bias) {
  const char* op = "gated_linear";
  TensorArg(op, "input", input, 2).expect_dtype(torch::headeronly::ScalarType::Float);
  GatedLinearParams p{linear_params(op, out, input, packed_weight, bias, 2), {}};
  p.activation = fused_activation(op, activation);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch(op, &cpu::KernelTable::gated_linear, p);
}

STABLE_TORCH_LIBRARY_IMPL(pyengine, CPU, library) {
  library.impl("pack_linear_weight", TORCH_BOX(&pack_linear_weight));
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("gated_linear", TORCH_BOX(&gated_linear));
}

}  // namespace
}  // namespace pyengine

#endif
