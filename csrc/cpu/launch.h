// What a launcher does with checked parameters: runs the kernel, or hands it to the plan that records (step_plan.h).
#pragma once
#include "kernel_table.h"

namespace pyengine::cpu {

template <class Params>
using Kernel = const char* (*KernelTable::*)(const Params&);

// Throws std::invalid_argument with what the kernel says that it does not support, or why it cannot be recorded.
template <class Params>
void launch(const char* op, Kernel<Params> kernel, const Params& params);

}  // namespace pyengine::cpu
