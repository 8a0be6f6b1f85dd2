// The state of the running launch. Internal to the emulation layer: kernels see emulation.h only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "emulation.h"

namespace pyengine::emulation {

constexpr int kMaxThreads = 1024, kMaxWarps = 32, kWarpSize = 32;
constexpr size_t kSharedRegion = size_t(1) << 20;  // mapped once; a block's shared memory lies in its middle

enum ThreadState : uint8_t { kRunning, kAtBarrier, kAtCollective, kYielded, kDone };

struct Collective {
  uint32_t mask, arrived;
  const void* kind;
  const char* file;
  int line;
};

struct Warp {
  uint32_t ready, alive, yielded;  // lanes
  Collective collectives[4];       // of disjoint masks, each waiting for lanes
  int num_collectives;
  void* payload[kWarpSize];
  uint32_t epoch;  // counts the points that order memory among the warp's lanes
};

struct Barrier {
  const char* file = nullptr;
  int line = 0;
  std::vector<Thread*> arrived;
};

struct Runtime {
  Block block;
  Thread threads[kMaxThreads];
  Warp warps[kMaxWarps];
  Barrier barrier;
  uint32_t ready_warps;
  int num_threads, num_warps, num_done;
  void* main_stack_pointer;
  char* stacks;
  unsigned char* shared_region;
  void (*body)(void*);
  void* argument;
  uint64_t random_state;
  bool failed;
  std::string failure;
  uint64_t idle_rounds;
  uint32_t clock[kMaxWarps][kMaxWarps];  // clock[w][v]: how much of warp v's past happened before warp w's present
};
extern Runtime runtime;

std::string describe(const Thread* thread);

#ifdef PYENGINE_SANITIZER
void sanitizer_begin_launch();
void sanitizer_begin_block();
#else
inline void sanitizer_begin_launch() {}
inline void sanitizer_begin_block() {}
#endif

}  // namespace pyengine::emulation
