// The CPU kernels and how one instruction set's versions are chosen.
//
// Each source in csrc/*/cpu/ is compiled once per instruction set with PE_ISA set to its name, and defines its kernels in
// namespace pyengine::cpu::PE_ISA. Everything inline that such a source includes must live in that namespace, be static, or
// be a type without functions: otherwise the linker could keep the AVX-512 copy of a shared inline function for everybody,
// and a machine without AVX-512 would die on it. tools/check_isa_symbols.py fails the build when that rule is broken.
#pragma once
#include "../attention/params.h"
#include "../cache/params.h"
#include "../layers/gated_linear_params.h"
#include "../layers/params.h"
#include "../quantization/params.h"
#include "../sampling/params.h"

// X(name, parameter struct). A kernel returns nullptr, or a static text that says what it does not support.
#define PE_CPU_KERNELS(X)                          \
  X(paged_attention, PagedAttentionParams)         \
  X(merge_attention_states, MergeAttentionParams)  \
  X(reshape_and_cache, ReshapeAndCacheParams)      \
  X(copy_blocks, CopyBlocksParams)                 \
  X(swap_blocks, SwapBlocksParams)                 \
  X(rms_norm, RmsNormParams)                       \
  X(rotary_embedding, RotaryParams)                \
  X(act_and_mul, ActAndMulParams)                  \
  X(pack_linear_weight, PackLinearParams)          \
  X(linear, LinearParams)                          \
  X(gated_linear, GatedLinearParams)               \
  X(pack_quantized_weight, PackQuantizedParams)    \
  X(quantized_embedding, QuantizedEmbeddingParams) \
  X(quantized_linear, QuantizedLinearParams)       \
  X(pack_w8a16_weight, PackW8A16Params)            \
  X(w8a16_linear, W8A16LinearParams)               \
  X(w8a16_embedding, W8A16EmbeddingParams)         \
  X(gptq_linear, CheckpointLinearParams)           \
  X(awq_linear, CheckpointLinearParams)            \
  X(fp8_linear, CheckpointLinearParams)            \
  X(int8_linear, CheckpointLinearParams)           \
  X(quantize_int8_rows, QuantizeRowsParams)        \
  X(apply_penalties, PenaltiesParams)              \
  X(apply_bitmask, BitmaskParams)                  \
  X(sample_top_k_top_p, SampleParams)              \
  X(argmax, ArgmaxParams)

// Those that instruction sets avx512_vnni and amx have versions of their own of; the others are the next narrower set's.
#define PE_CPU_VNNI_KERNELS(X)               \
  X(quantized_linear, QuantizedLinearParams) \
  X(w8a16_linear, W8A16LinearParams)
#define PE_CPU_AMX_KERNELS(X)                \
  X(linear, LinearParams)                    \
  X(paged_attention, PagedAttentionParams)   \
  X(quantized_linear, QuantizedLinearParams) \
  X(w8a16_linear, W8A16LinearParams)

namespace pyengine::cpu {

struct KernelTable {
#define PE_FIELD(name, Params) const char* (*name)(const Params& params);
  PE_CPU_KERNELS(PE_FIELD)
#undef PE_FIELD
};

// One per instruction set that this build has kernels for, from the plainest to the widest.
struct IsaEntry {
  const char* name;  // scalar, avx2, avx512, avx512_vnni, amx
  const KernelTable* table;
  bool supported;  // by this machine
};
constexpr int kMaxIsas = 8;
int isa_entries(const IsaEntry** entries);

// The table in force: the widest that the machine supports, unless one was forced.
const KernelTable& kernels();
const char* current_isa();
// Forces one for the whole process. Throws std::invalid_argument when `name` is unknown or the machine lacks it.
void set_isa(const char* name);

}  // namespace pyengine::cpu
