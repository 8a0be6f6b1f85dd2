"""Blocks of GGUF's quantised formats: random ones, and ones made from a weight.

The `gguf` package reads all of them, and makes those without a K."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

#: Format -> byte offsets, in a block, of its fp16 factors: scale, minimum.
FORMATS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def block_sizes(kind: str) -> tuple[int, int]:
    """Values and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def random_blocks(kind: str, rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """uint8 [rows, row bytes]: any bit pattern, but for the fp16 factors: scales of 0.01 to 0.04, minima of either sign."""
    generator = torch.Generator().manual_seed(seed)
    values, size = block_sizes(kind)
    blocks = torch.randint(0, 256, (rows, columns // values, size), dtype=torch.uint8, generator=generator)
    for factor, offset in enumerate(FORMATS[kind]):
        number = 0.01 * 4 ** torch.rand(blocks.shape[:2], generator=generator)
        if factor == 1:
            number *= 8 * torch.randn(blocks.shape[:2], generator=generator)
        blocks[..., offset : offset + 2] = number.half()[..., None].view(torch.uint8)
    return blocks.flatten(1)


def dequantize_blocks(blocks: Tensor, kind: str) -> Tensor:
    """fp32 [rows, columns], by the `gguf` package."""
    return torch.from_numpy(dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def quantize_blocks(weight: np.ndarray, kind: str) -> np.ndarray:
    """fp32 [rows, columns] to uint8 [rows, row bytes], values rounded to nearest."""
    if not kind.endswith("_K"):
        return quantize(np.ascontiguousarray(weight), gguf.GGMLQuantizationType[kind])
    rows = len(weight)
    x = weight.reshape(rows, -1, 8, 32)  # [rows, blocks, sub-blocks, 32]
    return (_six_bit_blocks(x) if kind == "Q6_K" else _k_blocks(x, 5 if kind == "Q5_K" else 4)).reshape(rows, -1)


def _k_blocks(x: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K, Q5_K: x = scale * 6-bit scale * value - minimum * 6-bit minimum."""
    minima = np.maximum(-x.min(-1), 0)
    scales = (x.max(-1) + minima) / (2**bits - 1)  # [rows, blocks, 8]
    scale, six_scale = _six_bits(scales)
    minimum, six_minimum = _six_bits(minima)
    step = scale.astype(np.float32) * six_scale
    q = (x + (minimum.astype(np.float32) * six_minimum)[..., None]) / np.where(step == 0, 1, step)[..., None]
    q = np.clip(np.rint(q), 0, 2**bits - 1).astype(np.uint8)
    low, high = q[..., 0::2, :] & 15, q[..., 1::2, :] & 15
    parts = [scale.view(np.uint8), minimum.view(np.uint8), _packed_scales(six_scale, six_minimum)]
    if bits == 5:
        parts.append(((q >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(-2, dtype=np.uint8))
    return np.concatenate([*parts, (low | high << 4).reshape(*q.shape[:2], 128)], axis=-1)


def _six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp16 [rows, blocks, 1] and integers of 0 to 63 [rows, blocks, 8] whose products are the numbers, about."""
    unit = (numbers.max(-1, keepdims=True) / 63).astype(np.float16)
    integers = np.rint(numbers / np.where(unit == 0, 1, unit).astype(np.float32))
    return unit, np.clip(integers, 0, 63).astype(np.uint8)


def _packed_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """12 bytes: the first four scales and minima, above them the high bits of the last four, whose low bits come last."""
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = minima[..., :4] | minima[..., 4:] >> 4 << 6
    return np.concatenate([first, second, (scales[..., 4:] & 15) | (minima[..., 4:] & 15) << 4], axis=-1)


def _six_bit_blocks(x: np.ndarray) -> np.ndarray:
    """Q6_K: x = scale * int8 scale of 16 values * (value - 32)."""
    halves = x.reshape(*x.shape[:2], 16, 16)
    scales = np.abs(halves).max(-1) / 31
    unit = (scales.max(-1, keepdims=True) / 127).astype(np.float16)
    int8_scales = np.rint(scales / np.where(unit == 0, 1, unit).astype(np.float32)).astype(np.int8)
    step = unit.astype(np.float32) * int8_scales
    q = np.rint(halves / np.where(step == 0, 1, step)[..., None])
    q = (np.clip(q, -32, 31) + 32).astype(np.uint8).reshape(*x.shape[:2], 2, 4, 32)
    low = (q[..., :2, :] & 15) | (q[..., 2:, :] & 15) << 4  # [rows, blocks, 2, 2, 32]
    high = ((q >> 4) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]).sum(-2, dtype=np.uint8)
    shape = (*x.shape[:2], -1)
    return np.concatenate([low.reshape(shape), high.reshape(shape), int8_scales.view(np.uint8), unit.view(np.uint8)], axis=-1)
