// From a DType at run time to a type at compile time.
#pragma once
#include "../common/dtype.h"
#include "../common/scalar_types.h"

namespace pyengine::cpu {
namespace PE_ISA {

// fn(T{}) with T the element type of activations and weights; fn returns a kernel's result.
template <class Fn>
inline const char* with_float_type(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kF32:
      return fn(0.0f);
    case DType::kF16:
      return fn(Float16{});
    case DType::kBF16:
      return fn(BFloat16{});
    default:
      return "the element type must be fp32, fp16 or bf16";
  }
}

// fn(T{}) with T the element type of a KV cache.
template <class Fn>
inline const char* with_cache_type(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFp8E4M3:
      return fn(Float8E4M3{});
    case DType::kFp8E5M2:
      return fn(Float8E5M2{});
    case DType::kInt8:
      return fn(int8_t{0});
    default:
      return with_float_type(dtype, fn);
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
