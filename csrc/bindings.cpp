// Op schemas and module initialisation, nothing else. Built twice: into _C, and with PE_EMULATED into _emulated.
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>

#if defined(PE_EMULATED)
#include <stdexcept>
#include <string>

#include "emulation/emulation.h"
#include "emulation/streams.h"
#else
#include "cpu/features.h"
#include "cpu/kernel_table.h"
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
#if !defined(PE_EMULATED)
  m.def("pack_linear_weight(Tensor(a!) packed, Tensor weight) -> ()");
  m.def("linear(Tensor(a!) out, Tensor input, Tensor packed_weight, Tensor? bias=None) -> ()");
#endif
}

}  // namespace

#if defined(PE_EMULATED)

#include "emulation/python_module.h"

STABLE_TORCH_LIBRARY(pyengine_emulated, m) { define_schemas(m); }

namespace {

namespace py = pybind11;
namespace emulation = pyengine::emulation;

emulation::Order order(const std::string& name) {
  if (name == "forward") return emulation::Order::kForward;
  if (name == "reverse") return emulation::Order::kReverse;
  if (name == "random") return emulation::Order::kRandom;
  throw std::invalid_argument("order must be forward, reverse or random, not '" + name + "'");
}

void set_schedule(const std::string& thread_order, const std::string& block_order, uint64_t seed) {
  emulation::Options& options = emulation::options();
  options.thread_order = order(thread_order);
  options.block_order = order(block_order);
  options.seed = seed;
}

}  // namespace

PYBIND11_MODULE(_emulated, m) {
  using namespace pybind11::literals;
  m.doc() = "The CUDA kernels' sources, run on the CPU. Importing it registers the ops of namespace pyengine_emulated.";
  // Streams and events are ids; stream 0 is the compute stream. See csrc/emulation/streams.h.
  m.def("emulated_stream_create", &emulation::stream_create, "A new stream, on which copies run late.");
  m.def("emulated_set_stream", &emulation::set_current_stream, "stream"_a, "Make ops run on `stream`; returns the one before.");
  m.def("emulated_event_record", &emulation::event_record, "stream"_a, "An event after all that is queued on `stream`.");
  m.def("emulated_event_release", &emulation::event_release, "event"_a, "Forget an event.");
  m.def("emulated_event_query", &emulation::event_query, "event"_a, "Whether the event has happened.");
  m.def("emulated_event_synchronize", &emulation::event_synchronize, "event"_a, "Run what the event waits for.");
  m.def("emulated_stream_wait_event", &emulation::stream_wait_event, "stream"_a, "event"_a, "Queue a wait for the event.");
  m.def("emulated_stream_synchronize", &emulation::stream_synchronize, "stream"_a, "Run all that is queued on `stream`.");
  m.def("emulated_seed_streams", &emulation::seed_streams, "seed"_a, "Restart the random order of late copies.");
  m.def("emulated_set_schedule", &set_schedule, "thread_order"_a, "block_order"_a = "forward", "seed"_a = 1,
        "The order in which runnable threads, and blocks, run: forward, reverse or random.");
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
#if defined(PE_CUDA)
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}

#endif
