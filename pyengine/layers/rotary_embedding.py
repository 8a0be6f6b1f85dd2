"""Rotary position embedding (Su et al., 2021) and the ways to stretch it over longer contexts.

Every way ends in one fp32 table of cosines and sines, made once; the kernels only read it. It is computed in fp32, as
Transformers does, so that both round alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.ops import Ops


class RotaryEmbedding:
    """Rotates queries and keys by their positions, the two halves of a head being the pairs (NeoX order).

    Args:
        head_dim: all of it is rotated.
        max_position: positions 0 .. max_position - 1 are in the table.
        theta: base of the frequencies.
        scaling: None, or a mapping with `rope_type` and that type's own parameters, as Hugging Face's config.json has them.

    Raises:
        ModelLoadError: for a type that is not supported, or a parameter that it lacks.
    """

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        *,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self._ops = ops
        inv_freq, attention_factor = scaled_frequencies(head_dim, max_position, theta, scaling)  # [head_dim / 2]
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inv_freq  # [max_position, head_dim / 2]
        table = torch.empty(max_position, head_dim, dtype=torch.float32)
        torch.cos(angles, out=table[:, : head_dim // 2])
        torch.sin(angles, out=table[:, head_dim // 2 :])
        #: fp32 [max_position, head_dim], cosines then sines.
        self.cos_sin_cache = table.mul_(attention_factor).to(device)

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> None:
        """Rotate in place: positions int64 [num_tokens]; query, key [num_tokens, heads, head_dim]."""
        self._ops.rotary_embedding(positions, query, key, self.cos_sin_cache, True)


def scaled_frequencies(
    rotary_dim: int, max_position: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Frequencies fp32 [rotary_dim / 2] in radians a position, and a factor for the cosines and sines.

    `dynamic` (NTK by length) changes nothing up to max_position, which is as far as a sequence may grow here, so it is the same
    as none. `frequency_factors` is GGUF's form of Llama 3's scaling: one divisor a frequency.
    """
    if not 1 < theta < math.inf:  # at 1 and below, frequencies do not fall
        raise ModelLoadError(f"rope_theta is {theta:g}, not above 1")
    inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if scaling is None:
        return inv_freq, 1.0
    rope_type = scaling.get("rope_type")
    if rope_type == "dynamic":
        return inv_freq, 1.0
    if rope_type == "linear":
        return inv_freq / _positive(scaling, "factor"), 1.0
    if rope_type == "llama3":
        return _llama3(inv_freq, scaling, max_position), 1.0
    if rope_type == "yarn":
        return _yarn(inv_freq, theta, scaling, max_position)
    if rope_type == "frequency_factors":
        factors = torch.tensor(scaling["factors"], dtype=torch.float32)
        if factors.shape != inv_freq.shape:
            raise ModelLoadError(f"{factors.numel()} rotary frequency factors, but {inv_freq.numel()} frequencies")
        return inv_freq / factors, 1.0
    raise ModelLoadError(f"rope_type {rope_type!r} is not supported; supported: default, linear, dynamic, llama3, yarn")


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        problem = "is missing" if value is None else f"is {value!r}, not a number"
        raise ModelLoadError(f"rope_scaling of type {scaling['rope_type']}: {key} {problem}")
    return float(value)


def _positive(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _number(scaling, key, default)
    if not 0 < value < math.inf:
        raise ModelLoadError(f"rope_scaling of type {scaling['rope_type']}: {key} is {value:g}, not a positive number")
    return value


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any], max_position: int) -> Tensor:
    """Llama 3.1's: low frequencies are divided, high ones kept, and those between are blended."""
    factor = _positive(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        raise ModelLoadError(f"rope_scaling of type llama3: high_freq_factor {high:g} is not above low_freq_factor {low:g}")
    original = _number(scaling, "original_max_position_embeddings", max_position)
    wavelength = 2 * math.pi / inv_freq  # positions in one turn
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 0: divided whole; 1: kept whole
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def _yarn(inv_freq: Tensor, theta: float, scaling: Mapping[str, Any], max_position: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): blends by the number of turns in the original context, and sharpens the logits."""
    original = _positive(scaling, "original_max_position_embeddings", max_position)
    factor = _positive(scaling, "factor", max_position / original)
    num_freqs = inv_freq.numel()

    def dimension_with(turns: float) -> float:
        """The (fractional) index of the frequency that turns so often within the original context."""
        return num_freqs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = dimension_with(_positive(scaling, "beta_fast", 32.0))
    last = dimension_with(_positive(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_freqs - 1)
    last = last + 0.001 if first == last else last
    keep = 1 - ((torch.arange(num_freqs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    blended = inv_freq / factor * (1 - keep) + inv_freq * keep
    if "attention_factor" in scaling:
        return blended, _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        scale = _yarn_scale(factor, _number(scaling, "mscale"))
        return blended, scale / _yarn_scale(factor, _number(scaling, "mscale_all_dim"))
    return blended, _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
