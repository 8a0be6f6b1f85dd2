// The process's pool of worker threads for CPU kernels.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pyengine::cpu {

// Runs fn(context, tile, thread) for each tile in [0, num_tiles), `thread` in [0, num_threads), and returns when all are
// done. Which thread takes a tile is up to chance: a tile's result must not depend on it. Concurrent callers take turns;
// a call from inside a tile runs its tiles at once, in order, as thread 0. What a tile throws is thrown here, once all have
// stopped.
using TileFn = void (*)(void* context, int64_t tile, int thread);
void run_tiles(int64_t num_tiles, TileFn fn, void* context);

// Threads that take part, the caller's included. Waits for the running call. Throws std::invalid_argument below 1 or above
// kMaxThreads.
constexpr int kMaxThreads = 1024;
void set_num_threads(int num_threads);
int get_num_threads();

// `bytes` of the calling thread's own memory, aligned to 64 bytes, contents undefined. Valid until the thread's next call, so a
// kernel takes all it needs in a tile at once. Throws std::bad_alloc.
void* thread_scratch(size_t bytes);
// A second such buffer, for what a caller shares with its tiles: `thread_scratch` leaves it alone.
void* shared_scratch(size_t bytes);

}  // namespace pyengine::cpu
