// Tiles are claimed one by one from a shared counter, so a thread that lost its core holds up no more than its own tile. A
// restartable tile the caller computes itself; for another one it lends its core.
//
// Each worker announces a tile in a word of its own, then claims it. Once the counter has passed the last tile, the words tell
// the caller all that is left to wait for. A word is epoch << 32 | tile << 2 | state; changes of state that others rely on are
// compare-and-swaps of the whole word.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <climits>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tile_job.h"
#include "waiting.h"
#include "worker_place.h"

namespace pyengine::cpu {
namespace {

constexpr int64_t kSpinNanoseconds = 50'000;
constexpr int64_t kShortestPatience = 10'000;  // nanoseconds that a worker is late before its tile is taken over
constexpr int64_t kLook = 10'000;              // nanoseconds in which a worker that has a core gets older
constexpr int64_t kLongestNap = 500'000;       // nanoseconds between looks, for a worker may lose its core later
constexpr uint32_t kAbsentJobs = 8;            // a worker that came to none of so many that woke all waits for a core
constexpr int64_t kMaxTiles = INT64_C(1) << 30;

enum State : uint64_t { kIdle = 0, kComputing = 1, kWriting = 2, kTaken = 3 };

uint64_t owner_word(uint32_t epoch, uint32_t tile, State state) {
  return static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(tile) << 2 | state;
}
uint32_t epoch_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t tile_of(uint64_t word) { return static_cast<uint32_t>(word) >> 2; }
State state_of(uint64_t word) { return static_cast<State>(word & 3); }
uint64_t with_state(uint64_t word, State state) { return (word & ~uint64_t{3}) | state; }

int allowed_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

thread_local bool inside_tile = false;
thread_local bool may_take_over = false;
std::atomic<int64_t> taken_over{0};

void run_inline(int64_t num_tiles, const TileCall& call) {
  TileGuard guard;
  for (int64_t i = 0; i < num_tiles; i++) call(i, 0, guard);
}

struct InsideTile {
  InsideTile() { inside_tile = true; }
  ~InsideTile() { inside_tile = false; }
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

  void run(int64_t num_tiles, const TileCall& call, size_t context_bytes) {
    if (num_tiles >= kMaxTiles) throw std::invalid_argument("run_tiles: more than 2^30 tiles");
    const std::lock_guard<std::mutex> turn(turn_);
    if (num_threads() == 1) {
      const InsideTile mark;
      return run_inline(num_tiles, call);
    }
    start_workers();
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    jobs_[epoch & 1].set(call, context_bytes, static_cast<uint32_t>(num_tiles));
    next_.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_release);
    epoch_.store(epoch);
    if (idle_sleepers_.load() > 0) futex_wake(&epoch_, static_cast<int>(num_tiles - 1));
    const int64_t start = now_nanoseconds();
    const int64_t own_tiles = run_own_tiles(call, static_cast<uint32_t>(num_tiles));
    const int64_t tile_time = own_tiles > 0 ? (now_nanoseconds() - start) / own_tiles : kSpinNanoseconds;
    const bool take_over = call.fn == nullptr && may_take_over;
    const bool all_woken = num_tiles >= num_threads();  // else those who do not come may be asleep
    for (int t = 1; t < num_threads(); t++) {
      Owner& owner = owners_[t];
      if (spin_ && all_woken && owner.is_absent()) owner.place.keep_away(allowed_);
      if (take_over) {
        join_or_take_over(&owner, epoch, call, 2 * tile_time);
      } else {
        join(&owner, epoch);
      }
    }
    rethrow_error();
  }

  // Late workers are those whose tile was taken over.
  void wait_for_late_workers() {
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (!inside_tile) turn.lock();  // in a tile, the caller has it
    for (size_t t = 1; !workers_.empty() && t <= workers_.size(); t++) {
      while (state_of(owners_[t].word.load(std::memory_order_acquire)) == kTaken) sched_yield();
    }
  }

 private:
  struct alignas(64) Owner {
    std::atomic<uint64_t> word{0};
    std::atomic<uint32_t> seen{0};  // the last epoch that the worker was there for

    // What follows is the caller's.
    alignas(64) uint32_t last_seen = 0;
    uint32_t absent_jobs = 0;  // that woke the worker, since `seen` was last_seen
    WorkerPlace place;

    // Once for each job that woke the worker: whether it came to none of the last kAbsentJobs.
    bool is_absent() {
      const uint32_t now = seen.load(std::memory_order_relaxed);
      if (now != last_seen) {
        last_seen = now;
        absent_jobs = 0;
      } else if (absent_jobs < kAbsentJobs) {
        absent_jobs++;
      }
      return absent_jobs == kAbsentJobs;
    }
  };

  void start_workers() {
    if (!workers_.empty()) return;
    spin_ = num_threads() <= allowed_cpus();
    stop_.store(false);
    owners_.reset(new Owner[num_threads()]);
    const uint32_t epoch = epoch_.load();
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
    for (int t = 1; t < num_threads(); t++) owners_[t].seen.store(epoch, std::memory_order_relaxed);
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
    owners_[thread].place.start();
    inside_tile = true;  // for good: what ends with the thread must not wait for the turn of who joins it
    const auto has_work = [&] { return epoch_.load(std::memory_order_acquire) != epoch; };
    for (;;) {
      if (!spin_ || !spin_until(kSpinNanoseconds, has_work)) {
        idle_sleepers_.fetch_add(1);
        while (epoch_.load() == epoch) futex_wait(&epoch_, epoch);
        idle_sleepers_.fetch_sub(1);
      }
      epoch = epoch_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      owners_[thread].seen.store(epoch, std::memory_order_relaxed);
      work(epoch, thread);
    }
  }

  void work(uint32_t epoch, int thread) {
    alignas(64) uint64_t context[kMaxContextBytes / 8];
    std::atomic<uint64_t>& word = owners_[thread].word;
    const Job& job = jobs_[epoch & 1];
    uint64_t claim = next_.load(std::memory_order_acquire);
    if (epoch_of(claim) != epoch) return;
    const TileCall call = job.get(context);  // whole and this job's, if the first claim succeeds
    while (epoch_of(claim) == epoch) {
      const uint32_t tile = static_cast<uint32_t>(claim);
      if (tile >= job.num_tiles()) return;
      const uint64_t computing = owner_word(epoch, tile, kComputing);
      word.store(computing);
      if (next_.compare_exchange_strong(claim, claim + 1)) {
        TileGuard guard(&word, computing);
        try {
          call(tile, thread, guard);
        } catch (...) {
          if (guard.begin_write() || state_of(word.load()) == kWriting) keep_error();
        }
        claim = next_.load(std::memory_order_acquire);
      }
      word.store(kIdle);
      if (join_sleepers_.load() > 0) {
        progress_.fetch_add(1);
        futex_wake(&progress_, 1);
      }
    }
  }

  int64_t run_own_tiles(const TileCall& call, uint32_t num_tiles) {
    const InsideTile mark;
    int64_t count = 0;
    for (;;) {
      uint64_t claim = next_.load(std::memory_order_acquire);
      const uint32_t tile = static_cast<uint32_t>(claim);
      if (tile >= num_tiles) return count;
      if (!next_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
      run_own_tile(call, tile);
      count++;
    }
  }

  void run_own_tile(const TileCall& call, uint32_t tile) {
    TileGuard guard;
    try {
      call(tile, 0, guard);
    } catch (...) {
      keep_error();
    }
  }

  static bool is_done(const Owner& owner, uint32_t epoch) {
    const uint64_t w = owner.word.load(std::memory_order_acquire);
    return epoch_of(w) != epoch || state_of(w) == kIdle;
  }

  // Waits until a worker is done with this job. If it lost its core, it gets the caller's: it is kept away from that one
  // otherwise, and would get its own back a time slice later.
  void join(Owner* owner, uint32_t epoch) {
    const auto done = [&] { return is_done(*owner, epoch); };
    if (done()) return;
    if (!spin_) return static_cast<void>(sleep_until(done, -1));
    bool lent = false;
    for (int64_t waited = 0;; waited += kLook) {
      const int64_t age = owner->place.age();
      if (spin_until(kLook, done)) break;
      if (!lent && age >= 0 && owner->place.age() == age) {
        owner->place.bring_here(allowed_);
        lent = true;
      }
      if ((lent || waited >= kSpinNanoseconds) && sleep_until(done, kLongestNap)) break;
    }
    if (lent) owner->place.keep_away(allowed_);
  }

  // The same, but after `patience` nanoseconds finishes its tile for it.
  void join_or_take_over(Owner* owner, uint32_t epoch, const TileCall& call, int64_t patience) {
    const auto done = [&] { return is_done(*owner, epoch); };
    if (done() || spin_until(patience > kShortestPatience ? patience : kShortestPatience, done)) return;
    std::atomic<uint64_t>& word = owner->word;
    uint64_t w = word.load(std::memory_order_acquire);
    while (epoch_of(w) == epoch && state_of(w) != kIdle) {
      if (state_of(w) == kComputing && word.compare_exchange_weak(w, with_state(w, kTaken), std::memory_order_acq_rel)) {
        const InsideTile mark;
        run_own_tile(call, tile_of(w));
        taken_over.fetch_add(1, std::memory_order_relaxed);
        return;
      }
      sched_yield();  // it lost its core while it writes
      w = word.load(std::memory_order_acquire);
    }
  }

  // Until done(), or for about `nanoseconds` unless they are below 0; returns done().
  template <class Done>
  bool sleep_until(const Done& done, int64_t nanoseconds) {
    join_sleepers_.fetch_add(1);
    bool is_done = false;
    do {
      const uint32_t progress = progress_.load();
      is_done = done();
      if (!is_done) futex_wait(&progress_, progress, nanoseconds);
    } while (!is_done && nanoseconds < 0);
    join_sleepers_.fetch_sub(1);
    return is_done || done();
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
  std::unique_ptr<Owner[]> owners_;  // by thread number; 0 is unused
  std::atomic<int> num_threads_;
  bool spin_ = true;
  cpu_set_t allowed_;  // CPUs that the process may use
  std::atomic<bool> stop_{false};
  Job jobs_[2];  // by the lowest bit of the epoch
  std::mutex error_mutex_;
  std::exception_ptr error_;
  alignas(64) std::atomic<uint64_t> next_{0};  // epoch << 32 | next tile: a late worker cannot claim a tile of another job
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> progress_{0};
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

}  // namespace

bool TileGuard::begin_write() {
  if (owner_ == nullptr) return true;
  uint64_t expected = computing_;
  return owner_->compare_exchange_strong(expected, with_state(computing_, kWriting), std::memory_order_acq_rel);
}

void TileGuard::end_write() {
  if (owner_ != nullptr) owner_->store(computing_, std::memory_order_release);
}

TakeOverScope::TakeOverScope() : before_(may_take_over) { may_take_over = true; }
TakeOverScope::~TakeOverScope() { may_take_over = before_; }

void run_tiles(int64_t num_tiles, TileFn fn, void* context) {
  if (num_tiles <= 0) return;
  const TileCall call = {fn, nullptr, context};
  if (num_tiles == 1 || inside_tile) return run_inline(num_tiles, call);
  pool().run(num_tiles, call, 0);
}

void run_restartable_tiles(int64_t num_tiles, RestartableTileFn fn, const void* context, size_t context_bytes) {
  if (context_bytes > kMaxContextBytes) throw std::invalid_argument("run_restartable_tiles: the context is too large");
  if (num_tiles <= 0) return;
  const TileCall call = {nullptr, fn, const_cast<void*>(context)};
  if (num_tiles == 1 || inside_tile) return run_inline(num_tiles, call);
  pool().run(num_tiles, call, context_bytes);
}

void wait_for_late_workers() { pool().wait_for_late_workers(); }

int64_t num_taken_over() { return taken_over.load(std::memory_order_relaxed); }

void set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads must be between 1 and " + std::to_string(kMaxThreads) + ", not " +
                                std::to_string(num_threads));
  }
  if (inside_tile) throw std::logic_error("set_num_threads called from inside a parallel region");
  pool().resize(num_threads);
}

int get_num_threads() { return pool().num_threads(); }

}  // namespace pyengine::cpu
