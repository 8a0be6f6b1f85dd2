"""Planted bugs: each changes one place of a CUDA source, and some case of emulation_cases.py must notice."""

from __future__ import annotations

from dataclasses import dataclass

_ATTENTION = "csrc/attention/cuda/"
_MMA, _DISPATCH = f"{_ATTENTION}mma_head128.cu", f"{_ATTENTION}paged_attention.cu"
_RESHAPE, _COPY = "csrc/cache/cuda/reshape_and_cache.cu", "csrc/cache/cuda/copy_blocks.cu"
_SAMPLE, _LOGITS = "csrc/sampling/cuda/sample.cu", "csrc/sampling/cuda/logits.cu"
_QUANT = "csrc/quantization/cuda/"
_MERGE = f"{_ATTENTION}merge_attention_states.cu"
_NORM, _ROTARY, _ACTIVATION = (f"csrc/layers/cuda/{name}.cu" for name in ("rms_norm", "rotary_embedding", "act_and_mul"))


@dataclass(frozen=True)
class Mutant:
    """`old`, found once in `file`, becomes `new`; `units` are compiled again; cases whose name starts with one of `cases` run.

    `sanitizer`: the bug leaves results right in emulation, or may, and the memory and race checker has to see it.
    """

    name: str
    file: str
    old: str
    new: str
    units: tuple[str, ...]
    cases: str
    sanitizer: bool = False


def _decode(name: str, file: str, old: str, new: str, cases: str = "decode", sanitizer: bool = False) -> Mutant:
    return Mutant(name, _ATTENTION + file, old, new, (_MMA,), cases, sanitizer)


def _both(name: str, old: str, new: str, cases: str) -> Mutant:
    """In the header that all attention kernels share."""
    return Mutant(name, f"{_ATTENTION}query_rows.cuh", old, new, (_MMA, _DISPATCH), cases)


def _simt(name: str, old: str, new: str, cases: str = "simt", sanitizer: bool = False) -> Mutant:
    return Mutant(name, f"{_ATTENTION}attention_simt.cuh", old, new, (_DISPATCH,), cases, sanitizer)


def _combine(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"{_ATTENTION}combine.cuh", old, new, (_DISPATCH,), "decode/split,simt/split")


def _own(name: str, unit: str, old: str, new: str, cases: str, sanitizer: bool = False) -> Mutant:
    """In a source of its own."""
    return Mutant(name, unit, old, new, (unit,), cases, sanitizer)


def _gemm(name: str, file: str, old: str, new: str, cases: str = "", sanitizer: bool = False) -> Mutant:
    """In a header that the products share; `cases`: the format that shows it, or those of several rows."""
    formats = {"rows": "linear/gptq-rows,linear/fp8-rows", "": "linear/gptq,linear/awq,linear/fp8"}
    chosen = formats.get(cases, f"linear/{cases}")
    units = tuple(f"{_QUANT}{unit}_linear.cu" for unit in ("gptq", "awq", "fp8") if f"linear/{unit}" in chosen)
    return Mutant(name, _QUANT + file, old, new, units, chosen, sanitizer)


def _int8(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"{_QUANT}int8_linear.cu", old, new, (f"{_QUANT}int8_linear.cu",), "linear/int8")


def _rotary(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, "csrc/layers/cuda/rotary.cuh", old, new, (_ROTARY,), "rotary")


MUTANTS = [
    # Synchronisation and asynchronous copies
    _decode(
        "decode: no barrier before the rings are reused",
        "decode_mma.cuh",
        "  __syncthreads();  // the rings are done with",
        "  // the rings are done with",
        sanitizer=True,
    ),
    _decode("decode: no barrier before the merge", "decode_mma.cuh", "  __syncthreads();\n  merge_warps", "  merge_warps"),
    _decode(
        "decode: no __syncwarp after the wait",
        "decode_mma.cuh",
        "    __syncwarp();  // every",
        "    // every",
        sanitizer=True,
    ),
    _decode(
        "decode: waits for one group too few",
        "decode_mma.cuh",
        "cp_async_wait<Shape::kStages - 2>()",
        "cp_async_wait<Shape::kStages - 1>()",
    ),
    _decode(
        "decode: prefetches into the stage in use", "decode_mma.cuh", "stage == 0 ? Shape::kStages - 1 : stage - 1", "stage"
    ),
    _decode("prefill: no barrier in the loop", "prefill_mma.cuh", "    __syncthreads();  // the", "    // the", "prefill"),
    _decode("prefill: tile not waited for", "prefill_mma.cuh", "    cp_async_wait<0>();\n    __", "    __", "prefill"),
    _simt("simt: no barrier after the load", "    __syncthreads();\n    float s[", "    float s["),
    _simt("simt: no barrier before the load", "    __syncthreads();  // the last", "    // the last", "simt", True),
    _simt("simt: scores read before they are written", "    __syncwarp();  // a row's", "    // a row's"),
    _own("rms_norm: no barrier before the sum", _NORM, "  __syncthreads();\n", "", "rms_norm"),
    # Addresses
    _decode(
        "off-by-one block",
        "kv_tile.cuh",
        "kv.table[token >> p.block_shift]",
        "kv.table[(token >> p.block_shift) + 1]",
        "decode,prefill",
    ),
    _decode("value block stride", "kv_tile.cuh", "block * kv.v_block_bytes +", "block * kv.v_token_bytes +", "decode,prefill"),
    _decode(
        "value token stride", "kv_tile.cuh", "v + row % kGroup * kv.v_token_bytes", "v + kv.v_token_bytes", "decode,prefill"
    ),
    _decode(
        "copies beyond a row's end",
        "kv_tile.cuh",
        "int valid = max(min(row_bytes - byte, 16), 0);",
        "int valid = 16;",
        "decode/fp16",
        True,
    ),
    _decode(
        "dead rows not zero-filled", "kv_tile.cuh", "range.end)) valid = 0;", "range.end)) valid = valid;", "decode,prefill"
    ),
    _decode(
        "decode: too little shared memory",
        "decode_mma.cuh",
        "kWarps * kRingBytes > kMergeBytes ? kWarps * kRingBytes : kMergeBytes",
        "kMergeBytes",
        sanitizer=True,
    ),
    _decode(
        "prefill: reads queries that do not exist",
        "prefill_mma.cuh",
        "row < rows.num_rows && chunk * 8",
        "chunk * 8",
        "prefill",
        True,
    ),
    _decode(
        "decode: second tile of a wide group",
        "decode_mma.cuh",
        "blockIdx.y / p.num_kv_heads * kTileRows",
        "0 * kTileRows",
        "decode/wide-group",
    ),
    _both("query head of another KV head", "kv_head * group + row % group", "row % group", "decode/bf16,simt/decode"),
    _both(
        "workspace slots overlap",
        "int64_t(p.num_heads) * (p.head_dim + 1) + 3",
        "int64_t(p.num_heads) * p.head_dim + 3",
        "decode/split",
    ),
    _own("reshape: slot -1 not skipped", _RESHAPE, "  if (slot < 0) return;\n", "", "reshape", True),
    _own(
        "reshape: wrong offset",
        _RESHAPE,
        "offset = slot & (p.block_size - 1)",
        "offset = slot & (p.block_size / 2 - 1)",
        "reshape",
    ),
    _own("copy_blocks: no end", _COPY, "if (byte < p.block_bytes) store", "store", "copy_blocks"),
    # Masks
    _both("causal mask off by one", "key <= position &&", "key < position &&", "decode/bf16,prefill/bf16,simt"),
    _both("window off by one", "key > position - window", "key >= position - window", "prefill/window,simt/prefill"),
    _decode(
        "tail not masked",
        "mma_steps.cuh",
        "if (k < range.begin || k >= range.end || !transform.sees(rows.position[e >> 1], k)) s[n][e] = -INFINITY;",
        "",
        "decode/bf16",
    ),
    _simt("simt: unseen keys not masked", "!transform.sees(position, key)", "false", "simt"),
    # Arithmetic
    _decode("outputs not rescaled", "mma_steps.cuh", "      o[i][2 * r] *= factor;\n", "", "decode/bf16,prefill/bf16"),
    _decode("sums not rescaled", "mma_steps.cuh", "    state[r].sum *= factor;\n", "", "decode/bf16,prefill/bf16"),
    _decode(
        "row maximum of half the lanes",
        "mma_steps.cuh",
        "    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));\n",
        "",
        "decode/bf16,prefill/bf16",
    ),
    _decode(
        "row sum of half the lanes",
        "mma_steps.cuh",
        "    state[r].sum += __shfl_xor_sync(kFullWarp, state[r].sum, 2);\n",
        "",
        "decode/bf16",
    ),
    _decode(
        "decode: warps merged without rescaling",
        "decode_mma.cuh",
        "const float factor = rescale(state.max, merged.max);",
        "const float factor = 1.0f;",
    ),
    _combine(
        "combine: parts not weighted",
        "const float factor = rescale(*slot_log2_sum(p, slot, head), state.max);",
        "const float factor = 1.0f;",
    ),
    _combine("combine: every part merges", "(first > 0 && p.work[first - 1].seq == work.seq)", "false"),
    _combine("combine: third part left out", "p.work[first + num_parts].seq == work.seq)", "num_parts < 2)"),
    _both("sink ignored", "if (!p.sinks) return 1.0f;", "return 1.0f;", "decode/bf16,prefill/bf16,simt"),
    _both("ALiBi's sign", "static_cast<float>(key - position)", "static_cast<float>(position - key)", "decode/alibi,simt/fp8"),
    _both("soft-cap left out", "if (has_cap) x = cap * fast_tanh(x);", "", "prefill/window,simt/int8"),
    # Quantised caches
    _decode("FP8 value scale", "decode_mma.cuh", "head_scale<kFormat>(p.v_scale, kv_head)", "1.0f", "decode/fp8"),
    _decode("FP8 key scale", "decode_mma.cuh", "head_scale<kFormat>(p.k_scale, kv_head)", "1.0f", "decode/fp8"),
    _decode(
        "INT8 key scale of the value",
        "mma_steps.cuh",
        "tile.key_scales() + n * 8",
        "tile.value_scales() + n * 8",
        "decode/int8",
    ),
    _decode("e4m3 exponent", "kv_tile.cuh", "shift = e4m3 ? 4 : 3;", "shift = 3;", "decode/fp8"),
    _decode(
        "order of one-byte channels", "kv_tile.cuh", "(e & 1) * 2 + (i & 1)", "(e & 1) + (i & 1) * 2", "decode/fp8,prefill/fp8"
    ),
    _own("reshape: INT8 scale", _RESHAPE, "127.0f / largest", "126.0f / largest", "reshape/int8"),
    _own(
        "reshape: INT8 maximum of half a head",
        _RESHAPE,
        "for (int i = 16; i > 0; i /= 2) largest",
        "for (int i = 8; i > 0; i /= 2) largest",
        "reshape/int8",
    ),
    _own("reshape: FP8 scale", _RESHAPE, "to_fp8(x[j] / scale,", "to_fp8(x[j] * scale,", "reshape/fp8"),
    # Sampling
    _own(
        "sample: histogram read too early",
        _SAMPLE,
        "    __syncthreads();\n    if (threadIdx.x == 0) {",
        "    if (threadIdx.x == 0) {",
        "sample",
    ),
    _own(
        "sample: no barrier before the histogram is cleared",
        _SAMPLE,
        "    __syncthreads();  // before the next round",
        "    // before the next round",
        "sample",
        True,
    ),
    _own("sample: top_k off by one", _SAMPLE, "select(row, top_k, shared", "select(row, top_k + 1, shared", "sample"),
    _own(
        "sample: running sum of the tile lost",
        _SAMPLE,
        "    before_tile += tile_sum;\n",
        "    before_tile = tile_sum;\n",
        "sample",
    ),
    _own("bitmask: bits reversed", _LOGITS, "word >> (token % 32) & 1", "word >> (31 - token % 32) & 1", "logits"),
    _own("penalties: presence on the prompt too", _LOGITS, "if (count > 0) x -=", "x -=", "logits"),
    _own("merge: parts not weighted", _MERGE, "x += expf(lse - largest) *", "x +=", "merge"),
    # Quantised products
    _gemm("gemm: no barrier before the sum", "gemm_tile.cuh", "  __syncthreads();\n  const int r", "  const int r"),
    _gemm(
        "gemm: no barrier before the next rows",
        "gemm_tile.cuh",
        "  __syncthreads();  // the sums",
        "  // the sums",
        "rows",
        True,
    ),
    _gemm("gemm: a warp left out", "gemm_tile.cuh", "for (int w = 0; w < Shape::kWarps", "for (int w = 1; w < Shape::kWarps"),
    _gemm("gemm: a step in two warps", "gemm_tile.cuh", "return (warp + 1) * steps /", "return 1 + (warp + 1) * steps /"),
    _gemm("gemm: rows that do not exist", "gemm_tile.cuh", "row >= p.num_tokens || index", "index", "", True),
    _gemm("gemm: rows written beyond the last", "gemm_tile.cuh", "row < p.num_tokens && column <", "column <", "", True),
    _gemm("gemm: bias of the tile's first column", "gemm_tile.cuh", "(p.bias)[column + i]", "(p.bias)[column]"),
    _gemm("gemm: columns beyond the last read", "gemm_tile.cuh", "p.out_features - 8)", "p.out_features)", "", True),
    _gemm(
        "gemm: rows of another tile",
        "weight_gemm.cuh",
        "lane.first_row + 16 * r + lane.gid",
        "lane.first_row + lane.gid",
        "rows",
    ),
    _gemm("gemm: halves of a row pair exchanged", "weight_gemm.cuh", "a[r][0][2 * h], a[r][1]", "a[r][1][2 * h], a[r][0]"),
    _gemm(
        "gemm: loads the step that is computed",
        "weight_gemm.cuh",
        "next.load(p, step + 1, lane);  //",
        "next.load(p, step, lane);  //",
    ),
    _gemm("gptq: zero without its offset", "weight_tiles.cuh", "lane.column, 1, false)", "lane.column, 0, false)", "gptq"),
    _gemm(
        "gptq: scales of the first group",
        "weight_tiles.cuh",
        "scales.load(p, group, lane.column, 1",
        "scales.load(p, 0, lane.column, 1",
        "gptq",
    ),
    _gemm("gptq: pairs of neighbours", "weight_tiles.cuh", "x.x, x.z, 0x5410u", "x.x, x.y, 0x5410u", "gptq"),
    _gemm("awq: columns in order", "weight_tiles.cuh", "awq ? s[j < 4", "false ? s[j < 4", "awq"),
    _gemm("awq: word stride", "weight_tiles.cuh", "from[int64_t(i) * words]", "from[i]", "awq"),
    _gemm("fp8: exponent", "weight_tiles.cuh", "kBf16 ? 4 : 1", "kBf16 ? 3 : 1", "fp8"),
    _gemm("fp8: scale of the first column", "weight_tiles.cuh", "p.one_scale ? 0 : column]", "0]", "fp8"),
    _gemm("fp8: tail of k read", "weight_tiles.cuh", "p.in_features - kDepth)", "p.in_features)", "fp8", True),
    _int8("int8: input scale of the first row", "p.input_scale[row]", "p.input_scale[0]"),
    _int8("int8: upper half of k", "mma_m16n8k32(acc[r][j], high, b[j].z", "mma_m16n8k32(acc[r][j], high, b[j].x"),
    _int8("quantize: maximum of one warp", "w < kQuantizeWarps; w++) largest", "w < 1; w++) largest"),
    _int8("quantize: no barrier before the maximum", "  __syncthreads();\n#pragma unroll", "#pragma unroll"),
    _int8("quantize: 126 steps", "? 127.0f / largest", "? 126.0f / largest"),
    # Layers
    _own(
        "rms_norm: a warp left out",
        _NORM,
        "for (int i = 0; i < kWarps; i++) sum",
        "for (int i = 1; i < kWarps; i++) sum",
        "rms_norm",
    ),
    _own("rms_norm: residual not rounded", _NORM, "to_float(from_float<T>(r[j] + x[j]))", "r[j] + x[j] + x[j]", "rms_norm"),
    _rotary("rotary: sign of the sine", "a * cos - b * sin", "a * cos + b * sin"),
    _rotary(
        "rotary: sine of the piece's first pair", "cos_sin[i + j], cos_sin[half + i + j]", "cos_sin[i + j], cos_sin[half + i]"
    ),
    _own(
        "activation: gate and up exchanged",
        _ACTIVATION,
        "activate<kActivation>(x[j]) * up[j]",
        "activate<kActivation>(up[j]) * x[j]",
        "activation",
    ),
]
