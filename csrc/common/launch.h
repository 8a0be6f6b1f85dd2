// Registration and launch of ops: one validating launcher per op, a template over the target that it launches on.
//
// The main extension registers namespace `pyengine` for CPU tensors and, built with PE_CUDA, CUDA tensors. The emulated
// extension is built with PE_EMULATED: the same launchers, namespace `pyengine_emulated`, CPU tensors, the CUDA kernels.
#pragma once
#include <torch/csrc/stable/library.h>

#include "../cpu/launch.h"
#include "cuda_stream.h"
#include "tensor_arg.h"

namespace pyengine::emulation {
void* current_stream();  // csrc/emulation/streams.h
}

namespace pyengine {

enum class Target { kCpu, kCuda, kEmulated };

// Tensors whose values the launcher may read, to check indices before a kernel trusts them.
constexpr bool values_readable(Target target) { return target != Target::kCuda; }

}  // namespace pyengine

// Runs kernel `kernel` of the launcher's template argument `target`, or records it; `arg` tells the device.
#define PE_LAUNCH(kernel, params, arg)                                             \
  do {                                                                             \
    if constexpr (target == Target::kCpu) {                                        \
      cpu::launch((arg).op(), &cpu::KernelTable::kernel, params);                  \
    } else if constexpr (target == Target::kEmulated) {                            \
      check_launch((arg).op(), cuda::kernel(params, emulation::current_stream())); \
    } else {                                                                       \
      const CudaDevice device((arg).device_index());                               \
      check_launch((arg).op(), cuda::kernel(params, device.stream()));             \
    }                                                                              \
  } while (false)

// PE_REGISTER_OPS(register_ops): registers what `template <Target> void register_ops(StableLibrary&)` names.
#define PE_REGISTER_FOR(ns, key, target, function) \
  STABLE_TORCH_LIBRARY_IMPL(ns, key, library) { function<target>(library); }
#if defined(PE_EMULATED)
#define PE_REGISTER_OPS(function) PE_REGISTER_FOR(pyengine_emulated, CPU, ::pyengine::Target::kEmulated, function)
#elif defined(PE_CUDA)
#define PE_REGISTER_OPS(function)                                    \
  PE_REGISTER_FOR(pyengine, CPU, ::pyengine::Target::kCpu, function) \
  PE_REGISTER_FOR(pyengine, CUDA, ::pyengine::Target::kCuda, function)
#else
#define PE_REGISTER_OPS(function) PE_REGISTER_FOR(pyengine, CPU, ::pyengine::Target::kCpu, function)
#endif
