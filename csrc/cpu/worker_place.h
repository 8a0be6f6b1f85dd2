// Where a worker of the pool runs, as its caller sees and arranges it.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace pyengine::cpu {

class WorkerPlace {
 public:
  // Called by the worker itself, once. The rest is for the caller.
  void start() {
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) == 0) clock_.store(clock, std::memory_order_relaxed);
    thread_id_.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_release);
  }

  // Nanoseconds that the worker has had a core for, below 0 if unknown: one that waits for a core gets no older.
  int64_t age() const {
    timespec t;
    if (!started() || clock_gettime(clock_.load(std::memory_order_relaxed), &t) != 0) return -1;
    return t.tv_sec * INT64_C(1'000'000'000) + t.tv_nsec;
  }

  // A worker that waits for the caller's core would only take it from the caller: let it run anywhere else.
  void keep_away(const cpu_set_t& allowed) {
    const int cpu = sched_getcpu();
    if (cpu == avoided_cpu_ || !can_move(cpu, allowed)) return;
    cpu_set_t others = allowed;
    CPU_CLR(cpu, &others);
    move(others);
    avoided_cpu_ = cpu;
  }

  // The caller is about to sleep until the worker has done its part: let it do so on the caller's core. Then keep_away.
  void bring_here(const cpu_set_t& allowed) {
    const int cpu = sched_getcpu();
    if (!can_move(cpu, allowed)) return;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(cpu, &here);
    move(here);
    avoided_cpu_ = -1;
  }

 private:
  bool started() const { return thread_id_.load(std::memory_order_acquire) != 0; }
  bool can_move(int cpu, const cpu_set_t& allowed) const { return started() && cpu >= 0 && CPU_COUNT(&allowed) > 1; }
  void move(const cpu_set_t& set) const { sched_setaffinity(thread_id_.load(std::memory_order_relaxed), sizeof set, &set); }

  std::atomic<pid_t> thread_id_{0};
  std::atomic<clockid_t> clock_{0};
  int avoided_cpu_ = -1;
};

}  // namespace pyengine::cpu
