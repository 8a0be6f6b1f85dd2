"""Random quantised weights in the layouts of GPTQ, AWQ, FP8 and INT8 checkpoints, and what they mean in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of a word, from its lowest bits


def pack_words(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit values along `dim` to one int32: position i of a word holds value order[i]."""
    moved = values.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(moved[..., column] << (4 * i) for i, column in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


@dataclass(frozen=True)
class CheckpointWeight:
    """`arguments`: the op's, after its input. `dense`: float64 [out_features, in_features], as the op has to read them."""

    op: str
    arguments: tuple[Any, ...]
    dense: Tensor


def four_bit_weight(op: str, k: int, n: int, group: int, dtype: torch.dtype) -> CheckpointWeight:
    """For gptq_linear or awq_linear; values of about 0.1."""
    q, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (k // group, n))
    scales = (torch.rand(k // group, n) * 0.02 + 0.005).to(dtype)
    if op == "gptq_linear":
        packed, packed_zeros, zero = pack_words(q, 0), pack_words(zeros, 1), zeros + 1
    else:
        packed, packed_zeros, zero = pack_words(q, 1, AWQ_ORDER), pack_words(zeros, 1, AWQ_ORDER), zeros
    difference = (q - zero.repeat_interleave(group, 0)).float()
    dense = (difference * scales.float().repeat_interleave(group, 0)).to(dtype)
    return CheckpointWeight(op, (packed, scales, packed_zeros, group), dense.double().T)


def row_scaled_weight(op: str, k: int, n: int, one_scale: bool) -> CheckpointWeight:
    """For fp8_linear or int8_linear (after its input_scale)."""
    if op == "fp8_linear":
        weight = torch.randn(n, k).clamp(-400, 400).to(torch.float8_e4m3fn)
    else:
        weight = torch.randint(-127, 128, (n, k)).to(torch.int8)
    scale = torch.rand(1 if one_scale else n) * (0.02 if op == "int8_linear" else 0.2) + 0.001
    return CheckpointWeight(op, (weight, scale), weight.float().double() * scale.double()[:, None])


def random_weight(op: str, k: int, n: int, *, group: int = 32, dtype: torch.dtype, one_scale: bool = False) -> CheckpointWeight:
    """Of any of the four ops."""
    if op in ("gptq_linear", "awq_linear"):
        return four_bit_weight(op, k, n, group, dtype)
    return row_scaled_weight(op, k, n, one_scale)
