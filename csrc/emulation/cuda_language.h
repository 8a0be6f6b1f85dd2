// The part of the CUDA language that the kernels use: keywords, built-in variables, barriers, warp collectives, atomics.
#pragma once
#include <cmath>
#include <cstring>

#include "emulation.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::pyengine::emulation::current_thread->idx)
#define blockIdx (::pyengine::emulation::current_thread->block->idx)
#define blockDim (::pyengine::emulation::current_thread->block->dim)
#define gridDim (::pyengine::emulation::current_thread->block->grid)

// A collective knows its call site, so that lanes that meet in different places are told apart.
#define PYENGINE_CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
// Touches other fibers' stacks, which only this layer may.
#define PYENGINE_NO_SANITIZE __attribute__((no_sanitize_thread))
#define PYENGINE_HERE __builtin_return_address(0)

inline void __syncthreads(PYENGINE_CALL_SITE) { pyengine::emulation::block_barrier(file, line); }
inline void __threadfence() {}

inline void __syncwarp(uint32_t mask = 0xffffffffu, PYENGINE_CALL_SITE) {
  static const char kind = 0;
  pyengine::emulation::warp_collective(mask, &kind, nullptr, [](void**, uint32_t) {}, true, file, line);
}

namespace pyengine::emulation {

template <typename T>
struct ShuffleOperand {
  T in, out;
  int source;
};

template <typename T>
PYENGINE_NO_SANITIZE void run_shuffle(void** payload, uint32_t mask) {
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    auto* mine = static_cast<ShuffleOperand<T>*>(payload[i]);
    if (!(mask >> mine->source & 1)) fail("a shuffle reads a lane outside its mask");
    mine->out = static_cast<ShuffleOperand<T>*>(payload[mine->source])->in;
  }
}

template <typename T>
PYENGINE_NO_SANITIZE inline T shuffle(uint32_t mask, T value, int source, const char* file, int line) {
  static const char kind = 0;
  ShuffleOperand<T> operand{value, value, source};
  warp_collective(mask, &kind, &operand, &run_shuffle<T>, false, file, line);
  return operand.out;
}

struct BallotOperand {
  bool in;
  uint32_t out;
};

PYENGINE_NO_SANITIZE inline void run_ballot(void** payload, uint32_t mask) {
  uint32_t votes = 0;
  for (int i = 0; i < 32; i++)
    if ((mask >> i & 1) && static_cast<BallotOperand*>(payload[i])->in) votes |= 1u << i;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) static_cast<BallotOperand*>(payload[i])->out = votes;
}

}  // namespace pyengine::emulation

template <typename T>
inline T __shfl_sync(uint32_t mask, T value, int source, PYENGINE_CALL_SITE) {
  return pyengine::emulation::shuffle(mask, value, source & 31, file, line);
}
template <typename T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, PYENGINE_CALL_SITE) {
  return pyengine::emulation::shuffle(mask, value, pyengine::emulation::current_thread->lane ^ lane_mask, file, line);
}
template <typename T>
inline T __shfl_up_sync(uint32_t mask, T value, int delta, PYENGINE_CALL_SITE) {
  const int lane = pyengine::emulation::current_thread->lane;
  return pyengine::emulation::shuffle(mask, value, lane - delta < 0 ? lane : lane - delta, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, bool predicate, PYENGINE_CALL_SITE) {
  static const char kind = 0;
  pyengine::emulation::BallotOperand operand{predicate, 0};
  pyengine::emulation::warp_collective(mask, &kind, &operand, &pyengine::emulation::run_ballot, false, file, line);
  return operand.out;
}

template <typename T>
PYENGINE_NO_SANITIZE inline T atomicAdd(T* p, T value) {
  pyengine::emulation::on_atomic(p, sizeof(T), PYENGINE_HERE);
  const T old = *p;
  *p = old + value;
  return old;
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __float_as_int(float x) {
  int i;
  std::memcpy(&i, &x, 4);
  return i;
}
inline float __int_as_float(int x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <typename T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
