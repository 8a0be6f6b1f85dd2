// copy_blocks, swap_blocks: checks and launch.
#include "../common/launch.h"
#include "../common/value_checks.h"
#include "launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

// block_mapping [num_pairs, 2], int64, dense
int32_t check_mapping(const TensorArg& block_mapping) {
  block_mapping.expect_dtype(ScalarType::Long);
  block_mapping.expect_dense(0);
  if (block_mapping.size(1) != 2)
    block_mapping.fail("must be [num_pairs, 2], it has " + std::to_string(block_mapping.size(1)) + " columns");
  return block_mapping.size32(0, "num_pairs");
}

// Whether two pools have bytes in common.
bool overlap(const TensorArg& a, const TensorArg& b, int64_t block_bytes) {
  const uintptr_t a_begin = reinterpret_cast<uintptr_t>(a.data()), b_begin = reinterpret_cast<uintptr_t>(b.data());
  return a_begin < b_begin + b.size(0) * block_bytes && b_begin < a_begin + a.size(0) * block_bytes;
}

// pool [num_blocks, ...]; block_mapping [num_pairs, 2] on the pool's device: source, destination
template <Target target>
void copy_blocks(Tensor pool, const Tensor block_mapping) {
  const char* op = "copy_blocks";
  const TensorArg pool_arg(op, "pool", pool), mapping_arg(op, "block_mapping", block_mapping, 2);
  pool_arg.expect_dense(0);
  mapping_arg.expect_same_device(pool_arg);
  CopyBlocksParams p{};
  p.num_pairs = check_mapping(mapping_arg);
  p.pool = pool_arg.data();
  p.block_bytes = pool_arg.bytes_per_row();
  p.block_mapping = mapping_arg.data_as<int64_t>();
  if constexpr (values_readable(target)) expect_block_mapping(mapping_arg, pool_arg.size(0), pool_arg.size(0), true);
  if (p.num_pairs > 0 && p.block_bytes > 0) PE_LAUNCH(copy_blocks, p, pool_arg);
}

// src, dst [num_blocks, ...], either may be in host memory; block_mapping [num_pairs, 2] in host memory: source, destination
template <Target target>
void swap_blocks(const Tensor src, Tensor dst, const Tensor block_mapping) {
  const char* op = "swap_blocks";
  const TensorArg src_arg(op, "src", src), dst_arg(op, "dst", dst), mapping_arg(op, "block_mapping", block_mapping, 2);
  src_arg.expect_dense(0);
  dst_arg.expect_dense(0);
  mapping_arg.expect_on_cpu();
  SwapBlocksParams p{};
  p.num_pairs = check_mapping(mapping_arg);
  p.block_bytes = src_arg.bytes_per_row();
  if (dst_arg.bytes_per_row() != p.block_bytes) {
    src_arg.fail("has blocks of " + std::to_string(p.block_bytes) + " bytes, dst of " +
                 std::to_string(dst_arg.bytes_per_row()));
  }
  p.src = src_arg.data();
  p.dst = dst_arg.data();
  p.block_mapping = mapping_arg.data_as<int64_t>();
  const bool same_pool = p.src == p.dst;
  if (!same_pool && overlap(src_arg, dst_arg, p.block_bytes)) dst_arg.fail("overlaps src, but starts at another address");
  expect_block_mapping(mapping_arg, src_arg.size(0), dst_arg.size(0), same_pool);
  const TensorArg& device_arg = src_arg.on_cpu() ? dst_arg : src_arg;
  if (p.num_pairs > 0 && p.block_bytes > 0) PE_LAUNCH(swap_blocks, p, device_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks<target>));
  library.impl("swap_blocks", TORCH_BOX(&swap_blocks<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
