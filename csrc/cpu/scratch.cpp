#include "scratch.h"

#include <cstdlib>
#include <new>

#include "thread_pool.h"

namespace pyengine::cpu {
namespace {

class Scratch {
 public:
  // `shared`: other threads' tiles may still read memory that the owner is done with.
  explicit constexpr Scratch(bool shared) : shared_(shared) {}
  ~Scratch() { release(); }

  void* reserve(size_t bytes) {
    if (size_ < bytes) {
      release();
      const size_t size = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }

 private:
  // Also at the thread's end, the process's included: the pool is never destroyed.
  void release() {
    if (data_ == nullptr) return;
    if (shared_) wait_for_late_workers();
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }

  const bool shared_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

void* thread_scratch(size_t bytes) {
  thread_local Scratch scratch(false);
  return scratch.reserve(bytes);
}

void* shared_scratch(size_t bytes) {
  thread_local Scratch scratch(true);
  return scratch.reserve(bytes);
}

}  // namespace pyengine::cpu
