// merge_attention_states: checks and launch.
#include "../common/launch.h"
#include "launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

// out [num_rows, num_heads, head_dim]; part_out fp32 [num_parts, num_heads, head_dim]; part_lse fp32 [num_parts, num_heads];
// part_start int32 [num_rows + 1]; lse fp32 [num_rows, num_heads]
template <Target target>
void merge_attention_states(Tensor out, const Tensor part_out, const Tensor part_lse, const Tensor part_start,
                            OptionalTensor lse) {
  const char* op = "merge_attention_states";
  const TensorArg out_arg(op, "out", out, 3), part_out_arg(op, "part_out", part_out, 3),
      part_lse_arg(op, "part_lse", part_lse, 2), start_arg(op, "part_start", part_start, 1);
  MergeAttentionParams p{};
  p.dtype = out_arg.float_dtype(kFloatTypes);
  p.num_rows = out_arg.size32(0, "num_rows");
  p.num_heads = out_arg.size32(1, "num_heads");
  p.head_dim = out_arg.size32(2, "head_dim");
  out_arg.expect_dense(1);
  for (const TensorArg* arg : {&part_out_arg, &part_lse_arg}) {
    arg->expect_dtype(ScalarType::Float);
    arg->expect_same_device(out_arg);
    arg->expect_size(1, "num_heads", p.num_heads, "out");
    arg->expect_dense(0);
  }
  part_out_arg.expect_size(2, "head_dim", p.head_dim, "out");
  part_lse_arg.expect_size(0, "num_parts", part_out_arg.size(0), "part_out");
  start_arg.expect_dtype(ScalarType::Int);
  start_arg.expect_same_device(out_arg);
  start_arg.expect_dense(0);
  if (start_arg.size(0) != out_arg.size(0) + 1) {
    start_arg.fail("has " + std::to_string(start_arg.size(0)) + " elements, out with num_rows " + std::to_string(p.num_rows) +
                   " needs " + std::to_string(out_arg.size(0) + 1));
  }
  p.out = out_arg.data();
  p.out_row_stride = out_arg.stride(0);
  p.part_out = part_out_arg.data_as<float>();
  p.part_lse = part_lse_arg.data_as<float>();
  p.part_start = start_arg.data_as<int32_t>();
  if constexpr (values_readable(target)) {
    for (int64_t i = 0; i <= p.num_rows; i++) {
      const int64_t begin = i == 0 ? 0 : p.part_start[i - 1];
      if (p.part_start[i] < begin || p.part_start[i] > part_out_arg.size(0))
        start_arg.fail("must grow from 0 or more to at most num_parts " + std::to_string(part_out_arg.size(0)) + ", element " +
                       std::to_string(i) + " is " + std::to_string(p.part_start[i]));
    }
  }
  if (lse) {
    const TensorArg lse_arg(op, "lse", *lse, 2);
    lse_arg.expect_dtype(ScalarType::Float);
    lse_arg.expect_same_device(out_arg);
    lse_arg.expect_size(0, "num_rows", p.num_rows, "out");
    lse_arg.expect_size(1, "num_heads", p.num_heads, "out");
    lse_arg.expect_dense(0);
    p.lse = lse_arg.data_as<float>();
  }
  if (p.num_rows > 0 && p.num_heads > 0) PE_LAUNCH(merge_attention_states, p, out_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("merge_attention_states", TORCH_BOX(&merge_attention_states<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
