// Tiles are claimed one by one from a shared counter, so a thread that lost its core holds up no more than its own tile. Idle
// workers spin for a moment, because the next op of a step comes within microseconds, and then sleep on a futex.
#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace pyengine::cpu {
namespace {

constexpr int64_t kSpinNanoseconds = 50'000;

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int64_t now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1'000'000'000) + t.tv_nsec;
}

int allowed_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

thread_local bool inside_tile = false;

void run_inline(int64_t num_tiles, TileFn fn, void* context) {
  for (int64_t i = 0; i < num_tiles; i++) fn(context, i, 0);
}

// Waits until word differs from `value`: spins first, then sleeps; `sleepers` tells the other side that a wake is needed.
class Waiter {
 public:
  explicit Waiter(bool spin) : spin_(spin) {}

  void wait_while_equal(std::atomic<uint32_t>* word, uint32_t value, std::atomic<int>* sleepers) const {
    if (spin_) {
      const int64_t deadline = now_nanoseconds() + kSpinNanoseconds;
      do {
        for (int i = 0; i < 16; i++) {
          if (word->load(std::memory_order_acquire) != value) return;
          pause_cpu();
        }
      } while (now_nanoseconds() < deadline);
    }
    sleepers->fetch_add(1);
    while (word->load() == value) futex_wait(word, value);
    sleepers->fetch_sub(1);
  }

 private:
  bool spin_;
};

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {}

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void resize(int num_threads) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (num_threads == this->num_threads()) return;
    stop_workers();
    num_threads_.store(num_threads, std::memory_order_relaxed);
  }

  void run(int64_t num_tiles, TileFn fn, void* context) {
    if (num_tiles > INT32_MAX) throw std::invalid_argument("run_tiles: more than 2^31 - 1 tiles");
    const std::lock_guard<std::mutex> turn(turn_);
    if (num_threads() == 1) return run_inline_marked(num_tiles, fn, context);
    start_workers();
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    Job& job = jobs_[epoch & 1];
    job.fn.store(fn, std::memory_order_release);
    job.context.store(context, std::memory_order_release);
    job.num_tiles.store(static_cast<uint32_t>(num_tiles), std::memory_order_release);
    unfinished_.store(static_cast<uint32_t>(num_tiles), std::memory_order_relaxed);
    next_.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_release);
    epoch_.store(epoch);
    if (idle_sleepers_.load() > 0) futex_wake(&epoch_, static_cast<int>(num_tiles - 1));
    work(epoch, 0);
    const Waiter waiter(spin_);
    for (uint32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
      waiter.wait_while_equal(&unfinished_, left, &join_sleepers_);
    }
    rethrow_error();
  }

 private:
  // Atomics, because a late worker may look at a slot while a later job is being written there. The acquire of a newer value
  // makes the newer `next_` visible too, so that its claim of a tile fails.
  struct Job {
    std::atomic<TileFn> fn{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<uint32_t> num_tiles{0};
  };

  void run_inline_marked(int64_t num_tiles, TileFn fn, void* context) {
    struct Mark {
      Mark() { inside_tile = true; }
      ~Mark() { inside_tile = false; }
    } mark;
    run_inline(num_tiles, fn, context);
  }

  void start_workers() {
    if (!workers_.empty()) return;
    spin_ = num_threads() <= allowed_cpus();
    stop_.store(false);
    const uint32_t epoch = epoch_.load();
    for (int t = 1; t < num_threads(); t++) workers_.emplace_back([this, epoch, t] { worker_loop(epoch, t); });
  }

  void stop_workers() {
    stop_.store(true);
    epoch_.fetch_add(1);
    futex_wake(&epoch_, INT_MAX);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  void worker_loop(uint32_t epoch, int thread) {
    const Waiter waiter(spin_);
    for (;;) {
      waiter.wait_while_equal(&epoch_, epoch, &idle_sleepers_);
      epoch = epoch_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      work(epoch, thread);
    }
  }

  void work(uint32_t epoch, int thread) {
    inside_tile = true;
    uint64_t claim = next_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(claim >> 32) == epoch) {
      const Job& job = jobs_[epoch & 1];
      const uint32_t tile = static_cast<uint32_t>(claim);
      const TileFn fn = job.fn.load(std::memory_order_acquire);
      void* context = job.context.load(std::memory_order_acquire);
      if (tile >= job.num_tiles.load(std::memory_order_acquire)) break;
      if (!next_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      try {
        fn(context, tile, thread);
      } catch (...) {
        keep_error();
      }
      if (unfinished_.fetch_sub(1) == 1 && join_sleepers_.load() > 0) futex_wake(&unfinished_, 1);
      claim = next_.load(std::memory_order_acquire);
    }
    inside_tile = false;
  }

  void keep_error() {
    const std::lock_guard<std::mutex> guard(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }

  void rethrow_error() {
    std::exception_ptr error;
    {
      const std::lock_guard<std::mutex> guard(error_mutex_);
      std::swap(error, error_);
    }
    if (error) std::rethrow_exception(error);
  }

  std::mutex turn_;  // held by the caller whose tiles run
  std::vector<std::thread> workers_;
  std::atomic<int> num_threads_;
  bool spin_ = true;
  std::atomic<bool> stop_{false};
  Job jobs_[2];
  std::mutex error_mutex_;
  std::exception_ptr error_;
  alignas(64) std::atomic<uint64_t> next_{0};  // epoch << 32 | next tile: a late worker cannot claim a tile of another job
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> idle_sleepers_{0}, join_sleepers_{0};
};

// Never destroyed: workers may still sleep in it while the process exits.
std::atomic<Pool*> current_pool{nullptr};

// A child process has none of the parent's threads, and may have been forked while one of them held the pool.
void replace_pool_after_fork() {
  Pool* old = current_pool.load();
  if (old != nullptr) current_pool.store(new Pool(old->num_threads()));
  inside_tile = false;
}

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    current_pool.store(new Pool(allowed_cpus()));
    pthread_atfork(nullptr, nullptr, replace_pool_after_fork);
  });
  return *current_pool.load(std::memory_order_acquire);
}

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  void* reserve(size_t bytes) {
    if (size_ < bytes) {
      const size_t size = (bytes + 4095) / 4096 * 4096;
      std::free(data_);
      data_ = std::aligned_alloc(64, size);
      size_ = data_ != nullptr ? size : 0;
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

void run_tiles(int64_t num_tiles, TileFn fn, void* context) {
  if (num_tiles <= 0) return;
  if (num_tiles == 1 || inside_tile) return run_inline(num_tiles, fn, context);
  pool().run(num_tiles, fn, context);
}

void set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads must be between 1 and " + std::to_string(kMaxThreads) + ", not " +
                                std::to_string(num_threads));
  }
  if (inside_tile) throw std::logic_error("set_num_threads called from inside a parallel region");
  pool().resize(num_threads);
}

int get_num_threads() { return pool().num_threads(); }

void* thread_scratch(size_t bytes) {
  thread_local Scratch scratch;
  return scratch.reserve(bytes);
}

void* shared_scratch(size_t bytes) {
  thread_local Scratch scratch;
  return scratch.reserve(bytes);
}

}  // namespace pyengine::cpu
