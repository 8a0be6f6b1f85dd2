#include "instructions.h"

#include <cstring>

#include "emulation.h"

namespace pyengine::emulation {

namespace {

void require_aligned(const void* p, unsigned bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % bytes)
    fail(std::string(what) + ": address is not a multiple of " + std::to_string(bytes));
}

struct LoadMatrix {
  const void* row;
  uint32_t r[4];
};

template <bool kTransposed>
void run_ldmatrix(void** payload, uint32_t mask) {
  if (mask != 0xffffffffu) fail("ldmatrix needs a full warp");
  const char* rows[32];
  for (int i = 0; i < 32; i++) {
    rows[i] = static_cast<const char*>(static_cast<LoadMatrix*>(payload[i])->row);
    require_aligned(rows[i], 16, "ldmatrix");
    on_read(rows[i], 16, __builtin_return_address(0));
  }
  for (int lane = 0; lane < 32; lane++)
    for (int m = 0; m < 4; m++) {
      uint16_t element[2];
      for (int h = 0; h < 2; h++) {
        const int row = kTransposed ? 2 * (lane & 3) + h : lane >> 2, column = kTransposed ? lane >> 2 : 2 * (lane & 3) + h;
        std::memcpy(&element[h], rows[m * 8 + row] + 2 * column, 2);
      }
      static_cast<LoadMatrix*>(payload[lane])->r[m] = element[0] | uint32_t(element[1]) << 16;
    }
}

struct Mma {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

template <typename T>
void unpack(float* two, uint32_t packed) {
  two[0] = to_float(T{static_cast<uint16_t>(packed)});
  two[1] = to_float(T{static_cast<uint16_t>(packed >> 16)});
}

// Lane 4 g + t holds a[g | g + 8][2 t, 2 t + 1 | + 8], b[2 t, 2 t + 1 | + 8][g] and c[g | g + 8][2 t, 2 t + 1].
template <typename T>
void run_mma(void** payload, uint32_t mask) {
  if (mask != 0xffffffffu) fail("mma needs a full warp");
  statistics.mma++;
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const auto* m = static_cast<const Mma*>(payload[lane]);
    const int g = lane >> 2, t = lane & 3;
    for (int r = 0; r < 4; r++) unpack<T>(&a[g + (r & 1) * 8][2 * t + (r >> 1) * 8], m->a[r]);
    for (int r = 0; r < 2; r++) {
      float pair[2];
      unpack<T>(pair, m->b[r]);
      b[2 * t + r * 8][g] = pair[0];
      b[2 * t + r * 8 + 1][g] = pair[1];
    }
    for (int r = 0; r < 4; r++) c[g + (r >> 1) * 8][2 * t + (r & 1)] = m->c[r];
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; lane++)
    for (int r = 0; r < 4; r++)
      static_cast<Mma*>(payload[lane])->c[r] = c[(lane >> 2) + (r >> 1) * 8][2 * (lane & 3) + (r & 1)];
}

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const char kind = 0;
  const uint32_t b[2] = {b0, b1};
  Mma operand{c, a, b};
  warp_collective(0xffffffffu, &kind, &operand, &run_mma<T>, false, "mma", 0);
}

struct MmaInt8 {
  int32_t* c;
  const uint32_t* a;
  const uint32_t* b;
};

int byte_of(uint32_t packed, int i) { return static_cast<int8_t>(packed >> (8 * i)); }

// Lane 4 g + t holds a[g | g + 8][4 t.. | 16 + 4 t..], b[4 t.. | 16 + 4 t..][g] and c[g | g + 8][2 t, 2 t + 1].
void run_mma_int8(void** payload, uint32_t mask) {
  if (mask != 0xffffffffu) fail("mma needs a full warp");
  statistics.mma++;
  int a[16][32], b[32][8], c[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const auto* m = static_cast<const MmaInt8*>(payload[lane]);
    const int g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; i++) {
      for (int r = 0; r < 4; r++) a[g + (r & 1) * 8][4 * t + i + (r >> 1) * 16] = byte_of(m->a[r], i);
      for (int r = 0; r < 2; r++) b[4 * t + i + r * 16][g] = byte_of(m->b[r], i);
    }
    for (int r = 0; r < 4; r++) c[g + (r >> 1) * 8][2 * t + (r & 1)] = m->c[r];
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 32; k++)
      for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; lane++)
    for (int r = 0; r < 4; r++)
      static_cast<MmaInt8*>(payload[lane])->c[r] = c[(lane >> 2) + (r >> 1) * 8][2 * (lane & 3) + (r & 1)];
}

}  // namespace

void cp_async(void* shared, const void* global, unsigned bytes, unsigned src_bytes) {
  require_aligned(shared, bytes, "cp.async to shared memory");
  require_aligned(global, bytes, "cp.async from global memory");
#ifdef PYENGINE_SANITIZER
  on_async_copy(shared, bytes, __builtin_return_address(0));
#endif
  std::memset(shared, 0xFF, bytes);
  current_thread->copies.push_back({shared, global, static_cast<uint16_t>(bytes), static_cast<uint16_t>(src_bytes)});
  current_thread->open_group++;
}

void cp_async_commit() {
  current_thread->copy_groups.push_back(current_thread->open_group);
  current_thread->open_group = 0;
}

void cp_async_wait(unsigned newest_allowed) {
  Thread* t = current_thread;
  if (t->copy_groups.size() <= newest_allowed) return;
  const size_t num_groups = t->copy_groups.size() - newest_allowed;
  size_t num_copies = 0;
  for (size_t g = 0; g < num_groups; g++) num_copies += t->copy_groups[g];
  for (size_t i = 0; i < num_copies; i++) {
    const PendingCopy& copy = t->copies[i];
    if (copy.src_bytes) on_read(copy.src, copy.src_bytes, __builtin_return_address(0));
    on_write(copy.dst, copy.bytes, __builtin_return_address(0));
    std::memset(copy.dst, 0, copy.bytes);
    std::memcpy(copy.dst, copy.src, copy.src_bytes);
  }
  t->copies.erase(t->copies.begin(), t->copies.begin() + static_cast<long>(num_copies));
  t->copy_groups.erase(t->copy_groups.begin(), t->copy_groups.begin() + static_cast<long>(num_groups));
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed) {
  static const char kind[2] = {0, 0};
  LoadMatrix operand{row, {}};
  warp_collective(0xffffffffu, &kind[transposed], &operand, transposed ? &run_ldmatrix<true> : &run_ldmatrix<false>, false,
                  "ldmatrix", 0);
  std::memcpy(r, operand.r, sizeof operand.r);
}

void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Float16) { mma<Float16>(c, a, b0, b1); }
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BFloat16) { mma<BFloat16>(c, a, b0, b1); }

void mma_m16n8k32(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const char kind = 0;
  const uint32_t b[2] = {b0, b1};
  MmaInt8 operand{c, a, b};
  warp_collective(0xffffffffu, &kind, &operand, &run_mma_int8, false, "mma", 0);
}

void load_vector(void* registers, const void* p, unsigned bytes) {
  require_aligned(p, bytes, "vector load");
  on_read(p, bytes, __builtin_return_address(0));
  std::memcpy(registers, p, bytes);
}

void store_vector(void* p, const void* registers, unsigned bytes) {
  require_aligned(p, bytes, "vector store");
  on_write(p, bytes, __builtin_return_address(0));
  std::memcpy(p, registers, bytes);
}

}  // namespace pyengine::emulation
