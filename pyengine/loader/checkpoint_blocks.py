"""What the weights of quantised Hugging Face checkpoints become on CPUs: blocks that `quantized_linear` multiplies with.

The ops that take the checkpoints' own layouts are plain loops there. Blocks of 32 hold

- 4 bits, all zeros 8: as Q4_0, exactly where a scale is one of fp16;
- 4 bits, other zeros: as Q4_1; the minimum, -zero * scale, is rounded to fp16;
- INT8: as Q8_0; the scale of a row is rounded to fp16;
- FP8, and 4 bits whose groups are not of neighbours (act order): as Q8_0, rounded again, by up to a 254th of the block's
  largest value. Rounding to FP8 moved a value by up to a 16th of itself; a group's range had at most 15 steps of 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.layers.weights import CheckpointWeight, QuantizedTensor
from pyengine.loader.four_bit import codes_and_zeros
from pyengine.loader.quantize import quantize

_BLOCK = 32
_SYMMETRIC_ZERO = 8  # Q4_0's
#: A scale that fp16 cannot hold this well would move the largest codes by more than half a step.
_MAX_SCALE_ERROR = 2.0**-8


def dequantize(weight: CheckpointWeight) -> Tensor:
    """The values, fp32 [out, in]."""
    if weight.zeros is None:
        return weight.weight.float() * weight.scales.view(-1, 1)
    codes, zeros = codes_and_zeros(weight)
    groups = (codes.float().unflatten(0, (-1, weight.group_size)) - zeros.float()[:, None]) * weight.scales.float()[:, None]
    values = groups.flatten(0, 1).T  # [out, in]
    if weight.order is None:
        return values.contiguous()
    result = torch.empty(weight.shape)
    result[:, weight.order] = values
    return result


def to_blocks(name: str, weight: CheckpointWeight) -> QuantizedTensor:
    """The same matrix for CPU kernels.

    Args:
        name: of its tensor, for errors.

    Raises:
        ModelLoadError: naming the tensor, where its rows are not whole blocks, or a scale is too large or small for fp16.
    """
    if weight.shape[1] % _BLOCK:
        raise ModelLoadError(
            f"tensor {name} has rows of {weight.shape[1]} values, but on cpu they must be multiples of {_BLOCK};"
            " quantization=none dequantises them"
        )
    if weight.kind == "fp8" or weight.order is not None:
        return quantize(name, dequantize(weight), "int8")
    if weight.kind == "int8":
        return _int8_blocks(name, weight)
    return _four_bit_blocks(name, weight)


def _int8_blocks(name: str, weight: CheckpointWeight) -> QuantizedTensor:
    rows, columns = weight.shape
    scale = _fp16_scale(name, weight.scales.expand(rows))[:, None, None].expand(-1, columns // _BLOCK, 1)  # [out, blocks, 1]
    codes = weight.weight.unflatten(1, (-1, _BLOCK))
    blocks = torch.cat([scale.contiguous().view(torch.uint8), codes.view(torch.uint8)], -1)  # [out, blocks, 34]
    return QuantizedTensor(blocks.flatten(1), "Q8_0", weight.shape)


def _four_bit_blocks(name: str, weight: CheckpointWeight) -> QuantizedTensor:
    codes, zeros = codes_and_zeros(weight)
    q = codes.T.unflatten(1, (-1, _BLOCK))  # [out, blocks, 32]
    low_and_high = q[..., :16] | q[..., 16:] << 4
    scale = _fp16_scale(name, weight.scales)
    factors, format = [scale], "Q4_0"
    if (zeros != _SYMMETRIC_ZERO).any():
        minimum = (-zeros.float() * scale.float()).half()
        if not minimum.isfinite().all():
            raise ModelLoadError(f"tensor {name} has scales that are too large for fp16 minima")
        factors, format = [scale, minimum], "Q4_1"
    # Each factor [groups, out] -> bytes [out, blocks, 2]
    repeats = weight.group_size // _BLOCK
    per_block = [factor.T.repeat_interleave(repeats, 1).unsqueeze(-1).contiguous().view(torch.uint8) for factor in factors]
    return QuantizedTensor(torch.cat([*per_block, low_and_high], -1).flatten(1), format, weight.shape)


def _fp16_scale(name: str, scale: Tensor) -> Tensor:
    """scale as fp16, once that is close enough."""
    rounded = scale.half()
    if not ((rounded.float() - scale.float()).abs() <= scale.float().abs() * _MAX_SCALE_ERROR).all():
        raise ModelLoadError(f"tensor {name} has scales that fp16 cannot hold; quantization=none dequantises it")
    return rounded
