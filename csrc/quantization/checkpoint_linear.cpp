// gptq_linear, awq_linear, fp8_linear, int8_linear, quantize_int8_rows: checks and launch.
#include "../common/launch.h"
#include "../common/product_args.h"
#include "launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

// scales [groups, out_features]; zeros [groups, out_features / 8]
void set_groups(CheckpointLinearParams* p, const TensorArg& scales, const TensorArg& zeros, int64_t group_size) {
  if (p->out_features % 8 != 0) scales.fail("is for " + std::to_string(p->out_features) + " columns, words hold 8");
  if (group_size < 32 || group_size % 32 != 0 || p->in_features % group_size != 0) {
    scales.fail("has group_size " + std::to_string(group_size) + ", it must be a multiple of 32 that divides in_features " +
                std::to_string(p->in_features));
  }
  p->group_size = static_cast<int32_t>(group_size);
  const int64_t groups = p->in_features / group_size;
  scales.expect_size(0, "groups", groups, "in_features / group_size");
  scales.expect_size(1, "out_features", p->out_features, "out");
  scales.expect_dense(0);
  zeros.expect_dtype(ScalarType::Int);
  zeros.expect_same_device(scales);
  zeros.expect_size(0, "groups", groups, "scales");
  zeros.expect_size(1, "words", p->out_features / 8, "out, in words of 8,");
  zeros.expect_dense(0);
  p->scales = scales.data();
  p->zeros = zeros.data_as<int32_t>();
}

// scales fp32 [out_features] or [1]
void set_row_scales(CheckpointLinearParams* p, const TensorArg& scales, const TensorArg& out) {
  scales.expect_dtype(ScalarType::Float);
  scales.expect_same_device(out);
  scales.expect_dense(0);
  p->one_scale = scales.size(0) == 1;
  if (!p->one_scale) scales.expect_size(0, "out_features", p->out_features, "out");
  p->scales = scales.data();
}

struct FourBitNames {
  const char* op;
  int k_per_word, n_per_word;
};

template <Target target, class Launch>
void four_bit_linear(const FourBitNames& names, const Tensor& out, const Tensor& input, const Tensor& qweight,
                     const Tensor& scales, const Tensor& qzeros, int64_t group_size, const OptionalTensor& bias,
                     const Launch& launch) {
  const TensorArg out_arg(names.op, "out", out, 2), input_arg(names.op, "input", input, 2),
      weight_arg(names.op, "qweight", qweight, 2), scales_arg(names.op, "scales", scales, 2),
      zeros_arg(names.op, "qzeros", qzeros, 2);
  CheckpointLinearParams p{};
  p.dtype = out_arg.float_dtype(kFloatTypes);
  set_matrices(&p, out_arg, input_arg);
  expect_same_dtype(input_arg, input_arg.float_dtype(kFloatTypes), out_arg, p.dtype);
  expect_same_dtype(scales_arg, scales_arg.float_dtype(kFloatTypes), out_arg, p.dtype);
  scales_arg.expect_same_device(out_arg);
  set_groups(&p, scales_arg, zeros_arg, group_size);
  weight_arg.expect_dtype(ScalarType::Int);
  weight_arg.expect_same_device(out_arg);
  weight_arg.expect_size(0, "rows", p.in_features / names.k_per_word, "input's in_features, in words,");
  weight_arg.expect_size(1, "columns", p.out_features / names.n_per_word, "out's out_features, in words,");
  weight_arg.expect_dense(0);
  p.weight = weight_arg.data();
  set_bias(&p, bias, out_arg, p.out_features);
  if (p.num_tokens > 0 && p.out_features > 0) launch(p, out_arg);
}

// qweight int32 [in_features / 8, out_features]; scales [groups, out_features]; qzeros int32 [groups, out_features / 8]
template <Target target>
void gptq_linear(Tensor out, const Tensor input, const Tensor qweight, const Tensor scales, const Tensor qzeros,
                 int64_t group_size, OptionalTensor bias) {
  four_bit_linear<target>({"gptq_linear", 8, 1}, out, input, qweight, scales, qzeros, group_size, bias,
                          [](const CheckpointLinearParams& p, const TensorArg& arg) { PE_LAUNCH(gptq_linear, p, arg); });
}

// qweight int32 [in_features, out_features / 8]; the others as above
template <Target target>
void awq_linear(Tensor out, const Tensor input, const Tensor qweight, const Tensor scales, const Tensor qzeros,
                int64_t group_size, OptionalTensor bias) {
  four_bit_linear<target>({"awq_linear", 1, 8}, out, input, qweight, scales, qzeros, group_size, bias,
                          [](const CheckpointLinearParams& p, const TensorArg& arg) { PE_LAUNCH(awq_linear, p, arg); });
}

void set_rows_weight(CheckpointLinearParams* p, const TensorArg& weight, const TensorArg& out, ScalarType type) {
  weight.expect_dtype(type);
  weight.expect_same_device(out);
  weight.expect_size(0, "out_features", p->out_features, "out");
  weight.expect_size(1, "in_features", p->in_features, "input");
  weight.expect_dense(0);
  p->weight = weight.data();
}

// weight e4m3 [out_features, in_features]; weight_scale fp32 [out_features] or [1]
template <Target target>
void fp8_linear(Tensor out, const Tensor input, const Tensor weight, const Tensor weight_scale, OptionalTensor bias) {
  const char* op = "fp8_linear";
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2), weight_arg(op, "weight", weight, 2);
  CheckpointLinearParams p{};
  p.dtype = out_arg.float_dtype(kFloatTypes);
  set_matrices(&p, out_arg, input_arg);
  expect_same_dtype(input_arg, input_arg.float_dtype(kFloatTypes), out_arg, p.dtype);
  set_rows_weight(&p, weight_arg, out_arg, ScalarType::Float8_e4m3fn);
  set_row_scales(&p, TensorArg(op, "weight_scale", weight_scale, 1), out_arg);
  set_bias(&p, bias, out_arg, p.out_features);
  if (p.num_tokens > 0 && p.out_features > 0) PE_LAUNCH(fp8_linear, p, out_arg);
}

// input int8 [num_tokens, in_features]; input_scale fp32 [num_tokens]; weight int8 [out_features, in_features]
template <Target target>
void int8_linear(Tensor out, const Tensor input, const Tensor input_scale, const Tensor weight, const Tensor weight_scale,
                 OptionalTensor bias) {
  const char* op = "int8_linear";
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2), weight_arg(op, "weight", weight, 2),
      input_scale_arg(op, "input_scale", input_scale, 1);
  CheckpointLinearParams p{};
  p.dtype = out_arg.float_dtype(kFloatTypes);
  set_matrices(&p, out_arg, input_arg);
  input_arg.expect_dtype(ScalarType::Char);
  // Sums of products of up to 128 * 128 are 32-bit.
  if (p.in_features >= 1 << 17) input_arg.fail("has in_features " + std::to_string(p.in_features) + ", sums hold 131071");
  set_rows_weight(&p, weight_arg, out_arg, ScalarType::Char);
  set_row_scales(&p, TensorArg(op, "weight_scale", weight_scale, 1), out_arg);
  input_scale_arg.expect_dtype(ScalarType::Float);
  input_scale_arg.expect_same_device(out_arg);
  input_scale_arg.expect_dense(0);
  input_scale_arg.expect_size(0, "num_tokens", p.num_tokens, "input");
  p.input_scale = input_scale_arg.data_as<float>();
  set_bias(&p, bias, out_arg, p.out_features);
  if (p.num_tokens > 0 && p.out_features > 0) PE_LAUNCH(int8_linear, p, out_arg);
}

// out int8 [num_tokens, in_features]; scale fp32 [num_tokens]; input [num_tokens, in_features]
template <Target target>
void quantize_int8_rows(Tensor out, Tensor scale, const Tensor input) {
  const char* op = "quantize_int8_rows";
  const TensorArg out_arg(op, "out", out, 2), scale_arg(op, "scale", scale, 1), input_arg(op, "input", input, 2);
  QuantizeRowsParams p{};
  p.dtype = input_arg.float_dtype(kFloatTypes);
  input_arg.expect_dense(1);
  p.num_tokens = input_arg.size32(0, "num_tokens");
  p.in_features = input_arg.size32(1, "in_features");
  out_arg.expect_dtype(ScalarType::Char);
  out_arg.expect_same_device(input_arg);
  out_arg.expect_dense(0);
  out_arg.expect_size(0, "num_tokens", p.num_tokens, "input");
  out_arg.expect_size(1, "in_features", p.in_features, "input");
  scale_arg.expect_dtype(ScalarType::Float);
  scale_arg.expect_same_device(input_arg);
  scale_arg.expect_dense(0);
  scale_arg.expect_size(0, "num_tokens", p.num_tokens, "input");
  p.out = out_arg.data_as<int8_t>();
  p.scale = scale_arg.data_as<float>();
  p.input = input_arg.data();
  p.input_stride = input_arg.stride(0);
  if (p.num_tokens > 0) PE_LAUNCH(quantize_int8_rows, p, out_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("gptq_linear", TORCH_BOX(&gptq_linear<target>));
  library.impl("awq_linear", TORCH_BOX(&awq_linear<target>));
  library.impl("fp8_linear", TORCH_BOX(&fp8_linear<target>));
  library.impl("int8_linear", TORCH_BOX(&int8_linear<target>));
  library.impl("quantize_int8_rows", TORCH_BOX(&quantize_int8_rows<target>));
}

PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
