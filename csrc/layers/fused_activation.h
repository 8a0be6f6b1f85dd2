// The activations that gated products apply, by the names that callers give.
#pragma once
#include "../common/tensor_arg.h"
#include "params.h"

namespace pyengine {

inline GatedActivation fused_activation(const char* op, const std::string& name) {
  if (name == "silu") return GatedActivation::kSilu;
  if (name == "gelu_tanh") return GatedActivation::kGeluTanh;
  fail_op(op, "activation is '" + name + "', it must be silu or gelu_tanh");
}

}  // namespace pyengine
