// What this machine's CPU offers, and the operating system lets programs use.
#pragma once

namespace pyengine::cpu {

struct Features {
  bool avx2;         // AVX2, FMA and F16C
  bool avx512;       // AVX-512 F, BW, DQ and VL
  bool avx512_vnni;  // 8-bit dot products
  bool avx512_bf16;
  bool amx_int8;  // both AMX: where Linux also grants tile data to this process, which has to ask for it
  bool amx_bf16;
};

// Asked once, then remembered.
const Features& features();

}  // namespace pyengine::cpu
