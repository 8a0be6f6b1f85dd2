"""The typed set of compiled ops, one for each device. This is the only way from Python into the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pyengine.errors import ConfigError
from pyengine.ops._extension import load_core, load_emulated, namespace
from pyengine.ops._fake import CPU_OPS, DEVICE_OPS
from pyengine.ops._signatures import (
    ApplyBitmask,
    ApplyPenalties,
    Argmax,
    AwqLinear,
    CopyBlocks,
    Fp8Linear,
    FusedAddRmsNorm,
    GatedLinear,
    GeluAndMul,
    GptqLinear,
    Int8Linear,
    LinearOp,
    MergeAttentionStates,
    PackLinearWeight,
    PackQuantizedWeight,
    PackW8A16Weight,
    PagedAttention,
    QuantizedEmbedding,
    QuantizedGatedLinear,
    QuantizedLinear,
    QuantizeInt8Rows,
    ReshapeAndCache,
    RmsNorm,
    RotaryEmbeddingOp,
    RotaryReshapeAndCache,
    SampleTopKTopP,
    SiluAndMul,
    SwapBlocks,
    W8A16Embedding,
    W8A16GatedLinear,
    W8A16Linear,
)

__all__ = ["CPU_OPS", "DEVICE_OPS", "Ops", "get_ops", "load_core", "load_emulated"]


@dataclass(frozen=True)
class Ops:
    """One device's ops, called as their schemas in docs/architecture.md say. Shapes: the types' docstrings.

    An op checks its arguments first: a wrong one is a ValueError that names the op, the tensor and both values, and nothing
    is written.
    """

    name: str  # cpu, cuda or emulated
    reshape_and_cache: ReshapeAndCache
    paged_attention: PagedAttention
    copy_blocks: CopyBlocks
    swap_blocks: SwapBlocks
    rms_norm: RmsNorm
    fused_add_rms_norm: FusedAddRmsNorm
    rotary_embedding: RotaryEmbeddingOp
    silu_and_mul: SiluAndMul
    gelu_and_mul: GeluAndMul
    rotary_reshape_and_cache: RotaryReshapeAndCache
    merge_attention_states: MergeAttentionStates
    apply_penalties: ApplyPenalties
    apply_bitmask: ApplyBitmask
    sample_top_k_top_p: SampleTopKTopP
    gptq_linear: GptqLinear
    awq_linear: AwqLinear
    fp8_linear: Fp8Linear
    int8_linear: Int8Linear
    quantize_int8_rows: QuantizeInt8Rows
    # CPU tensors only, also in the sets of other devices:
    pack_linear_weight: PackLinearWeight
    linear: LinearOp
    gated_linear: GatedLinear
    pack_quantized_weight: PackQuantizedWeight
    quantized_linear: QuantizedLinear
    quantized_gated_linear: QuantizedGatedLinear
    quantized_embedding: QuantizedEmbedding
    pack_w8a16_weight: PackW8A16Weight
    w8a16_linear: W8A16Linear
    w8a16_gated_linear: W8A16GatedLinear
    w8a16_embedding: W8A16Embedding
    argmax: Argmax


@cache
def get_ops(name: str) -> Ops:
    """The ops for tensors of device `name`: "cpu", "cuda", or "emulated" (the CUDA kernels run on the CPU).

    Raises:
        ConfigError: an unknown name, an extension that was not built, or "cuda" in a build without CUDA kernels.
    """
    if name not in ("cpu", "cuda", "emulated"):
        raise ConfigError("device", f"no ops for {name!r}; there are cpu, cuda and emulated")
    core = load_core()
    device_ops = cpu_ops = namespace("pyengine")
    if name == "cuda" and not core.has_cuda:
        raise ConfigError("device", "this build of pyengine has no CUDA kernels; rebuild it with PYENGINE_CUDA=1")
    if name == "emulated":
        load_emulated()
        device_ops = namespace("pyengine_emulated")
    overloads = {op: getattr(device_ops, op).default for op in DEVICE_OPS}
    overloads |= {op: getattr(cpu_ops, op).default for op in CPU_OPS}
    return Ops(name=name, **overloads)
