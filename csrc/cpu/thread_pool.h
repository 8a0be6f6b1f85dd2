// The process's pool of worker threads for CPU kernels.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pyengine::cpu {

// Runs fn(context, tile, thread) for each tile in [0, num_tiles), `thread` in [0, num_threads), and returns when all are
// done. Which thread takes a tile is up to chance: a tile's result must not depend on it. Concurrent callers take turns;
// a call from inside a tile runs its tiles at once, in order, as thread 0. What a tile throws is thrown here, once all have
// stopped.
using TileFn = void (*)(void* context, int64_t tile, int thread);
void run_tiles(int64_t num_tiles, TileFn fn, void* context);

// What a restartable tile asks before it writes results.
class TileGuard {
 public:
  explicit TileGuard(std::atomic<uint64_t>* owner = nullptr, uint64_t computing = 0) : owner_(owner), computing_(computing) {}
  // Whether the tile is still this thread's. If not, another thread computes it anew, and its results may be in use already:
  // return without writing. If so, call end_write() after writing.
  bool begin_write();
  void end_write();

 private:
  std::atomic<uint64_t>* owner_;  // null: nobody can take the tile over
  uint64_t computing_;
};

// As run_tiles, for tiles that the caller may take over from a worker that lost its core. The worker then computes on, for
// nothing, after the call has returned: it may read what later calls have overwritten, and must make no more of it than a
// wrong number. So a tile
// - gets a copy of the context (trivially copyable, at most kMaxContextBytes) and follows no pointer into the caller's stack;
// - reads arrays whose memory outlives the late worker, and takes no index or address from what a later call may overwrite;
// - writes only between begin_write() and end_write(), other than to its own thread's memory;
// - writes the same bytes when it is run again after a part of its writes, after all of them, or while another thread writes
//   them. A worker that announced a tile may lose its core before it claims it: then another thread runs the tile, and the
//   caller, who sees the announcement alone, runs it too.
// Tiles are taken over only while the calling thread has a TakeOverScope, whose owner vouches for the memory.
constexpr size_t kMaxContextBytes = 512;
using RestartableTileFn = void (*)(const void* context, int64_t tile, TileGuard& guard);
void run_restartable_tiles(int64_t num_tiles, RestartableTileFn fn, const void* context, size_t context_bytes);

class TakeOverScope {
 public:
  TakeOverScope();
  ~TakeOverScope();
  TakeOverScope(const TakeOverScope&) = delete;
  TakeOverScope& operator=(const TakeOverScope&) = delete;

 private:
  bool before_;
};

// Returns when no worker is late any more: memory that a TakeOverScope vouched for may be freed.
void wait_for_late_workers();
// Tiles that callers ran because a worker had announced them and was late, since the process began. Some of these were another
// worker's all the time: see above.
int64_t num_taken_over();

// Threads that take part, the caller's included. Waits for the running call. Throws std::invalid_argument below 1 or above
// kMaxThreads.
constexpr int kMaxThreads = 1024;
void set_num_threads(int num_threads);
int get_num_threads();

}  // namespace pyengine::cpu
