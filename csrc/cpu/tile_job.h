// What the pool's workers are to run.
#pragma once
#include <cstring>

#include "thread_pool.h"

namespace pyengine::cpu {

// One of both kinds of tiles.
struct TileCall {
  TileFn fn;  // or null:
  RestartableTileFn restartable;
  void* context;

  void operator()(int64_t tile, int thread, TileGuard& guard) const {
    if (fn != nullptr) {
      fn(context, tile, thread);
    } else {
      restartable(context, tile, guard);
    }
  }
};

// What a worker needs to run a job. Atomics, because a late worker may look at a slot while a later job is being written there:
// the acquire of a newer value makes the newer counter visible too, so that its claim of a tile fails.
class Job {
 public:
  void set(const TileCall& call, size_t context_bytes, uint32_t num_tiles) {
    fn_.store(call.fn, std::memory_order_release);
    restartable_.store(call.restartable, std::memory_order_release);
    context_.store(call.context, std::memory_order_release);
    num_words_.store(static_cast<uint32_t>((context_bytes + 7) / 8), std::memory_order_release);
    for (size_t i = 0; i * 8 < context_bytes; i++) {
      uint64_t word = 0;
      const size_t rest = context_bytes - i * 8;
      memcpy(&word, static_cast<const char*>(call.context) + i * 8, rest < 8 ? rest : 8);
      words_[i].store(word, std::memory_order_release);
    }
    num_tiles_.store(num_tiles, std::memory_order_release);
  }

  // `copy` gets a restartable job's context.
  TileCall get(uint64_t* copy) const {
    TileCall call = {fn_.load(std::memory_order_acquire), restartable_.load(std::memory_order_acquire),
                     context_.load(std::memory_order_acquire)};
    if (call.fn != nullptr) return call;
    const uint32_t num_words = num_words_.load(std::memory_order_acquire);
    for (uint32_t i = 0; i < num_words; i++) copy[i] = words_[i].load(std::memory_order_acquire);
    call.context = copy;
    return call;
  }
  uint32_t num_tiles() const { return num_tiles_.load(std::memory_order_acquire); }

 private:
  std::atomic<TileFn> fn_{nullptr};
  std::atomic<RestartableTileFn> restartable_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> num_words_{0}, num_tiles_{0};
  std::atomic<uint64_t> words_[kMaxContextBytes / 8] = {};
};

}  // namespace pyengine::cpu
