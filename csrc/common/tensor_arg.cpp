#include "tensor_arg.h"

#include <limits>
#include <stdexcept>

namespace pyengine {

using torch::headeronly::ScalarType;

namespace {

std::string count(int64_t n) { return std::to_string(n); }

std::optional<DType> to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Float8_e4m3fn:
      return DType::kFp8E4M3;
    case ScalarType::Float8_e5m2:
      return DType::kFp8E5M2;
    case ScalarType::Char:
      return DType::kInt8;
    default:
      return std::nullopt;
  }
}

}  // namespace

TensorArg::TensorArg(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name), rank_(tensor.dim()) {
  if (rank_ < 1) fail("must have at least one dimension");
  data_ = tensor.data_ptr();
  sizes_ = tensor.sizes().data();
  strides_ = tensor.strides().data();
  scalar_type_ = tensor.scalar_type();
  element_size_ = static_cast<int64_t>(tensor.element_size());
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type_));
  device_index_ = tensor.get_device_index();
  on_cpu_ = device_type_ == aoti_torch_device_type_cpu();
}

TensorArg::TensorArg(const char* op, const char* name, const Tensor& tensor, int64_t rank) : TensorArg(op, name, tensor) {
  if (rank_ != rank) fail("must have " + count(rank) + " dimensions, not " + count(rank_));
}

void TensorArg::fail(const std::string& message) const {
  fail_op(op_, std::string(name_) + (message[0] == '[' ? "" : " ") + message);  // an index follows the name at once
}

int32_t TensorArg::size32(int dim, const char* what) const {
  if (sizes_[dim] > std::numeric_limits<int32_t>::max()) {
    fail("has " + std::string(what) + " " + count(sizes_[dim]) + ", kernels take at most 2147483647");
  }
  return static_cast<int32_t>(sizes_[dim]);
}

int64_t TensorArg::bytes_per_row() const {
  int64_t bytes = element_size_;
  for (int64_t dim = 1; dim < rank_; dim++) bytes *= sizes_[dim];
  return bytes;
}

DType TensorArg::float_dtype(std::initializer_list<DType> allowed) const {
  const std::optional<DType> dtype = to_dtype(scalar_type_);
  std::string names;
  for (const DType candidate : allowed) {
    if (dtype == candidate) return candidate;
    names += std::string(names.empty() ? "" : ", ") + dtype_name(candidate);
  }
  fail("is " + std::string(torch::headeronly::toString(scalar_type_)) + ", it must be one of " + names);
}

void TensorArg::expect_dtype(ScalarType expected) const {
  if (scalar_type_ != expected) {
    fail("is " + std::string(torch::headeronly::toString(scalar_type_)) + ", it must be " +
         torch::headeronly::toString(expected));
  }
}

void TensorArg::expect_size(int dim, const char* what, int64_t expected, const char* other) const {
  if (sizes_[dim] != expected) {
    fail("has " + std::string(what) + " " + count(sizes_[dim]) + ", " + other + " has " + count(expected));
  }
}

void TensorArg::expect_dense(int first) const {
  for (int64_t dim = first; dim < rank_; dim++) {
    if (sizes_[dim] == 0) return;  // whatever its strides are
  }
  int64_t expected = 1;
  for (int64_t dim = rank_ - 1; dim >= first; dim--) {
    if (sizes_[dim] != 1 && strides_[dim] != expected) {
      fail("must be dense from dimension " + count(first) + " on, but dimension " + count(dim) + " has stride " +
           count(strides_[dim]) + " instead of " + count(expected));
    }
    expected *= sizes_[dim];
  }
}

void TensorArg::expect_same_device(const TensorArg& other) const {
  if (device_type_ != other.device_type_ || device_index_ != other.device_index_) {
    fail("is not on the device of " + std::string(other.name_));
  }
}

void TensorArg::expect_on_cpu() const {
  if (!on_cpu_) fail("must be in CPU memory");
}

void fail_op(const char* op, const std::string& message) { throw std::invalid_argument(std::string(op) + ": " + message); }

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "Float";
    case DType::kF16:
      return "Half";
    case DType::kBF16:
      return "BFloat16";
    case DType::kFp8E4M3:
      return "Float8_e4m3fn";
    case DType::kFp8E5M2:
      return "Float8_e5m2";
    case DType::kInt8:
      return "Char";
  }
  return "?";
}

void expect_same_dtype(const TensorArg& a, DType a_dtype, const TensorArg& b, DType b_dtype) {
  if (a_dtype != b_dtype) a.fail("is " + std::string(dtype_name(a_dtype)) + ", " + b.name() + " is " + dtype_name(b_dtype));
}

void check_launch(const char* op, const char* error) {
  if (error != nullptr) fail_op(op, error);
}

}  // namespace pyengine
