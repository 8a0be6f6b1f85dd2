// The machine instructions that kernels reach through csrc/common/cuda_port.h: asynchronous copies, ldmatrix, mma.
#pragma once
#include <cstdint>

#include "number_types.h"

namespace pyengine::emulation {

// cp.async: the copy lands when its group is waited for, the latest moment that the machine allows. Until then the
// destination is NaN. Bytes beyond src_bytes are zero-filled.
void cp_async(void* shared, const void* global, unsigned bytes, unsigned src_bytes);
void cp_async_commit();
void cp_async_wait(unsigned newest_allowed);

// ldmatrix.x4: four 8x8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8.
void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed);

// mma.sync.m16n8k16, fp32 accumulators: c[16, 8] += a[16, 16] * b[16, 8].
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Float16);
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BFloat16);

// mma.sync.m16n8k32 over int8, int32 accumulators: c[16, 8] += a[16, 32] * b[32, 8].
void mma_m16n8k32(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// 4, 8 or 16 bytes by one instruction: the address must be a multiple of the size.
void load_vector(void* registers, const void* p, unsigned bytes);
void store_vector(void* p, const void* registers, unsigned bytes);

}  // namespace pyengine::emulation
