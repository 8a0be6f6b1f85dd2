// Checks of op arguments, for launchers. Every message names the op, the tensor and both values:
// "paged_attention: k_cache has head_dim 64, query has 80".
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "dtype.h"

namespace pyengine {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A tensor's metadata, fetched once, with its op's and its own name. Valid as long as the tensor is.
class TensorArg {
 public:
  TensorArg(const char* op, const char* name, const Tensor& tensor);  // of any rank from 1 up
  TensorArg(const char* op, const char* name, const Tensor& tensor, int64_t rank);

  const char* op() const { return op_; }
  const char* name() const { return name_; }
  int64_t size(int dim) const { return sizes_[dim]; }
  int32_t size32(int dim, const char* what) const;  // of a dimension that kernels count in 32 bits
  int64_t stride(int dim) const { return strides_[dim]; }
  int64_t bytes_per_row() const;  // of one index of the first dimension
  bool on_cpu() const { return on_cpu_; }
  int32_t device_index() const { return device_index_; }

  void* data() const { return data_; }
  template <class T>
  T* data_as() const {
    return static_cast<T*>(data_);
  }

  // Throws unless the element type is one of `allowed`.
  DType float_dtype(std::initializer_list<DType> allowed) const;
  void expect_dtype(torch::headeronly::ScalarType expected) const;
  // Throws unless dimension `dim`, called `what`, has `expected` elements, as `other` has it.
  void expect_size(int dim, const char* what, int64_t expected, const char* other) const;
  // Throws unless the dimensions from `first` on are dense: row-major without gaps, or without elements.
  void expect_dense(int first) const;
  void expect_same_device(const TensorArg& other) const;
  void expect_on_cpu() const;
  [[noreturn]] void fail(const std::string& message) const;

 private:
  const char* op_;
  const char* name_;
  void* data_;
  const int64_t* sizes_;
  const int64_t* strides_;
  int64_t rank_, element_size_;
  torch::headeronly::ScalarType scalar_type_;
  int32_t device_type_, device_index_;
  bool on_cpu_;
};

inline constexpr auto kFloatTypes = {DType::kF32, DType::kF16, DType::kBF16};

// "OP: MESSAGE" as std::invalid_argument, which torch turns into RuntimeError.
[[noreturn]] void fail_op(const char* op, const std::string& message);
const char* dtype_name(DType dtype);
// Throws unless both element types are the same.
void expect_same_dtype(const TensorArg& a, DType a_dtype, const TensorArg& b, DType b_dtype);
// Throws with a kernel's own text unless that is nullptr.
void check_launch(const char* op, const char* error);

}  // namespace pyengine
