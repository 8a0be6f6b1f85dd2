// What the extension module `_C` offers for a step's inputs. pyengine/worker/input_batch.py is its only caller.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "input_batch.h"

namespace pyengine {

// The arrays of an InputBatch by name, and what is computed over them.
class StepPreparer {
 public:
  StepPreparer(pybind11::dict arrays, int block_shift) : arrays_(std::move(arrays)) {
    batch_ = {array<int64_t>("token_ids"),  array<int32_t>("block_table"),  array<int64_t>("num_tokens"),
              array<int64_t>("num_blocks"), array<int64_t>("num_computed"), shape("token_ids", 0),
              shape("token_ids", 1),        shape("block_table", 1),        block_shift};
    out_ = {array<int64_t>("input_ids"),       array<int64_t>("positions"),      array<int64_t>("slot_mapping"),
            array<int32_t>("query_start_loc"), array<int32_t>("seq_lens"),       array<int64_t>("rows"),
            array<int64_t>("query_lens"),      array<int64_t>("computed"),       array<bool>("samples"),
            array<int32_t>("gathered_blocks"), array<int64_t>("logits_indices"), array<int32_t>("logits_starts"),
            array<int32_t>("logits_seq_lens"), array<int32_t>("logits_blocks"),  shape("input_ids", 0)};
  }

  StepPreparer(const StepPreparer&) = delete;
  StepPreparer& operator=(const StepPreparer&) = delete;

  std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> prepare(const std::vector<int64_t>& rows,
                                                                  const std::vector<int64_t>& query_lens) {
    if (rows.size() != query_lens.size()) throw std::invalid_argument("rows and query_lens differ in length");
    check_rows(rows.data(), rows.size());
    const StepSizes s = prepare_step(batch_, out_, rows, query_lens);
    if (s.wrong_row < 0 && s.num_tokens <= out_.max_num_tokens && !rows.empty()) {
      inputs_ = step_inputs(batch_, out_, s, static_cast<int64_t>(rows.size()), &logits_rows_);
    }
    return {s.num_tokens, s.max_query_len, s.max_seq_len, s.num_samples, s.wrong_row};
  }

  const cpu::StepInputs& inputs() const { return inputs_; }

  // The sequences that sampled in the prepared step, in the order of their rows.
  void append_sampled(const std::vector<int64_t>& token_ids) {
    if (static_cast<int64_t>(token_ids.size()) != inputs_.rows().num_tokens) {
      throw std::invalid_argument("as many token_ids as the step samples sequences are expected");
    }
    pyengine::append_sampled(batch_, out_, inputs_.num_seqs, token_ids);
  }

  void set_computed(const std::vector<int64_t>& rows, const std::vector<int64_t>& num_computed) {
    if (rows.size() != num_computed.size()) throw std::invalid_argument("rows and num_computed differ in length");
    check_rows(rows.data(), rows.size());
    for (size_t i = 0; i < rows.size(); i++) batch_.num_computed[rows[i]] = num_computed[i];
  }

 private:
  template <class T>
  T* array(const char* name) {
    return pybind11::cast<pybind11::array_t<T, pybind11::array::c_style>>(arrays_[name]).mutable_data();
  }
  int64_t shape(const char* name, int dim) { return pybind11::cast<pybind11::array>(arrays_[name]).shape(dim); }

  void check_rows(const int64_t* rows, size_t count) const {
    if (static_cast<int64_t>(count) > batch_.max_num_seqs) throw std::invalid_argument("more rows than there are");
    for (size_t i = 0; i < count; i++) {
      if (rows[i] < 0 || rows[i] >= batch_.max_num_seqs) throw std::invalid_argument("there is no such row");
    }
  }

  pybind11::dict arrays_;  // keeps the memory
  BatchRows batch_{};
  BatchBuffers out_{};
  cpu::StepInputs inputs_{}, logits_rows_{};  // inputs_ may point to logits_rows_
};

inline void define_input_batch(pybind11::module_& m) {
  using pybind11::arg;
  pybind11::class_<StepPreparer>(m, "StepPreparer", "Computes a step's inputs from the rows of an InputBatch.")
      .def(pybind11::init<pybind11::dict, int>(), arg("arrays"), arg("block_shift"))
      .def("prepare", &StepPreparer::prepare, arg("rows"), arg("query_lens"),
           "Fill the step's arrays; (num_tokens, max_query_len, max_seq_len, num_samples, wrong_row).")
      .def_property_readonly("inputs", &StepPreparer::inputs, pybind11::return_value_policy::reference_internal,
                             "The StepInputs of the step that was prepared last; always the same object.")
      .def("append_sampled", &StepPreparer::append_sampled, arg("token_ids"),
           "Append a token to each sequence that the prepared step samples.")
      .def("set_computed", &StepPreparer::set_computed, arg("rows"), arg("num_computed"));
}

}  // namespace pyengine
