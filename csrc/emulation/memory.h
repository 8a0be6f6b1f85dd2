// The arena that emulated "device" buffers may be allocated from. Internal to the emulation layer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pyengine::emulation {

constexpr size_t kArenaBytes = size_t(8) << 30, kRedZone = 4096;

struct Buffer {
  char* begin;
  size_t bytes;
  std::string name;
  // Sanitizer build only.
  std::vector<uint8_t> written;                // [bytes]: whether the byte was ever written
  std::vector<uint32_t> writer_of, reader_of;  // [bytes]: block that last wrote or read the byte in this launch; 0: none
};

std::map<char*, Buffer>& buffers();
bool in_arena(const void* p);
// The buffer that holds p, or null.
Buffer* find_buffer(const void* p);

}  // namespace pyengine::emulation
