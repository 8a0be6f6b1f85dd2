#include "features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace pyengine::cpu {
namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r{};
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bit(uint32_t word, int index) { return (word >> index & 1) != 0; }

// XCR0: the register state that the operating system saves on a context switch.
uint64_t enabled_state() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux gives a process AMX's tile data (8 KB of state for each thread) only when asked; every thread may use it then.
bool request_tile_data() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features f{};
  const Registers leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  const bool osxsave = bit(leaf1.ecx, 27);
  const uint64_t state = osxsave ? enabled_state() : 0;
  const bool ymm = (state & 0x6) == 0x6;           // SSE, AVX
  const bool zmm = ymm && (state & 0xe0) == 0xe0;  // mask registers, upper halves, upper sixteen
  const bool tiles = (state & 0x60000) == 0x60000;
  f.avx2 = ymm && bit(leaf7.ebx, 5) && bit(leaf1.ecx, 12) && bit(leaf1.ecx, 29);
  f.avx512 = f.avx2 && zmm && bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 30) && bit(leaf7.ebx, 31);
  f.avx512_vnni = f.avx512 && bit(leaf7.ecx, 11);
  f.avx512_bf16 = f.avx512 && bit(leaf7_1.eax, 5);
  if (f.avx512 && tiles && bit(leaf7.edx, 24) && request_tile_data()) {
    f.amx_int8 = bit(leaf7.edx, 25);
    f.amx_bf16 = bit(leaf7.edx, 22);
  }
  return f;
}

#else

Features detect() { return Features{}; }

#endif

}  // namespace

const Features& features() {
  static const Features detected = detect();
  return detected;
}

}  // namespace pyengine::cpu
