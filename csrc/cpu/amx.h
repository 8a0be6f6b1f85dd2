// AMX tiles: eight registers of up to 16 rows of 64 bytes, and products of them. Linux lets a process use them once it has
// asked (features.h).
//
// A register's number is a template argument. The compiler knows nothing of these registers: they belong to one piece of code
// between configure and release. Memory operands are ordered against other memory accesses by the clobber.
#pragma once
#include <cstdint>

namespace pyengine::cpu {
namespace PE_ISA {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

#define PE_TILE_OP inline __attribute__((always_inline))

// Clears every register.
PE_TILE_OP void configure_tiles(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// Leaves the registers unused, so that context switches need not save them.
PE_TILE_OP void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int T>
PE_TILE_OP void zero_tile_register() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
// Rows `stride` bytes apart.
template <int T>
PE_TILE_OP void load_tile_register(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
PE_TILE_OP void store_tile_register(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// c [m, n] int32 += a [m, k] int8 * b [k / 4, n, 4] int8
template <int C, int A, int B>
PE_TILE_OP void multiply_int8_tiles() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// c [m, n] fp32 += a [m, k] bf16 * b [k / 2, n, 2] bf16
template <int C, int A, int B>
PE_TILE_OP void multiply_bf16_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same with a uint8.
template <int C, int A, int B>
PE_TILE_OP void multiply_uint8_int8_tiles() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#undef PE_TILE_OP

}  // namespace PE_ISA
}  // namespace pyengine::cpu
