// Runs CUDA kernel source on the CPU: one block at a time, every CUDA thread a fiber. Threads meet in barriers and warp
// collectives exactly where the source says so; copies by cp.async land only when they are waited for.
// One launch at a time in a process (a lock sees to it); no CUDA header or library is needed.
#pragma once
#ifdef __CUDACC__
#error "the emulation layer is for host compilers only"
#endif
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vector_types.h"

namespace pyengine::emulation {

// The order in which threads that could all run are run, and blocks of a grid.
enum class Order : int { kForward = 0, kReverse = 1, kRandom = 2 };

struct Options {
  Order thread_order = Order::kForward;
  Order block_order = Order::kForward;
  uint64_t seed = 1;
  size_t max_shared_bytes = 227 * 1024;  // what an H100 block may use
};
Options& options();

// A cp.async copy that was issued and has not landed.
struct PendingCopy {
  void* dst;
  const void* src;
  uint16_t bytes, src_bytes;  // the rest of `bytes` is zero-filled
};

struct Block {
  dim3 grid, dim;
  uint3 idx;
  unsigned char* shared;
  size_t shared_bytes;
};

struct Thread {
  uint3 idx;
  int linear, lane, warp;
  Block* block;
  void* stack_pointer;
  const char* wait_file;  // where it waits, for messages
  int wait_line;
  uint8_t state;
  std::vector<PendingCopy> copies;    // oldest first
  std::vector<uint32_t> copy_groups;  // sizes of the committed groups, oldest first
  uint32_t open_group;                // copies issued since the last commit
};
extern Thread* current_thread;

// Aborts the launch: run_grid throws std::runtime_error with this text and the place in the grid.
[[noreturn]] void fail(const std::string& what);

// ---- synchronisation -----------------------------------------------------------------------------------------------
void block_barrier(const char* file, int line);
// The last lane to arrive runs `function` over the payloads of all lanes in the mask. `kind` tells collectives apart.
using WarpFunction = void (*)(void** payload, uint32_t mask);
void warp_collective(uint32_t mask, const void* kind, void* payload, WarpFunction function, bool orders_memory,
                     const char* file, int line);
void yield();  // inside a loop that waits for another thread

// ---- launch --------------------------------------------------------------------------------------------------------
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* argument);
template <typename Body>
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, Body&& body) {
  run_grid(
      grid, block, shared_bytes, [](void* b) { (*static_cast<Body*>(b))(); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// ---- memory --------------------------------------------------------------------------------------------------------
// Buffers in an arena with red zones, filled with 0xFF (NaN in every floating-point type). The sanitizer build knows
// their bounds and which of their bytes were written; other memory may be used too and is not checked.
void* allocate(size_t bytes, const char* name, bool initialised);
void release(void* buffer);
void mark_initialised(void* p, size_t bytes);

// ---- what the sanitizer build adds ---------------------------------------------------------------------------------
// Accesses that no compiler instrumentation sees (cp.async, ldmatrix, 16-byte wrappers) are reported by hand.
#ifdef PYENGINE_SANITIZER
void on_read(const void* p, unsigned bytes, void* pc);
void on_write(void* p, unsigned bytes, void* pc);
void on_atomic(void* p, unsigned bytes, void* pc);
void on_async_copy(void* p, unsigned bytes, void* pc);  // p is in flight: neither old nor new contents may be read
#else
inline void on_read(const void*, unsigned, void*) {}
inline void on_write(void*, unsigned, void*) {}
inline void on_atomic(void*, unsigned, void*) {}
#endif
std::vector<std::string>& reports();  // findings since they were last cleared

struct Statistics {
  uint64_t launches, switches, warp_collectives, barriers, mma;
};
extern Statistics statistics;

}  // namespace pyengine::emulation
