// Op schemas and module initialisation, nothing else. Built twice: into _C, and with PE_EMULATED into _emulated.
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>

#if defined(PE_EMULATED)
#include "emulation/python_module.h"
#else
#include "common/input_batch_module.h"
#include "cpu/features.h"
#include "cpu/kernel_table.h"
#include "cpu/step_plan_module.h"
#include "cpu/thread_pool.h"
#endif

namespace {

void define_schemas(torch::stable::detail::StableLibrary& m) {
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
      "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()");
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor query_start_loc, Tensor seq_lens, int max_query_len, int max_seq_len, float scale, int sliding_window=0, "
      "float logit_softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
      "Tensor(b!)? lse=None, Tensor? plan=None, Tensor(c!)? workspace=None) -> ()");
  m.def("copy_blocks(Tensor(a!) pool, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()");
  m.def("rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()");
  m.def("rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, Tensor cos_sin_cache, bool is_neox=True) -> ()");
  m.def("silu_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_and_mul(Tensor(a!) out, Tensor input, bool tanh_approximation=True) -> ()");
  m.def(
      "rotary_reshape_and_cache(Tensor positions, Tensor(a!) query, Tensor key, Tensor value, Tensor cos_sin_cache, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, bool is_neox=True, Tensor(d!)? k_scale=None, "
      "Tensor(e!)? v_scale=None) -> ()");
  m.def(
      "merge_attention_states(Tensor(a!) out, Tensor part_out, Tensor part_lse, Tensor part_start, Tensor(b!)? lse=None) -> "
      "()");
  m.def(
      "apply_penalties(Tensor(a!) logits, Tensor prompt_mask, Tensor output_counts, Tensor repetition, Tensor presence, "
      "Tensor frequency) -> ()");
  m.def("apply_bitmask(Tensor(a!) logits, Tensor bitmask) -> ()");
  m.def(
      "sample_top_k_top_p(Tensor(a!) token_ids, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor seeds, Tensor positions) -> ()");
  m.def(
      "gptq_linear(Tensor(a!) out, Tensor input, Tensor qweight, Tensor scales, Tensor qzeros, int group_size, "
      "Tensor? bias=None) -> ()");
  m.def(
      "awq_linear(Tensor(a!) out, Tensor input, Tensor qweight, Tensor scales, Tensor qzeros, int group_size, "
      "Tensor? bias=None) -> ()");
  m.def("fp8_linear(Tensor(a!) out, Tensor input, Tensor weight, Tensor weight_scale, Tensor? bias=None) -> ()");
  m.def(
      "int8_linear(Tensor(a!) out, Tensor input, Tensor input_scale, Tensor weight, Tensor weight_scale, "
      "Tensor? bias=None) -> ()");
  m.def("quantize_int8_rows(Tensor(a!) out, Tensor(b!) scale, Tensor input) -> ()");
#if !defined(PE_EMULATED)
  m.def("pack_linear_weight(Tensor(a!) packed, Tensor weight) -> ()");
  m.def("linear(Tensor(a!) out, Tensor input, Tensor packed_weight, Tensor? bias=None) -> ()");
  m.def("gated_linear(Tensor(a!) out, Tensor input, Tensor packed_weight, str activation, Tensor? bias=None) -> ()");
  m.def("pack_quantized_weight(Tensor(a!) packed, Tensor weight, str format) -> ()");
  m.def("quantized_linear(Tensor(a!) out, Tensor input, Tensor packed_weight, str format, Tensor? bias=None) -> ()");
  m.def(
      "quantized_gated_linear(Tensor(a!) out, Tensor input, Tensor packed_weight, str format, str activation, "
      "Tensor? bias=None) -> ()");
  m.def("quantized_embedding(Tensor(a!) out, Tensor indices, Tensor packed_weight, str format) -> ()");
  m.def("pack_w8a16_weight(Tensor(a!) packed, Tensor(b!) factors, Tensor weight) -> ()");
  m.def("w8a16_linear(Tensor(a!) out, Tensor input, Tensor packed_weight, Tensor factors, Tensor? bias=None) -> ()");
  m.def(
      "w8a16_gated_linear(Tensor(a!) out, Tensor input, Tensor packed_weight, Tensor factors, str activation, "
      "Tensor? bias=None) -> ()");
  m.def("w8a16_embedding(Tensor(a!) out, Tensor indices, Tensor packed_weight, Tensor factors) -> ()");
  m.def("argmax(Tensor(a!) token_ids, Tensor(b!) maxima, Tensor logits) -> ()");
#endif
}

}  // namespace

#if defined(PE_EMULATED)

STABLE_TORCH_LIBRARY(pyengine_emulated, m) { define_schemas(m); }

PYBIND11_MODULE(_emulated, m) {
  m.doc() = "The CUDA kernels' sources, run on the CPU. Importing it registers the ops of namespace pyengine_emulated.";
  pyengine::emulation::define_emulation(m);
}

#else

STABLE_TORCH_LIBRARY(pyengine, m) { define_schemas(m); }

namespace {

namespace py = pybind11;
namespace cpu = pyengine::cpu;

py::dict cpu_features() {
  const cpu::Features& f = cpu::features();
  py::dict d;
  d["avx2"] = f.avx2;
  d["avx512"] = f.avx512;
  d["avx512_vnni"] = f.avx512_vnni;
  d["avx512_bf16"] = f.avx512_bf16;
  d["amx_int8"] = f.amx_int8;
  d["amx_bf16"] = f.amx_bf16;
  return d;
}

py::list isa_names(bool supported_only) {
  const cpu::IsaEntry* entries;
  const int n = cpu::isa_entries(&entries);
  py::list names;
  for (int i = 0; i < n; i++) {
    if (entries[i].supported || !supported_only) names.append(entries[i].name);
  }
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled core: importing it registers the ops of namespace pyengine.";
  m.def("cpu_features", &cpu_features, "What this machine's CPU and operating system offer, by name.");
  m.def("isas", [] { return isa_names(false); }, "Instruction sets that this build has kernels for, plainest first.");
  m.def("supported_isas", [] { return isa_names(true); }, "Those of isas() that this machine can run.");
  m.def("get_isa", &cpu::current_isa, "The instruction set whose kernels run.");
  m.def("set_isa", &cpu::set_isa, py::arg("name"), "Force an instruction set. ValueError if unknown or not supported here.");
  m.def("get_num_threads", &cpu::get_num_threads, "Threads of the CPU kernels' pool, the caller's included.");
  m.def("set_num_threads", &cpu::set_num_threads, py::arg("num_threads"), py::call_guard<py::gil_scoped_release>(),
        "Resize the pool; waits for the running op. ValueError below 1.");
  m.def("wait_for_late_workers", &cpu::wait_for_late_workers, py::call_guard<py::gil_scoped_release>(),
        "Wait until no thread of the pool reads memory of a replayed step any more.");
  m.def("num_taken_over", &cpu::num_taken_over, "Tiles of stalled threads that the caller has computed itself, ever.");
  cpu::define_step_plan(m);
  pyengine::define_input_batch(m);
#if defined(PE_CUDA)
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}

#endif
