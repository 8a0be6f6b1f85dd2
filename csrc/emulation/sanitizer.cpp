// The checker behind the sanitizer build: kernel units are compiled with -fsanitize=thread, and this file, not libtsan,
// supplies the functions that the compiler then calls at every load and store. It sees out-of-bounds and misaligned
// accesses, reads of memory never written or in flight, races in shared memory (by vector clocks over warps, epochs over
// lanes) and conflicts between blocks in global memory.
#ifdef PYENGINE_SANITIZER
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <unordered_set>

#include "memory.h"
#include "runtime.h"

namespace pyengine::emulation {
namespace {

constexpr uint16_t kNobody = 0xFFFF;
constexpr size_t kMaxReports = 32;

// Who touched a byte of shared memory last, and when. Times are the warp's own clock and epoch.
enum class Readers : uint8_t { kOne, kLanesOfOneWarp, kSeveralWarps };
struct SharedByte {
  uint32_t generation;  // of the block that the rest belongs to
  uint16_t writer, reader;
  uint32_t write_clock, write_epoch, read_clock, read_epoch;
  bool written;
  Readers readers;
};

SharedByte* shared_bytes = nullptr;                     // [kSharedRegion]
uint32_t generation = 0;                                // counts blocks over all launches
uint32_t block_number = 0;                              // of the running block in its launch, from 1
std::unordered_set<uint32_t> blocks_that_synchronised;  // by atomics: not judged by order any more

void report(const std::string& text) {
  if (reports().size() < kMaxReports) reports().push_back(text + " [" + describe(current_thread) + "]");
}

std::string at(void* pc) {
  char text[40];
  std::snprintf(text, sizeof text, " pc=%p", pc);
  return text;
}

uint32_t own_clock() { return runtime.clock[current_thread->warp][current_thread->warp]; }
uint32_t own_epoch() { return runtime.warps[current_thread->warp].epoch; }

// Whether an access by `thread` at (clock, epoch) happened before what the running thread does now.
bool happened_before(uint16_t thread, uint32_t clock, uint32_t epoch) {
  const int warp = thread / kWarpSize;
  if (thread == current_thread->linear) return true;
  if (warp == current_thread->warp) return epoch < own_epoch();
  return clock <= runtime.clock[current_thread->warp][warp];
}

bool reads_happened_before(const SharedByte& b) {
  if (b.reader == kNobody) return true;
  if (b.readers == Readers::kSeveralWarps) return b.read_clock < own_clock();
  if (b.readers == Readers::kLanesOfOneWarp && b.reader / kWarpSize == current_thread->warp) return b.read_epoch < own_epoch();
  return happened_before(b.reader, b.read_clock, b.read_epoch);
}

void note_read(SharedByte& b) {
  if (b.reader == kNobody || happened_before(b.reader, b.read_clock, b.read_epoch)) {
    b.readers = Readers::kOne;
  } else if (b.reader / kWarpSize == current_thread->warp && b.readers != Readers::kSeveralWarps) {
    b.readers = Readers::kLanesOfOneWarp;
  } else {
    b.readers = Readers::kSeveralWarps;
    b.read_clock = std::max(b.read_clock, own_clock());
    b.reader = static_cast<uint16_t>(current_thread->linear);
    b.read_epoch = own_epoch();
    return;
  }
  b.reader = static_cast<uint16_t>(current_thread->linear);
  b.read_clock = own_clock();
  b.read_epoch = own_epoch();
}

void note_write(SharedByte& b) {
  b.writer = static_cast<uint16_t>(current_thread->linear);
  b.write_clock = own_clock();
  b.write_epoch = own_epoch();
  b.written = true;
  b.reader = kNobody;
  b.readers = Readers::kOne;
}

void check_shared(const char* p, unsigned bytes, bool write, void* pc) {
  const char* begin = reinterpret_cast<const char*>(runtime.block.shared);
  const long offset = p - begin;
  const std::string where = " at offset " + std::to_string(offset) + " size " + std::to_string(bytes) + " of " +
                            std::to_string(runtime.block.shared_bytes);
  if (offset < 0 || offset + bytes > static_cast<long>(runtime.block.shared_bytes))
    fail(std::string("shared memory ") + (write ? "write" : "read") + " out of bounds" + where + at(pc));
  bool unwritten = false;
  const char* race = nullptr;
  for (unsigned i = 0; i < bytes; i++) {
    SharedByte& b = shared_bytes[offset + i];
    if (b.generation != generation) b = {generation, kNobody, kNobody, 0, 0, 0, 0, false, Readers::kOne};
    const bool after_write = b.writer == kNobody || happened_before(b.writer, b.write_clock, b.write_epoch);
    if (write) {
      if (!after_write) race = "write after unordered write";
      if (!reads_happened_before(b)) race = "write after unordered read";
      note_write(b);
    } else {
      if (!after_write) race = "read after unordered write";
      unwritten |= !b.written;
      note_read(b);
    }
  }
  if (race) report(std::string("shared memory race: ") + race + where + at(pc));
  if (unwritten) report("uninitialised shared memory read" + where + at(pc));
}

enum class Access { kRead, kWrite, kAtomic };

std::string name_near(const char* p) {
  for (auto& [begin, b] : buffers())
    if (p >= begin - kRedZone && p < begin + b.bytes + kRedZone)
      return "buffer '" + b.name + "' of " + std::to_string(b.bytes) + " bytes, offset " + std::to_string(p - begin);
  return "no buffer";
}

void check_global(const char* p, unsigned bytes, Access access, void* pc) {
  Buffer* b = find_buffer(p);
  if (!b || p + bytes > b->begin + b->bytes)
    fail(std::string("global memory ") + (access == Access::kRead ? "read" : "write") + " out of bounds: " + name_near(p) +
         ", size " + std::to_string(bytes) + at(pc));
  const size_t offset = p - b->begin;
  bool unwritten = false;
  const char* race = nullptr;
  if (access == Access::kAtomic) blocks_that_synchronised.insert(block_number);
  const bool judged = !blocks_that_synchronised.count(block_number);
  for (size_t i = offset; i < offset + bytes; i++) {
    if (access == Access::kRead)
      unwritten |= !b->written[i];
    else
      b->written[i] = 1;
    if (!judged) continue;
    const bool others_wrote = b->writer_of[i] && b->writer_of[i] != block_number;
    const bool others_read = b->reader_of[i] && b->reader_of[i] != block_number;
    if (access == Access::kWrite && others_wrote) race = "two blocks write one byte";
    if (access == Access::kWrite && others_read) race = "a block writes a byte that another block read";
    if (access == Access::kRead && others_wrote) race = "a block reads a byte that another block wrote";
    (access == Access::kRead ? b->reader_of : b->writer_of)[i] = block_number;
  }
  const std::string where = " in '" + b->name + "' at offset " + std::to_string(offset) + " size " + std::to_string(bytes);
  if (race) report(std::string("global memory race: ") + race + where + at(pc));
  if (unwritten) report("uninitialised global memory read" + where + at(pc));
}

bool in_shared_region(const void* p) {
  const unsigned char* c = static_cast<const unsigned char*>(p);
  return c >= runtime.shared_region && c < runtime.shared_region + kSharedRegion;
}

void check_access(const void* p, unsigned bytes, bool write, void* pc) {
  if (!current_thread) return;
  const bool shared = in_shared_region(p);
  if (!shared && !in_arena(p)) return;  // the fiber's stack, or host memory that is not checked
  const bool aligned_type = bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16;
  if (aligned_type && reinterpret_cast<uintptr_t>(p) % bytes)
    fail(std::string("misaligned ") + (shared ? "shared" : "global") + " memory access of " + std::to_string(bytes) + " bytes" +
         at(pc));
  const char* c = static_cast<const char*>(p);
  if (shared)
    check_shared(c, bytes, write, pc);
  else
    check_global(c, bytes, write ? Access::kWrite : Access::kRead, pc);
}

}  // namespace

void on_read(const void* p, unsigned bytes, void* pc) { check_access(p, bytes, false, pc); }
void on_write(void* p, unsigned bytes, void* pc) { check_access(p, bytes, true, pc); }
void on_atomic(void* p, unsigned bytes, void* pc) {
  if (current_thread && in_arena(p)) check_global(static_cast<const char*>(p), bytes, Access::kAtomic, pc);
}
void on_async_copy(void* p, unsigned bytes, void* pc) {
  on_write(p, bytes, pc);
  const size_t offset = static_cast<unsigned char*>(p) - runtime.block.shared;
  for (unsigned i = 0; i < bytes; i++) shared_bytes[offset + i].written = false;
}

void sanitizer_begin_launch() {
  if (!shared_bytes) {
    void* p = mmap(nullptr, sizeof(SharedByte) * kSharedRegion, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    shared_bytes = static_cast<SharedByte*>(p);
  }
  block_number = 0;
  blocks_that_synchronised.clear();
  for (auto& [begin, b] : buffers()) {
    std::fill(b.writer_of.begin(), b.writer_of.end(), 0);
    std::fill(b.reader_of.begin(), b.reader_of.end(), 0);
  }
}

void sanitizer_begin_block() {
  generation++;
  block_number++;
}

}  // namespace pyengine::emulation

// The interface that -fsanitize=thread compiles calls to.
using pyengine::emulation::on_read;
using pyengine::emulation::on_write;
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define PYENGINE_TSAN_ACCESS(bytes)                                                              \
  void __tsan_read##bytes(void* p) { on_read(p, bytes, __builtin_return_address(0)); }           \
  void __tsan_write##bytes(void* p) { on_write(p, bytes, __builtin_return_address(0)); }         \
  void __tsan_unaligned_read##bytes(void* p) { on_read(p, bytes, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* p) { on_write(p, bytes, __builtin_return_address(0)); }
PYENGINE_TSAN_ACCESS(1)
PYENGINE_TSAN_ACCESS(2)
PYENGINE_TSAN_ACCESS(4)
PYENGINE_TSAN_ACCESS(8)
PYENGINE_TSAN_ACCESS(16)
void __tsan_read_range(void* p, unsigned long bytes) { on_read(p, static_cast<unsigned>(bytes), __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long bytes) {
  on_write(p, static_cast<unsigned>(bytes), __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
#endif
