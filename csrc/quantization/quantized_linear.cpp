// pack_quantized_weight, quantized_linear, quantized_gated_linear, quantized_embedding: checks and launch. CPU only.
#if !defined(PE_EMULATED)
#include "../common/launch.h"
#include "../common/product_args.h"
#include "../common/value_checks.h"
#include "../layers/fused_activation.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

QuantFormat find_format(const char* op, const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumQuantFormats; i++) {
    if (name == kQuantFormats[i].name) return static_cast<QuantFormat>(i);
    known += std::string(known.empty() ? "" : ", ") + kQuantFormats[i].name;
  }
  fail_op(op, "format is '" + name + "', it must be one of " + known);
}

const QuantFormatInfo& info(QuantFormat format) { return kQuantFormats[static_cast<int>(format)]; }

// in_features, from a packed weight [panels, in_features / block_size, tile_bytes].
int32_t packed_in_features(const TensorArg& packed, QuantFormat format) {
  packed.expect_dtype(ScalarType::Byte);
  packed.expect_dense(0);
  packed.expect_size(2, "tile_bytes", info(format).tile_bytes, info(format).name);
  const int64_t in_features = packed.size(1) * info(format).block_size;
  if (in_features > INT32_MAX)
    packed.fail("has in_features " + std::to_string(in_features) + ", kernels take at most 2147483647");
  return static_cast<int32_t>(in_features);
}

void expect_panels(const TensorArg& packed, int64_t out_features, const char* other, int columns_per_output = 1) {
  const int64_t panels = columns_per_output * ((out_features + kQuantPanel - 1) / kQuantPanel);
  if (packed.size(0) != panels) {
    packed.fail("has " + std::to_string(packed.size(0)) + " panels, " + other + " with " + std::to_string(out_features) +
                " output features needs " + std::to_string(panels));
  }
}

// packed [ceil(out_features / 16), blocks, tile_bytes]; weight [out_features, blocks * block_bytes], both bytes
void pack_quantized_weight(Tensor packed, const Tensor weight, std::string format) {
  const char* op = "pack_quantized_weight";
  const TensorArg packed_arg(op, "packed", packed, 3), weight_arg(op, "weight", weight, 2);
  PackQuantizedParams p{};
  p.format = find_format(op, format);
  p.in_features = packed_in_features(packed_arg, p.format);
  weight_arg.expect_dtype(ScalarType::Byte);
  weight_arg.expect_same_device(packed_arg);
  weight_arg.expect_dense(1);
  weight_arg.expect_size(1, "row bytes", packed_arg.size(1) * info(p.format).block_bytes, "packed");
  p.out_features = weight_arg.size32(0, "out_features");
  expect_panels(packed_arg, p.out_features, "weight");
  p.packed = packed_arg.data();
  p.weight = weight_arg.data();
  p.weight_stride = weight_arg.stride(0);
  if (p.out_features > 0 && p.in_features > 0) cpu::launch(op, &cpu::KernelTable::pack_quantized_weight, p);
}

// Everything but what `gated` says. out [num_tokens, out_features]; input [num_tokens, in_features]; packed_weight as above,
// with `columns_per_output` times the columns; bias [columns_per_output * out_features].
QuantizedLinearParams linear_params(const char* op, const Tensor& out, const Tensor& input, const Tensor& packed_weight,
                                    const std::string& format, const OptionalTensor& bias, int columns_per_output) {
  const TensorArg out_arg(op, "out", out, 2), input_arg(op, "input", input, 2),
      weight_arg(op, "packed_weight", packed_weight, 3);
  QuantizedLinearParams p{};
  p.format = find_format(op, format);
  set_types(&p, out_arg, input_arg);
  set_matrices(&p, out_arg, input_arg);
  weight_arg.expect_same_device(input_arg);
  input_arg.expect_size(1, "in_features", packed_in_features(weight_arg, p.format), "packed_weight");
  expect_panels(weight_arg, p.out_features, "out", columns_per_output);
  set_bias(&p, bias, input_arg, int64_t{columns_per_output} * p.out_features,
           columns_per_output == 1 ? "out_features" : "features of gate and up");
  p.weight = weight_arg.data();
  return p;
}

void quantized_linear(Tensor out, const Tensor input, const Tensor packed_weight, std::string format, OptionalTensor bias) {
  const char* op = "quantized_linear";
  const QuantizedLinearParams p = linear_params(op, out, input, packed_weight, format, bias, 1);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch(op, &cpu::KernelTable::quantized_linear, p);
}

void quantized_gated_linear(Tensor out, const Tensor input, const Tensor packed_weight, std::string format,
                            std::string activation, OptionalTensor bias) {
  const char* op = "quantized_gated_linear";
  QuantizedLinearParams p = linear_params(op, out, input, packed_weight, format, bias, 2);
  p.gated = true;
  p.activation = fused_activation(op, activation);
  if (p.num_tokens > 0 && p.out_features > 0) cpu::launch(op, &cpu::KernelTable::quantized_linear, p);
}

// out [num_tokens, in_features]; indices [num_tokens]; packed_weight as above
void quantized_embedding(Tensor out, const Tensor indices, const Tensor packed_weight, std::string format) {
  const char* op = "quantized_embedding";
  const TensorArg out_arg(op, "out", out, 2), indices_arg(op, "indices", indices, 1),
      weight_arg(op, "packed_weight", packed_weight, 3);
  QuantizedEmbeddingParams p{};
  p.format = find_format(op, format);
  p.dtype = out_arg.float_dtype(kFloatTypes);
  indices_arg.expect_dtype(ScalarType::Long);
  indices_arg.expect_dense(0);
  indices_arg.expect_same_device(out_arg);
  weight_arg.expect_same_device(out_arg);
  p.in_features = packed_in_features(weight_arg, p.format);
  p.num_tokens = indices_arg.size32(0, "num_tokens");
  out_arg.expect_size(0, "num_tokens", p.num_tokens, "indices");
  out_arg.expect_size(1, "in_features", p.in_features, "packed_weight");
  out_arg.expect_dense(1);
  expect_values_in(indices_arg, 0, weight_arg.size(0) * kQuantPanel);
  p.out = out_arg.data();
  p.indices = indices_arg.data_as<int64_t>();
  p.weight = weight_arg.data();
  p.out_stride = out_arg.stride(0);
  if (p.num_tokens > 0 && p.in_features > 0) cpu::launch(op, &cpu::KernelTable::quantized_embedding, p);
}

STABLE_TORCH_LIBRARY_IMPL(pyengine, CPU, library) {
  library.impl("pack_quantized_weight", TORCH_BOX(&pack_quantized_weight));
  library.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  library.impl("quantized_gated_linear", TORCH_BOX(&quantized_gated_linear));
  library.impl("quantized_embedding", TORCH_BOX(&quantized_embedding));
}

}  // namespace
}  // namespace pyengine

#endif
