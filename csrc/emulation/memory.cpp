#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "emulation.h"

namespace pyengine::emulation {

namespace {
char* arena = nullptr;
size_t arena_used = 0;
Buffer* last_found = nullptr;

void map_arena() {
  void* p = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  arena = static_cast<char*>(p);
}
}  // namespace

std::map<char*, Buffer>& buffers() {
  static std::map<char*, Buffer> all;
  return all;
}

bool in_arena(const void* p) {
  const char* c = static_cast<const char*>(p);
  return arena && c >= arena && c < arena + kArenaBytes;
}

Buffer* find_buffer(const void* p) {
  char* c = const_cast<char*>(static_cast<const char*>(p));
  if (last_found && c >= last_found->begin && c < last_found->begin + last_found->bytes) return last_found;
  auto next = buffers().upper_bound(c);
  if (next == buffers().begin()) return nullptr;
  Buffer& candidate = std::prev(next)->second;
  if (c >= candidate.begin + candidate.bytes) return nullptr;
  last_found = &candidate;
  return last_found;
}

void* allocate(size_t bytes, const char* name, bool initialised) {
  if (!arena) map_arena();
  const size_t needed = (bytes + 255) / 256 * 256 + 2 * kRedZone;
  if (arena_used + needed > kArenaBytes) throw std::bad_alloc();
  char* begin = arena + arena_used + kRedZone;
  arena_used += needed;
  std::memset(begin, 0xFF, bytes);
  Buffer buffer{begin, bytes, name, {}, {}, {}};
#ifdef PYENGINE_SANITIZER
  buffer.written.assign(bytes, initialised);
  buffer.writer_of.assign(bytes, 0);
  buffer.reader_of.assign(bytes, 0);
#else
  (void)initialised;
#endif
  buffers().emplace(begin, std::move(buffer));
  return begin;
}

void release(void* p) {
  last_found = nullptr;
  buffers().erase(static_cast<char*>(p));
  if (buffers().empty()) arena_used = 0;
}

void mark_initialised(void* p, size_t bytes) {
  Buffer* b = find_buffer(p);
  if (b && !b->written.empty()) std::memset(b->written.data() + (static_cast<char*>(p) - b->begin), 1, bytes);
}

}  // namespace pyengine::emulation
