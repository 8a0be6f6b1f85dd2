// Stress test of the thread pool; built and run by tests/kernels/test_thread_pool.py, also with ThreadSanitizer.
// Exits with 1 and a line on stderr at the first failure.
#include "../../csrc/cpu/thread_pool.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#define PE_ISA scalar
#include "../../csrc/cpu/parallel.h"

namespace {

std::atomic<int> pretended_cpus{0};  // that the process may use; 0: those that it may
std::atomic<int> moved_threads{0};   // while it pretends
std::atomic<long> pretended_age{0};  // nanoseconds that threads have had a core for, more at each look; 0: what they had

}  // namespace

// In place of the C library's.
extern "C" int sched_getaffinity(pid_t thread, size_t size, cpu_set_t* set) noexcept {
  CPU_ZERO(set);  // the system call fills a part
  if (pretended_cpus == 0) return syscall(SYS_sched_getaffinity, thread, size, set) < 0 ? -1 : 0;
  for (int cpu = 0; cpu < pretended_cpus; cpu++) CPU_SET(cpu, set);
  return 0;
}
extern "C" int sched_setaffinity(pid_t thread, size_t size, const cpu_set_t* set) noexcept {
  if (pretended_cpus == 0) return static_cast<int>(syscall(SYS_sched_setaffinity, thread, size, set));
  moved_threads++;
  return 0;
}
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const bool is_of_a_thread = clock < 0;
  if (!is_of_a_thread || pretended_age == 0) return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  *time = {0, ++pretended_age};
  return 0;
}

namespace {

using namespace pyengine::cpu;
using scalar::parallel_for;
using scalar::parallel_for_restartable;

// Each tile runs once, whatever the number of tiles is; plain memory written in a tile is visible afterwards.
void every_tile_runs_once(int rounds) {
  std::vector<int> hits(1000);
  for (int round = 0; round < rounds; round++) {
    const int tiles = round % 7 == 0 ? 1000 : round % 13;
    hits.assign(hits.size(), 0);
    parallel_for(tiles, [&](int64_t tile, int thread) {
      CHECK(thread >= 0 && thread < get_num_threads());
      hits[tile]++;
    });
    for (int i = 0; i < 1000; i++) CHECK(hits[i] == (i < tiles ? 1 : 0));
  }
}

// Threads of the same call have different numbers: memory indexed by `thread` needs no lock.
void thread_numbers_are_exclusive(int rounds) {
  std::vector<int64_t> sums(kMaxThreads);
  for (int round = 0; round < rounds; round++) {
    sums.assign(sums.size(), 0);
    parallel_for(97, [&](int64_t tile, int thread) { sums[thread] += tile; });
    int64_t total = 0;
    for (const int64_t sum : sums) total += sum;
    CHECK(total == 97 * 96 / 2);
  }
}

void callers_take_turns(int callers, int rounds) {
  std::vector<std::thread> threads;
  std::atomic<int> running{0};
  for (int c = 0; c < callers; c++) {
    threads.emplace_back([&, c] {
      std::vector<int> values(64);
      for (int round = 0; round < rounds; round++) {
        parallel_for(64, [&](int64_t tile, int) { values[tile] = static_cast<int>(tile) + c + round; });
        for (int i = 0; i < 64; i++) CHECK(values[i] == i + c + round);
      }
      running++;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(running == callers);
}

void resizing_under_load(int rounds) {
  std::atomic<bool> stop{false};
  std::thread resizer([&] {
    for (int n = 1; !stop; n = n % 5 + 1) set_num_threads(n);
  });
  every_tile_runs_once(rounds);
  stop = true;
  resizer.join();
}

void nested_calls_run_inline() {
  std::vector<int> hits(64);
  parallel_for(8, [&](int64_t outer, int) { parallel_for(8, [&](int64_t inner, int) { hits[outer * 8 + inner]++; }); });
  for (const int n : hits) CHECK(n == 1);
}

void errors_reach_the_caller() {
  for (int round = 0; round < 50; round++) {
    std::atomic<int> done{0};
    bool caught = false;
    try {
      parallel_for(20, [&](int64_t tile, int) {
        if (tile == 7) throw std::runtime_error("tile 7");
        done++;
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()) == "tile 7";
    }
    CHECK(caught);
    if (get_num_threads() > 1) CHECK(done == 19);
    every_tile_runs_once(2);  // the pool is still usable
  }
}

void scratch_is_per_thread() {
  parallel_for(64, [&](int64_t tile, int) {
    const size_t ints = 100 + static_cast<size_t>(tile) * 37;
    int* scratch = static_cast<int*>(thread_scratch(ints * sizeof(int)));
    CHECK(reinterpret_cast<uintptr_t>(scratch) % 64 == 0);
    CHECK(shared_scratch(64) != static_cast<void*>(scratch));
    for (size_t i = 0; i < ints; i++) scratch[i] = static_cast<int>(tile);
    for (size_t i = 0; i < ints; i++) CHECK(scratch[i] == static_cast<int>(tile));
  });
}

// A kernel whose workers lose their core now and then: out[4 tile .. 4 tile + 4) = round + in[tile]
struct SlowTiles {
  std::atomic<int64_t>* in;  // atomic, because a late worker may read it while the next round writes it
  int64_t* out;
  int64_t round;
  std::thread::id caller;
  bool stalls;

  void operator()(int64_t tile, TileGuard& guard) const {
    const int64_t value = round + in[tile].load(std::memory_order_relaxed);
    if (stalls && std::this_thread::get_id() == caller) usleep(200);  // leaves tiles for the others
    if (stalls && std::this_thread::get_id() != caller && (tile + round) % 5 == 0) usleep(5000);
    for (int part = 0; part < 4; part++) {
      if (!guard.begin_write()) return;
      out[4 * tile + part] = value;
      guard.end_write();
    }
  }
};

// The caller does not wait for stalled workers, and what they do late is lost, though the next round writes the same memory.
void stalled_tiles_are_taken_over(int rounds, bool in_scope) {
  constexpr int kTiles = 24;
  std::vector<std::atomic<int64_t>> in(kTiles);
  std::vector<int64_t> out(4 * kTiles);
  const int64_t before = num_taken_over();
  for (int64_t round = 0; round < rounds; round++) {
    for (int tile = 0; tile < kTiles; tile++) in[tile].store(1000 * tile + 7 * round, std::memory_order_relaxed);
    const SlowTiles tiles = {in.data(), out.data(), round, std::this_thread::get_id(), round % 2 == 0};
    if (in_scope) {
      const TakeOverScope scope;
      parallel_for_restartable(kTiles, tiles);
    } else {
      parallel_for_restartable(kTiles, tiles);
    }
    for (int i = 0; i < 4 * kTiles; i++) CHECK(out[i] == 1000 * (i / 4) + 8 * round);
  }
  wait_for_late_workers();
  CHECK(in_scope && get_num_threads() > 1 ? num_taken_over() > before : num_taken_over() == before);
}

// After wait_for_late_workers, no worker is in a tile any more.
void late_workers_are_waited_for(int rounds) {
  std::atomic<int> inside{0};
  for (int round = 0; round < rounds; round++) {
    {
      const TakeOverScope scope;
      std::atomic<int>* counter = &inside;
      const std::thread::id caller = std::this_thread::get_id();
      parallel_for_restartable(8, [counter, caller](int64_t, TileGuard& guard) {
        (*counter)++;
        if (std::this_thread::get_id() != caller) usleep(2000);
        if (guard.begin_write()) guard.end_write();
        (*counter)--;
      });
    }
    wait_for_late_workers();
    CHECK(inside == 0);
  }
}

// What tiles share is not freed with its thread while a late worker may read it.
void shared_memory_outlives_its_thread(int rounds) {
  constexpr int kInts = 1 << 18;  // so many that free gives them back to the system
  std::atomic<int> inside{0};
  for (int round = 0; round < rounds; round++) {
    std::thread([&inside] {
      const TakeOverScope scope;
      int* shared = static_cast<int*>(shared_scratch(kInts * sizeof(int)));
      shared[kInts - 1] = 1;
      std::atomic<int>* counter = &inside;
      const volatile int* last = shared + kInts - 1;
      const std::thread::id caller = std::this_thread::get_id();
      parallel_for_restartable(8, [counter, last, caller](int64_t, TileGuard& guard) {
        (*counter)++;
        if (std::this_thread::get_id() != caller) usleep(2000);
        CHECK(*last == 1);
        if (guard.begin_write()) guard.end_write();
        (*counter)--;
      });
    }).join();
    CHECK(inside == 0);
  }
}

void errors_of_restartable_tiles_reach_the_caller() {
  const TakeOverScope scope;
  for (int round = 0; round < 20; round++) {
    const bool while_writing = round % 2 == 0;
    bool caught = false;
    try {
      parallel_for_restartable(20, [while_writing](int64_t tile, TileGuard& guard) {
        if (while_writing && !guard.begin_write()) return;
        if (tile == 7) throw std::runtime_error("tile 7");
        if (while_writing) guard.end_write();
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()) == "tile 7";
    }
    CHECK(caught);
  }
  wait_for_late_workers();
}

// Where the worker of two threads ran one of two tiles, the caller the other.
struct WorkerRun {
  cpu_set_t before;  // where it might run, until its caller waits for it
  int cpu = -1;      // at the end of its tile
  cpu_set_t after;   // then
};

template <class Work>
WorkerRun run_on_worker(const Work& work) {
  WorkerRun run;
  std::atomic<bool> claimed{false};
  const std::thread::id caller = std::this_thread::get_id();
  parallel_for(2, [&](int64_t, int) {
    if (std::this_thread::get_id() == caller) {
      while (!claimed) sched_yield();
      return;
    }
    CHECK(sched_getaffinity(0, sizeof run.before, &run.before) == 0);
    claimed = true;
    work();
    run.cpu = sched_getcpu();
    CHECK(sched_getaffinity(0, sizeof run.after, &run.after) == 0);
  });
  return run;
}

void compute_for(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

// While the caller waits, a worker without a core gets the caller's, and is sent away from it again.
void callers_lend_their_core() {
  cpu_set_t all, first;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  const int cpus = CPU_COUNT(&all);
  if (cpus < 2) return;
  set_num_threads(1);
  set_num_threads(2);
  run_on_worker([] {});  // the worker starts, allowed to run anywhere
  int cpu = 0;
  while (!CPU_ISSET(cpu, &all)) cpu++;
  CPU_ZERO(&first);
  CPU_SET(cpu, &first);
  CHECK(sched_setaffinity(0, sizeof first, &first) == 0);  // the caller's
  for (int round = 0; round < 10; round++) {
    const WorkerRun asleep = run_on_worker([] { usleep(100000); });
    CHECK(asleep.cpu == cpu && CPU_EQUAL(&asleep.after, &first));
    const WorkerRun next = run_on_worker([] {});
    CHECK(CPU_COUNT(&next.before) == cpus - 1 && !CPU_ISSET(cpu, &next.before));
  }
  CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
}

// A worker that gets older has a core, and stays there however long the caller waits.
void workers_that_compute_stay() {
  pretended_cpus = 2;
  pretended_age = 1;
  moved_threads = 0;
  set_num_threads(1);
  set_num_threads(2);
  for (int round = 0; round < 20; round++) run_on_worker([] { compute_for(std::chrono::milliseconds(1)); });
  CHECK(moved_threads == 0);
  set_num_threads(1);
  pretended_age = 0;
  pretended_cpus = 0;
}

// Jobs of few tiles wake few threads: the others are asleep, not without a core. And one that has just been woken may not have
// seen its job yet.
void sleepers_stay_where_they_are() {
  pretended_cpus = 16;
  moved_threads = 0;
  set_num_threads(16);
  const TakeOverScope scope;  // no core is lent
  const auto job = [](int64_t, TileGuard&) {};
  for (int round = 0; round < 5; round++) {
    for (int i = 0; i < 40; i++) {
      parallel_for_restartable(2, job);
      usleep(100);  // all are asleep again
    }
    parallel_for_restartable(16, job);
  }
  wait_for_late_workers();
  CHECK(moved_threads == 0);
  set_num_threads(1);
  pretended_cpus = 0;
}

void bad_sizes_are_refused() {
  for (const int n : {0, -1, kMaxThreads + 1}) {
    bool caught = false;
    try {
      set_num_threads(n);
    } catch (const std::invalid_argument&) {
      caught = true;
    }
    CHECK(caught);
  }
}

// A child gets a pool of its own, even when it is forked while another thread's tiles run.
void forked_children_work(int rounds) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) every_tile_runs_once(1);
  });
  for (int round = 0; round < rounds; round++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a hang is a failure
      every_tile_runs_once(20);
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  stop = true;
  busy.join();
}

}  // namespace

int main(int argc, char** argv) {
  const bool can_fork = argc < 2 || std::string(argv[1]) != "no-fork";  // ThreadSanitizer starts no threads in a forked child
  for (const int threads : {1, 2, 3, 8}) {                              // 8: more than most test machines have
    set_num_threads(threads);
    CHECK(get_num_threads() == threads);
    every_tile_runs_once(300);
    thread_numbers_are_exclusive(50);
    callers_take_turns(4, 50);
    nested_calls_run_inline();
    errors_reach_the_caller();
    scratch_is_per_thread();
    stalled_tiles_are_taken_over(30, true);
    stalled_tiles_are_taken_over(10, false);
    late_workers_are_waited_for(5);
    shared_memory_outlives_its_thread(5);
    errors_of_restartable_tiles_reach_the_caller();
  }
  callers_lend_their_core();
  workers_that_compute_stay();
  sleepers_stay_where_they_are();
  resizing_under_load(200);
  bad_sizes_are_refused();
  set_num_threads(4);
  if (can_fork) forked_children_work(10);
  every_tile_runs_once(10);
  return 0;  // with workers asleep in the pool
}
