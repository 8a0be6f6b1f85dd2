"""Fake kernels: what torch runs instead of an op when it only traces.

Every op writes into tensors that the caller allocated and returns nothing, so there is no shape to infer.
"""

from __future__ import annotations

from typing import Any

import torch

#: Ops that are built in both namespaces.
DEVICE_OPS: tuple[str, ...] = (
    "reshape_and_cache",
    "paged_attention",
    "copy_blocks",
    "swap_blocks",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "gelu_and_mul",
    "rotary_reshape_and_cache",
    "merge_attention_states",
    "apply_penalties",
    "apply_bitmask",
    "sample_top_k_top_p",
    "gptq_linear",
    "awq_linear",
    "fp8_linear",
    "int8_linear",
    "quantize_int8_rows",
)
#: Ops of namespace `pyengine` alone, for the CPU.
CPU_OPS: tuple[str, ...] = (
    "pack_linear_weight",
    "linear",
    "gated_linear",
    "pack_quantized_weight",
    "quantized_linear",
    "quantized_gated_linear",
    "quantized_embedding",
    "pack_w8a16_weight",
    "w8a16_linear",
    "w8a16_gated_linear",
    "w8a16_embedding",
    "argmax",
)


def register_fakes(namespace: str) -> None:
    """Register the fake kernels of `namespace` ("pyengine" or "pyengine_emulated"), once."""
    names = DEVICE_OPS + CPU_OPS if namespace == "pyengine" else DEVICE_OPS
    for name in names:
        torch.library.register_fake(f"{namespace}::{name}", _returns_nothing)


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None
