// paged_attention: checks and launch.
#include "../cache/kv_cache_args.h"
#include "../common/value_checks.h"
#include "launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kOp = "paged_attention";

// out, query [num_tokens, num_heads, head_dim]
void check_query(const TensorArg& out, const TensorArg& query, PagedAttentionParams* p) {
  p->dtype = query.float_dtype(kFloatTypes);
  expect_same_dtype(out, out.float_dtype(kFloatTypes), query, p->dtype);
  out.expect_same_device(query);
  p->num_tokens = query.size32(0, "num_tokens");
  p->num_heads = query.size32(1, "num_heads");
  p->head_dim = query.size32(2, "head_dim");
  out.expect_size(0, "num_tokens", p->num_tokens, "query");
  out.expect_size(1, "num_heads", p->num_heads, "query");
  out.expect_size(2, "head_dim", p->head_dim, "query");
  out.expect_dense(1);
  query.expect_dense(1);
  p->out = out.data();
  p->query = query.data();
  p->out_token_stride = out.stride(0);
  p->query_token_stride = query.stride(0);
}

// k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim] against the query
void check_cache(Target target, const TensorArg& query, const TensorArg& k_cache, const TensorArg& v_cache,
                 PagedAttentionParams* p) {
  p->kv_dtype = check_kv_cache(target, k_cache, v_cache, &p->block_shift);
  k_cache.expect_same_device(query);
  k_cache.expect_size(3, "head_dim", p->head_dim, "query");
  p->num_kv_heads = k_cache.size32(1, "num_kv_heads");
  p->block_size = k_cache.size32(2, "block_size");
  if (p->num_kv_heads == 0 || p->num_heads % p->num_kv_heads != 0) {
    k_cache.fail("has num_kv_heads " + std::to_string(p->num_kv_heads) + ", which does not divide query's num_heads " +
                 std::to_string(p->num_heads));
  }
  p->k_cache = k_cache.data();
  p->v_cache = v_cache.data();
  p->k_block_stride = k_cache.stride(0);
  p->k_head_stride = k_cache.stride(1);
  p->k_token_stride = k_cache.stride(2);
  p->k_dim_stride = k_cache.stride(3);
  p->v_block_stride = v_cache.stride(0);
  p->v_head_stride = v_cache.stride(1);
  p->v_token_stride = v_cache.stride(2);
  p->v_dim_stride = v_cache.stride(3);
}

void set_scales(const KVScales& scales, PagedAttentionParams* p) {
  p->k_scale = scales.k;
  p->v_scale = scales.v;
  p->k_scale_block_stride = scales.k_block_stride;
  p->k_scale_head_stride = scales.k_head_stride;
  p->v_scale_block_stride = scales.v_block_stride;
  p->v_scale_head_stride = scales.v_head_stride;
  p->scale_per_token = p->kv_dtype == DType::kInt8;
}

// block_table [num_seqs, max_blocks]; query_start_loc [num_seqs + 1]; seq_lens [num_seqs]
void check_batch(const TensorArg& query, const TensorArg& block_table, const TensorArg& query_start_loc,
                 const TensorArg& seq_lens, PagedAttentionParams* p) {
  for (const TensorArg* arg : {&block_table, &query_start_loc, &seq_lens}) {
    arg->expect_dtype(ScalarType::Int);
    arg->expect_same_device(query);
  }
  p->num_seqs = seq_lens.size32(0, "num_seqs");
  block_table.expect_size(0, "num_seqs", p->num_seqs, "seq_lens");
  if (query_start_loc.size(0) != seq_lens.size(0) + 1) {
    query_start_loc.fail("has " + std::to_string(query_start_loc.size(0)) + " elements, seq_lens with num_seqs " +
                         std::to_string(p->num_seqs) + " needs " + std::to_string(seq_lens.size(0) + 1));
  }
  block_table.expect_dense(1);
  query_start_loc.expect_dense(0);
  seq_lens.expect_dense(0);
  p->block_table = block_table.data_as<int32_t>();
  p->block_table_stride = block_table.stride(0);
  p->query_start_loc = query_start_loc.data_as<int32_t>();
  p->seq_lens = seq_lens.data_as<int32_t>();
}

// fp32 [num_heads], or null
const float* check_per_head(const char* name, const OptionalTensor& tensor, const TensorArg& query) {
  if (!tensor) return nullptr;
  const TensorArg arg(kOp, name, *tensor, 1);
  arg.expect_dtype(ScalarType::Float);
  arg.expect_same_device(query);
  arg.expect_size(0, "num_heads", query.size(1), "query");
  arg.expect_dense(0);
  return arg.data_as<float>();
}

// fp32 [num_tokens, num_heads], or null
float* check_lse(const OptionalTensor& lse, const TensorArg& query) {
  if (!lse) return nullptr;
  const TensorArg arg(kOp, "lse", *lse, 2);
  arg.expect_dtype(ScalarType::Float);
  arg.expect_same_device(query);
  arg.expect_size(0, "num_tokens", query.size(0), "query");
  arg.expect_size(1, "num_heads", query.size(1), "query");
  arg.expect_dense(0);
  return arg.data_as<float>();
}

// plan int32 [num_work, 4], workspace fp32 [size]: together or not at all, and not on the CPU
void check_plan(Target target, const OptionalTensor& plan, const OptionalTensor& workspace, const TensorArg& query,
                const TensorArg& query_start_loc, const TensorArg& seq_lens, PagedAttentionParams* p) {
  if (plan.has_value() != workspace.has_value()) fail_op(kOp, "plan and workspace must be given together");
  if (!plan) return;
  if (target == Target::kCpu) fail_op(kOp, "plan is for GPUs, on the CPU it must be None");
  const TensorArg plan_arg(kOp, "plan", *plan, 2), workspace_arg(kOp, "workspace", *workspace, 1);
  plan_arg.expect_dtype(ScalarType::Int);
  plan_arg.expect_same_device(query);
  plan_arg.expect_dense(0);
  if (plan_arg.size(1) != 4) plan_arg.fail("must be [num_work, 4], it has " + std::to_string(plan_arg.size(1)) + " columns");
  workspace_arg.expect_dtype(ScalarType::Float);
  workspace_arg.expect_same_device(query);
  workspace_arg.expect_dense(0);
  static_assert(sizeof(AttentionWork) == 4 * sizeof(int32_t), "a row of the plan is one AttentionWork");
  p->work = plan_arg.data_as<AttentionWork>();
  p->num_work = plan_arg.size32(0, "num_work");
  p->workspace = workspace_arg.data_as<float>();
  p->workspace_size = workspace_arg.size(0);
  if (!values_readable(target)) return;
  const int64_t slot_floats = (int64_t{p->num_heads} * (p->head_dim + 1) + 3) / 4 * 4;  // cuda/query_rows.cuh
  expect_valid_plan(plan_arg, query_start_loc, seq_lens, p->workspace_size / slot_floats);
}

void set_options(int64_t max_query_len, int64_t max_seq_len, double scale, int64_t sliding_window, double logit_softcap,
                 PagedAttentionParams* p) {
  if (max_query_len < 0 || max_query_len > INT32_MAX) fail_op(kOp, "max_query_len is " + std::to_string(max_query_len));
  if (max_seq_len < 0 || max_seq_len > INT32_MAX) fail_op(kOp, "max_seq_len is " + std::to_string(max_seq_len));
  if (!(logit_softcap >= 0)) fail_op(kOp, "logit_softcap is " + std::to_string(logit_softcap) + ", it must not be negative");
  p->max_query_len = static_cast<int32_t>(max_query_len);
  p->max_seq_len = static_cast<int32_t>(max_seq_len);
  p->scale = static_cast<float>(scale);
  p->sliding_window = sliding_window > INT32_MAX ? 0 : static_cast<int32_t>(sliding_window < 0 ? 0 : sliding_window);
  p->logit_softcap = static_cast<float>(logit_softcap);
}

// Shapes: params.h.
template <Target target>
void paged_attention(Tensor out, const Tensor query, const Tensor k_cache, const Tensor v_cache, const Tensor block_table,
                     const Tensor query_start_loc, const Tensor seq_lens, int64_t max_query_len, int64_t max_seq_len,
                     double scale, int64_t sliding_window, double logit_softcap, OptionalTensor alibi_slopes,
                     OptionalTensor sinks, OptionalTensor k_scale, OptionalTensor v_scale, OptionalTensor lse,
                     OptionalTensor plan, OptionalTensor workspace) {
  const TensorArg out_arg(kOp, "out", out, 3), query_arg(kOp, "query", query, 3), k_arg(kOp, "k_cache", k_cache, 4),
      v_arg(kOp, "v_cache", v_cache, 4), table_arg(kOp, "block_table", block_table, 2),
      start_arg(kOp, "query_start_loc", query_start_loc, 1), lens_arg(kOp, "seq_lens", seq_lens, 1);
  PagedAttentionParams p{};
  check_query(out_arg, query_arg, &p);
  check_cache(target, query_arg, k_arg, v_arg, &p);
  set_scales(check_kv_scales(kOp, k_scale, v_scale, k_arg, p.kv_dtype), &p);
  check_batch(query_arg, table_arg, start_arg, lens_arg, &p);
  set_options(max_query_len, max_seq_len, scale, sliding_window, logit_softcap, &p);
  p.alibi_slopes = check_per_head("alibi_slopes", alibi_slopes, query_arg);
  p.sinks = check_per_head("sinks", sinks, query_arg);
  p.lse = check_lse(lse, query_arg);
  if constexpr (values_readable(target)) {
    expect_valid_batch(start_arg, lens_arg, table_arg,
                       {p.num_tokens, k_arg.size(0), p.block_size, p.max_query_len, p.max_seq_len});
  }
  check_plan(target, plan, workspace, query_arg, start_arg, lens_arg, &p);
  if (p.num_tokens > 0) PE_LAUNCH(paged_attention, p, query_arg);
}

template <Target target>
void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention<target>));
}
PE_REGISTER_OPS(register_ops)

}  // namespace
}  // namespace pyengine
