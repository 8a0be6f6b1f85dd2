// How the pool's threads wait for each other: spin for a moment, because the next op of a step comes within microseconds, and
// then sleep on a futex.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace pyengine::cpu {

// For `nanoseconds` at most, unless they are below 0.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t nanoseconds = -1) {
  const timespec limit = {static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nanoseconds < 0 ? nullptr : &limit,
          nullptr, 0);
}
inline void futex_wake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline int64_t now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1'000'000'000) + t.tv_nsec;
}

// Spins until done() or `nanoseconds` have passed; returns the last done().
template <class Done>
inline bool spin_until(int64_t nanoseconds, const Done& done) {
  const int64_t deadline = now_nanoseconds() + nanoseconds;
  do {
    for (int i = 0; i < 16; i++) {
      if (done()) return true;
      pause_cpu();
    }
  } while (now_nanoseconds() < deadline);
  return done();
}

}  // namespace pyengine::cpu
