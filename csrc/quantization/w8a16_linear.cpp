// pack_w8a16_weight, w8a16_linear, w8a16_gated_linear, w8a16_embedding: checks and launch. CPU only.
#if !defined(PE_EMULATED)
#include "../common/launch.h"
#include "../common/product_args.h"
#include "../common/value_checks.h"
#include "../layers/fused_activation.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// packed [ceil(out_features / 32), ceil(in_features / 64), 2048], factors [ceil(out_features / 32),
// w8a16_groups(in_features), 64]; `other` has the sizes. Columns may be fewer than the panels have.
void check_weight(const TensorArg& packed, const TensorArg& factors, int64_t in_features, const char* other) {
  packed.expect_dtype(ScalarType::Char);
  packed.expect_dense(0);
  packed.expect_size(1, "steps of 64 input features", w8a16_steps(in_features), other);
  packed.expect_size(2, "bytes in a step", kW8A16StepBytes, "the layout");
  factors.expect_dtype(ScalarType::Float);
  factors.expect_dense(0);
  factors.expect_same_device(packed);
  factors.expect_size(0, "panels", packed.size(0), packed.name());
  factors.expect_size(1, "groups of input features", w8a16_groups(in_features), other);
  factors.expect_size(2, "factors in a panel", kW8A16Factors, "the layout");
}

// weight [out_features, in_features]
void pack_w8a16_weight(Tensor packed, Tensor factors, const Tensor weight) {
  const char* op = "pack_w8a16_weight";
  const TensorArg packed_arg(op, "packed", packed, 3), factors_arg(op, "factors", factors, 3),
      weight_arg(op, "weight", weight, 2);
  weight_arg.expect_dtype(ScalarType::Float);
  weight_arg.expect_dense(1);
  weight_arg.expect_same_device(packed_arg);
  PackW8A16Params p{};
  p.out_features = weight_arg.size32(0, "out_features");
  p.in_features = weight_arg.size32(1, "in_features");
  check_weight(packed_arg, factors_arg, p.in_features, "weight");
  packed_arg.expect_size(0, "panels", ceil_div(p.out_features, kW8A16Panel), "weight");
  p.packed = packed_arg.data_as<int8_t>();
  p.factors = factors_arg.data_as<float>();
  p.weight = weight_arg.data_as<float>();
  p.weight_stride = weight_arg.stride(0);
  if (p.out_features > 0 && p.in_features > 0) cpu::launch(op, &cpu::KernelTable::pack_w8a16_weight, p);
}

// Everything but what `gated` says. out [num_tokens, out_features]; input [num_tokens, in_features]; packed_weight, factors as
// above, with `columns_per_output` times the columns; bias [columns_per_output * out_features].
W8A16LinearParams linear_params(const char* op, const Tensor& out, const Tensor& input, const Tensor& packed_weight,
                                const Tensor& factors, const OptionalTensor& bias, int columns_per_output) {
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2),
      weight_arg(op, "packed_weight", packed_weight, 3), factors_arg(op, "factors", factors, 3);
  W8A16LinearParams p{};
  set_types(&p, out_arg, input_arg);
  set_matrices(&p, out_arg, input_arg);
  weight_arg.expect_same_device(input_arg);
  check_weight(weight_arg, factors_arg, p.in_features, "input");
  weight_arg.expect_size(0, "panels", columns_per_output * ceil_div(p.out_features, kW8A16Panel), "out");
  set_bias(&p, bias, input_arg, int64_t{columns_per_output} * p.out_features,
           columns_per_output == 1 ? "out_features" : "features of gate and up");
  p.weight = weight_arg.data_as<int8_t>();
  p.factors = factors_arg.data_as<float>();
  return p;
}

void w8a16_linear(Tensor out, const Tensor input, const Tensor packed_weight, const Tensor factors, OptionalTensor bias) {
  const char* op = "w8a16_linear";
  const W8A16LinearParams p = linear_params(op, out, input, packed_weight, factors, bias, 1);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch(op, &cpu::KernelTable::w8a16_linear, p);
}

void w8a16_gated_linear(Tensor out, const Tensor input, const Tensor packed_weight, const Tensor factors,
                        std::string activation, OptionalTensor bias) {
  const char* op = "w8a16_gated_linear";
  W8A16LinearParams p = linear_params(op, out, input, packed_weight, factors, bias, 2);
  p.gated = true;
  p.activation = fused_activation(op, activation);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch(op, &cpu::KernelTable::w8a16_linear, p);
}

// out [num_tokens, in_features]; indices [num_tokens]; packed_weight, factors as above
void w8a16_embedding(Tensor out, const Tensor indices, const Tensor packed_weight, const Tensor factors) {
  const char* op = "w8a16_embedding";
  const TensorArg out_arg(op, "out", out, 2), indices_arg(op, "indices", indices, 1),
      weight_arg(op, "packed_weight", packed_weight, 3), factors_arg(op, "factors", factors, 3);
  W8A16EmbeddingParams p{};
  p.dtype = out_arg.float_dtype(kFloatTypes);
  indices_arg.expect_dtype(ScalarType::Long);
  indices_arg.expect_dense(0);
  indices_arg.expect_same_device(out_arg);
  weight_arg.expect_same_device(out_arg);
  p.num_tokens = indices_arg.size32(0, "num_tokens");
  p.in_features = out_arg.size32(1, "in_features");
  out_arg.expect_size(0, "num_tokens", p.num_tokens, "indices");
  out_arg.expect_dense(1);
  check_weight(weight_arg, factors_arg, p.in_features, "out");
  expect_values_in(indices_arg, 0, weight_arg.size(0) * kW8A16Panel);
  p.out = out_arg.data();
  p.indices = indices_arg.data_as<int64_t>();
  p.weight = weight_arg.data_as<int8_t>();
  p.factors = factors_arg.data_as<float>();
  p.out_stride = out_arg.stride(0);
  if (p.num_tokens > 0 && p.in_features > 0) cpu::launch(op, &cpu::KernelTable::w8a16_embedding, p);
}

STABLE_TORCH_LIBRARY_IMPL(pyengine, CPU, library) {
  library.impl("pack_w8a16_weight", TORCH_BOX(&pack_w8a16_weight));
  library.impl("w8a16_linear", TORCH_BOX(&w8a16_linear));
  library.impl("w8a16_gated_linear", TORCH_BOX(&w8a16_gated_linear));
  library.impl("w8a16_embedding", TORCH_BOX(&w8a16_embedding));
}

}  // namespace
}  // namespace pyengine

#endif
