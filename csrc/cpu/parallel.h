// What kernel sources need of threads: parallel_for, with a call per instruction set, so that no template code is shared
// between them, and memory for tiles.
#pragma once
#include <type_traits>

#include "scratch.h"
#include "thread_pool.h"

namespace pyengine::cpu {
namespace PE_ISA {

// fn(int64_t tile, int thread) for each tile in [0, num_tiles); see run_tiles.
template <class Fn>
inline void parallel_for(int64_t num_tiles, const Fn& fn) {
  run_tiles(
      num_tiles, [](void* context, int64_t tile, int thread) { (*static_cast<const Fn*>(context))(tile, thread); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

// fn(int64_t tile, TileGuard& guard) for each tile in [0, num_tiles); see run_restartable_tiles for what such a tile may do.
// What fn captures, by value, is the context that is copied.
template <class Fn>
inline void parallel_for_restartable(int64_t num_tiles, const Fn& fn) {
  static_assert(std::is_trivially_copyable_v<Fn> && sizeof(Fn) <= kMaxContextBytes, "the context of a restartable tile");
  run_restartable_tiles(
      num_tiles, [](const void* context, int64_t tile, TileGuard& guard) { (*static_cast<const Fn*>(context))(tile, guard); },
      &fn, sizeof fn);
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
