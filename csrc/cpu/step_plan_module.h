// What the extension module `_C` offers for recording and replaying steps. pyengine/worker/step_replay.py is its only caller.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "step_plan.h"

namespace pyengine::cpu {

// Addresses are those of int64 (ids, positions, slot_mapping, indices) and int32 arrays, 0 for none.
inline StepInputs step_inputs(int32_t num_tokens, int32_t num_seqs, int32_t max_query_len, int32_t max_seq_len,
                              uintptr_t input_ids, uintptr_t positions, uintptr_t slot_mapping, uintptr_t query_start_loc,
                              uintptr_t seq_lens, uintptr_t block_table, int64_t block_table_stride,
                              const StepInputs* logits_rows, uintptr_t indices) {
  return {num_tokens,
          num_seqs,
          max_query_len,
          max_seq_len,
          reinterpret_cast<const int64_t*>(input_ids),
          reinterpret_cast<const int64_t*>(positions),
          reinterpret_cast<const int64_t*>(slot_mapping),
          reinterpret_cast<const int32_t*>(query_start_loc),
          reinterpret_cast<const int32_t*>(seq_lens),
          reinterpret_cast<const int32_t*>(block_table),
          block_table_stride,
          logits_rows,
          reinterpret_cast<const int64_t*>(indices)};
}

// Runs a step, then the logits of its logits rows. `token_ids` and `maxima` are the addresses of what the second plan finds of
// each row: its most likely token (int64) and that one's logit (fp32). Returns both.
inline std::pair<std::vector<int64_t>, std::vector<float>> run_step(const StepPlan& forward, const StepPlan& logits,
                                                                    const StepInputs& inputs, uintptr_t token_ids,
                                                                    uintptr_t maxima) {
  const int64_t* best = reinterpret_cast<const int64_t*>(token_ids);
  const float* best_logits = reinterpret_cast<const float*>(maxima);
  StepInputs rows{};
  rows.num_tokens = inputs.rows().num_tokens;
  {
    const pybind11::gil_scoped_release release;
    forward.run(inputs);
    if (rows.num_tokens > 0) logits.run(rows);
  }
  return {{best, best + rows.num_tokens}, {best_logits, best_logits + rows.num_tokens}};
}

inline std::vector<std::pair<std::string, double>> timed_run(const StepPlan& plan, const StepInputs& inputs) {
  std::vector<double> seconds;
  {
    const pybind11::gil_scoped_release release;
    plan.run(inputs, &seconds);
  }
  std::vector<std::pair<std::string, double>> result;
  for (int i = 0; i < plan.num_ops(); i++) result.emplace_back(plan.op_name(i), seconds[i]);
  return result;
}

inline void define_step_plan(pybind11::module_& m) {
  using pybind11::arg;
  pybind11::class_<StepInputs>(m, "StepInputs", "Sizes of a step, and the addresses of what it brings (0: nothing).")
      .def(pybind11::init(&step_inputs), arg("num_tokens"), arg("num_seqs") = 0, arg("max_query_len") = 0,
           arg("max_seq_len") = 0, arg("input_ids") = 0, arg("positions") = 0, arg("slot_mapping") = 0,
           arg("query_start_loc") = 0, arg("seq_lens") = 0, arg("block_table") = 0, arg("block_table_stride") = 0,
           arg("logits_rows") = nullptr, arg("indices") = 0, pybind11::keep_alive<1, 13>());
  pybind11::class_<StepPlan>(m, "StepPlan", "A step's kernels, recorded once and run again by one call.")
      .def(pybind11::init<>())
      .def("begin_recording", &StepPlan::begin_recording, arg("inputs"),
           "From now on this thread's ops are recorded instead of run.")
      .def("end_recording", &StepPlan::end_recording)
      .def(
          "record_copy",
          [](StepPlan& plan, uintptr_t dst, uintptr_t src, int64_t row_bytes, int64_t src_stride, int32_t num_rows) {
            plan.record_copy(
                {reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), row_bytes, src_stride, num_rows});
          },
          arg("dst"), arg("src"), arg("row_bytes"), arg("src_stride"), arg("num_rows"))
      .def(
          "record_gather",
          [](StepPlan& plan, uintptr_t dst, uintptr_t src, int64_t row_bytes, int64_t src_stride, int32_t num_rows) {
            plan.record_gather(
                {reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), row_bytes, src_stride, num_rows});
          },
          arg("dst"), arg("src"), arg("row_bytes"), arg("src_stride"), arg("num_rows"))
      .def(
          "record_logits_rows",
          [](StepPlan& plan, uintptr_t data, int64_t row_bytes, int64_t stride) {
            plan.record_logits_rows(reinterpret_cast<void*>(data), row_bytes, stride);
          },
          arg("data"), arg("row_bytes"), arg("stride"))
      .def_property_readonly("num_ops", &StepPlan::num_ops)
      .def(
          "run", [](const StepPlan& plan, const StepInputs& inputs) { plan.run(inputs); }, arg("inputs"),
          pybind11::call_guard<pybind11::gil_scoped_release>(), "Run the step; other threads may run Python meanwhile.")
      .def("timed_run", &timed_run, arg("inputs"), "Run the step and return (op, seconds) of each op, in order.");
  m.def("run_step", &run_step, arg("forward"), arg("logits"), arg("inputs"), arg("token_ids"), arg("maxima"),
        "Run a step and its logits; each sampled row's most likely token and that one's logit.");
}

}  // namespace pyengine::cpu
