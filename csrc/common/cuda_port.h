// The one header between kernel source and machine. Kernels use nothing of the machine but what is named here, so the same
// source is compiled by nvcc for GPUs and by a host compiler for the emulation in csrc/emulation.
// Shapes and layouts of the tensor core's operands: "Matrix fragments for mma.m16n8k16" in NVIDIA's PTX manual.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtype.h"

#ifdef __CUDACC__
#include "cuda_ptx.h"
#else
#include <exception>
#include <string>

#include "../emulation/cuda_language.h"
#include "../emulation/instructions.h"
#include "../emulation/streams.h"
#endif

#define PYENGINE_DEVICE __device__ __forceinline__

namespace pyengine::cuda {

constexpr uint32_t kFullWarp = 0xffffffffu;

#ifndef __CUDACC__
using pyengine::BFloat16;
using pyengine::Float16;
namespace machine = pyengine::emulation;
#endif

// ---- memory ----------------------------------------------------------------------------------------------------------
// The block's dynamic shared memory; kernels use no other kind.
PYENGINE_DEVICE unsigned char* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) unsigned char pyengine_shared[];
  return pyengine_shared;
#else
  return emulation::current_thread->block->shared;
#endif
}

// 4, 8 or 16 bytes as one access; the address is a multiple of the size.
template <typename V>
PYENGINE_DEVICE V load_vector(const void* p) {
#ifdef __CUDACC__
  return *static_cast<const V*>(p);
#else
  V v;
  emulation::load_vector(&v, p, sizeof(V));
  return v;
#endif
}
template <typename V>
PYENGINE_DEVICE void store_vector(void* p, V v) {
#ifdef __CUDACC__
  *static_cast<V*>(p) = v;
#else
  emulation::store_vector(p, &v, sizeof(V));
#endif
}

// Copies kBytes (8 or 16) from global to shared memory asynchronously; bytes from src_bytes on are zero-filled.
template <int kBytes>
PYENGINE_DEVICE void cp_async(void* shared, const void* global, int src_bytes) {
#ifdef __CUDACC__
  machine::cp_async<kBytes>(shared, global, src_bytes);
#else
  emulation::cp_async(shared, global, kBytes, static_cast<unsigned>(src_bytes));
#endif
}
PYENGINE_DEVICE void cp_async_commit() { machine::cp_async_commit(); }
// Waits until all groups but the newest kNewest have landed, for the calling thread's copies only.
template <int kNewest>
PYENGINE_DEVICE void cp_async_wait() {
#ifdef __CUDACC__
  machine::cp_async_wait<kNewest>();
#else
  emulation::cp_async_wait(kNewest);
#endif
}

// ---- tensor core -------------------------------------------------------------------------------------------------------
template <bool kTransposed>
PYENGINE_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
#ifdef __CUDACC__
  machine::ldmatrix_x4<kTransposed>(r, row);
#else
  emulation::ldmatrix_x4(r, row, kTransposed);
#endif
}
template <typename T>
PYENGINE_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  machine::mma_m16n8k16(c, a, b0, b1, T{});
}

// c[16, 8] += a[16, 32] b[32, 8] over int8, exactly. Lane 4 g + t holds, four neighbours of k in a register, the lowest first,
// a[g | g + 8][4 t.. | 16 + 4 t..], b[4 t.. | 16 + 4 t..][g] and c as mma_m16n8k16.
PYENGINE_DEVICE void mma_m16n8k32(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  machine::mma_m16n8k32(c, a, b0, b1);
}

// ---- numbers ---------------------------------------------------------------------------------------------------------
PYENGINE_DEVICE float to_float(float x) { return x; }
PYENGINE_DEVICE float to_float(Float16 x) { return machine::to_float(x); }
PYENGINE_DEVICE float to_float(BFloat16 x) { return machine::to_float(x); }

template <typename T>
PYENGINE_DEVICE T from_float(float x);
template <>
PYENGINE_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
PYENGINE_DEVICE Float16 from_float<Float16>(float x) {
  return machine::to_float16(x);
}
template <>
PYENGINE_DEVICE BFloat16 from_float<BFloat16>(float x) {
  return machine::to_bfloat16(x);
}

template <typename To, typename From>
PYENGINE_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Two 16-bit numbers in a register, the first in the low half.
template <typename T>
PYENGINE_DEVICE uint32_t pack2(float low, float high) {
#ifdef __CUDACC__
  return machine::pack2(low, high, T{});
#else
  return bit_cast<uint16_t>(from_float<T>(low)) | uint32_t(bit_cast<uint16_t>(from_float<T>(high))) << 16;
#endif
}
// a * b + c on both halves.
template <typename T>
PYENGINE_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDACC__
  return machine::fma2(a, b, c, T{});
#else
  auto half = [](uint32_t x, int shift) { return to_float(bit_cast<T>(static_cast<uint16_t>(x >> shift))); };
  return pack2<T>(half(a, 0) * half(b, 0) + half(c, 0), half(a, 16) * half(b, 16) + half(c, 16));
#endif
}
// Result byte i is byte (selector >> 4 i) & 7 of x; selectors of 4 and more give 0.
PYENGINE_DEVICE uint32_t select_bytes(uint32_t x, uint32_t selector) {
#ifdef __CUDACC__
  return __byte_perm(x, 0u, selector);
#else
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t from = selector >> (4 * i) & 7;
    if (from < 4) r |= (x >> (8 * from) & 255u) << (8 * i);
  }
  return r;
#endif
}

// Result byte i is byte (selector >> 4 i) & 7 of the eight of low and high.
PYENGINE_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDACC__
  return __byte_perm(low, high, selector);
#else
  const uint64_t both = uint64_t(high) << 32 | low;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 255u) << (8 * i);
  return r;
#endif
}

// FP8 as bytes: e4m3 (OCP "FN") or e5m2. Encoding saturates to the largest finite value.
PYENGINE_DEVICE uint8_t to_fp8(float x, bool e4m3) { return e4m3 ? machine::to_fp8_e4m3(x) : machine::to_fp8_e5m2(x); }
PYENGINE_DEVICE float fp8_to_float(uint8_t x, bool e4m3) {
  if (!e4m3) return to_float(bit_cast<Float16>(static_cast<uint16_t>(x << 8)));
  if ((x & 0x7f) == 0x7f) return NAN;
  const uint16_t bits =
      static_cast<uint16_t>((x & 0x80) << 8 | (x & 0x7f) << 7);  // as fp16, whose exponent bias is larger by 8
  return to_float(bit_cast<Float16>(bits)) * 256.0f;
}
PYENGINE_DEVICE int round_to_int(float x) {  // to nearest, ties to even
#ifdef __CUDACC__
  return __float2int_rn(x);
#else
  return static_cast<int>(std::nearbyint(x));
#endif
}

// The upper 64 bits of a product.
PYENGINE_DEVICE unsigned long long multiply_high(unsigned long long a, unsigned long long b) {
#ifdef __CUDACC__
  return __umul64hi(a, b);
#else
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// 2^x to about 2 units in the last place; 2^-inf is 0.
PYENGINE_DEVICE float fast_exp2(float x) {
#ifdef __CUDACC__
  return machine::exp2_approx(x);
#else
  return exp2f(x);
#endif
}
// tanh to an absolute error of about 1e-6. The hardware's tanh.approx is 500 times worse, too much under a soft-cap of 50.
PYENGINE_DEVICE float fast_tanh(float x) {
  const float e = fast_exp2(x * 2.885390082f);  // e^(2 x)
#ifdef __CUDACC__
  return 1.0f - __fdividef(2.0f, e + 1.0f);
#else
  return 1.0f - 2.0f / (e + 1.0f);
#endif
}

// ---- host side ---------------------------------------------------------------------------------------------------------
// Enqueues a kernel on a stream. Returns nullptr, or a static text that says what went wrong.
template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                   const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
#ifdef __CUDACC__
  if (shared_bytes > 48 * 1024) {  // beyond this a kernel must be told
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  thread_local std::string text;
  try {
    emulation::stream_before_kernel(stream);
    emulation::run_grid(grid, block, shared_bytes, [&] { kernel(arguments...); });
    return nullptr;
  } catch (const std::exception& e) {
    text = e.what();
    return text.c_str();
  }
#endif
}

// Enqueues copies that may run in any order among each other, between host and device or inside either.
inline const char* copy_batch(size_t count, void** dst, const void** src, size_t* bytes, void* stream) {
  if (count == 0) return nullptr;
#ifdef __CUDACC__
  return machine::copy_batch(count, dst, src, bytes, static_cast<cudaStream_t>(stream));
#else
  emulation::stream_copy_batch(stream, count, dst, src, bytes);
  return nullptr;
#endif
}

}  // namespace pyengine::cuda
