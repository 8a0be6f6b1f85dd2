#include "scratch.h"

#include <cstdlib>
#include <new>

#include "thread_pool.h"

namespace pyengine::cpu {
namespace {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // `shared`: other threads' tiles may still read the old memory.
  void* reserve(size_t bytes, bool shared) {
    if (size_ < bytes) {
      if (shared) wait_for_late_workers();
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

void* thread_scratch(size_t bytes) {
  thread_local Scratch scratch;
  return scratch.reserve(bytes, false);
}

void* shared_scratch(size_t bytes) {
  thread_local Scratch scratch;
  return scratch.reserve(bytes, true);
}

}  // namespace pyengine::cpu
