// Element types that kernels know. Torch-free: launchers translate torch's types to these.
#pragma once
#include <cstdint>

namespace pyengine {

enum class DType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kFp8E4M3 = 3, kFp8E5M2 = 4, kInt8 = 5 };

constexpr int dtype_size(DType t) { return t == DType::kF32 ? 4 : t == DType::kF16 || t == DType::kBF16 ? 2 : 1; }

}  // namespace pyengine
