"""Weights of 8 bits that are multiplied with activations of 16: what quantised weights become where CPUs have AMX.

There, the products of bytes cost so little that scaling every 32 of them, as `quantized_linear` does, takes most of the time.
With up to 576 weights to a scale, and activations of 16 bits with a scale for a whole row, little is left to scale, and the
predictions are as close to those of the unquantised model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.layers.packed_weight import GatedWeight, PackedWeight, QuantizedPanels, pack, pack_gated
from pyengine.layers.weights import RepackedTensor, Weight
from pyengine.ops import Ops
from pyengine.ops.host_memory import ChunkAllocator, empty_pages

_MEMORY = ChunkAllocator()

# kW8A16Panel, kW8A16Step, kW8A16MaxGroupSteps, kW8A16StepBytes and kW8A16Factors in csrc/quantization/params.h
_PANEL, _STEP, _GROUP_STEPS, _STEP_BYTES, _FACTORS = 32, 64, 9, 2048, 64
#: Rows that are floats at a time, on their way from one form to the other; whole panels of gate and up.
_ROWS = 1024


class RepackedWeight:
    """A weight [out, in] as `w8a16_linear` takes it.

    Args:
        data: int8 [ceil(out / 32), ceil(in / 64), 2048].
        factors: fp32 [ceil(out / 32), ceil(in / 576), 64].
        shape: (out, in).
        dtype: of the rows that `rows` gives.
    """

    def __init__(self, data: Tensor, factors: Tensor, shape: tuple[int, int], ops: Ops, dtype: torch.dtype) -> None:
        self.data, self.factors = data, factors
        self.out_features, self.in_features = shape
        self._ops, self._dtype = ops, dtype

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] = x [num_tokens, in] times this weight transposed, plus bias [out]."""
        self._ops.w8a16_linear(out, x, self.data, self.factors, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` (int64 [num_tokens]) of the weight, dequantised: [num_tokens, in]."""
        out = torch.empty(indices.shape[0], self.in_features, dtype=self._dtype)
        self._ops.w8a16_embedding(out, indices, self.data, self.factors)
        return out


class RepackedGatedWeight:
    """Weights [out, in] of a gate and of what it gates, in panels turn about.

    Args:
        data: int8 [2 * out / 32, ceil(in / 64), 2048].
        factors: fp32 [2 * out / 32, ceil(in / 576), 64].
        activation: silu or gelu_tanh.
    """

    def __init__(self, data: Tensor, factors: Tensor, activation: str, ops: Ops) -> None:
        self.data, self.factors, self.activation = data, factors, activation
        self._ops = ops

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        self._ops.w8a16_gated_linear(out, x, self.data, self.factors, self.activation, bias)


def repack_gated(weights: Sequence[Weight], activation: str | None, ops: Ops) -> RepackedGatedWeight | None:
    """One weight of gate and up; None where no product applies the activation, or there are no whole panels."""
    repacked = [weight for weight in weights if isinstance(weight, RepackedTensor)]
    if activation is None or len(repacked) != 2 or repacked[0].shape[0] % _PANEL:
        return None
    num_rows, in_features = repacked[0].shape
    packing = _Packing((2 * num_rows, in_features), ops)
    part = empty_pages((_ROWS // 2, in_features), torch.float32)
    for start in range(0, num_rows, len(part)):
        count = min(len(part), num_rows - start)
        panels = packing.take(2 * count).view(-1, 2, _PANEL, in_features)
        for which, weight in enumerate(repacked):
            _dequantize(weight, start, part[:count], ops)
            panels[:, which].copy_(part[:count].unflatten(0, (-1, _PANEL)))
    return RepackedGatedWeight(*packing.finish(), activation, ops)


def repack(weights: Sequence[RepackedTensor], ops: Ops, dtype: torch.dtype) -> PackedWeight:
    """Repack projections [out, in] of any formats, one after another, into one weight."""
    shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
    packing = _Packing(shape, ops)
    for weight in weights:
        start = 0
        while start < weight.shape[0]:
            rows = packing.take(min(packing.room, weight.shape[0] - start))
            _dequantize(weight, start, rows, ops)
            start += len(rows)
    return RepackedWeight(*packing.finish(), shape, ops, dtype)


def pack_gated_any(weights: Sequence[Weight], activation: str | None, ops: Ops, dtype: torch.dtype) -> GatedWeight | None:
    """One weight of gate and up where a product applies the activation, repacked or what `pack_gated` takes; None elsewhere."""
    return repack_gated(weights, activation, ops) or pack_gated(weights, activation, ops, dtype)


def pack_any(weights: Sequence[Weight], ops: Ops, dtype: torch.dtype) -> PackedWeight:
    """Pack projections [out, in] of one form, one after another: repacked ones, or what `pack` takes."""
    repacked = [weight for weight in weights if isinstance(weight, RepackedTensor)]
    return repack(repacked, ops, dtype) if repacked else pack(weights, ops, dtype)


class _Packing:
    """Packs rows that come in order, some at a time. What is only needed meanwhile goes back to the system, not to the heap.

    Args:
        shape: (out, in) of the weight.
    """

    def __init__(self, shape: tuple[int, int], ops: Ops) -> None:
        num_panels, num_steps = -(-shape[0] // _PANEL), -(-shape[1] // _STEP)
        self._data = _MEMORY.empty((num_panels, num_steps, _STEP_BYTES), torch.int8)
        self._factors = _MEMORY.empty((num_panels, -(-num_steps // _GROUP_STEPS), _FACTORS), torch.float32)
        self._rows = empty_pages((min(_ROWS, num_panels * _PANEL), shape[1]), torch.float32)
        self._filled = self._panel = 0
        self._ops = ops

    @property
    def room(self) -> int:
        """Rows that may be taken at once."""
        return len(self._rows) - (self._filled % len(self._rows))

    def take(self, count: int) -> Tensor:
        """The next `count` rows, fp32 [count, in], for the caller to fill before the next call."""
        if self._filled == len(self._rows):
            self._pack()
        self._filled += count
        return self._rows[self._filled - count : self._filled]

    def finish(self) -> tuple[Tensor, Tensor]:
        """Data and factors of the whole weight."""
        self._pack()
        return self._data, self._factors

    def _pack(self) -> None:
        end = self._panel + -(-self._filled // _PANEL)
        self._ops.pack_w8a16_weight(self._data[self._panel : end], self._factors[self._panel : end], self._rows[: self._filled])
        self._panel, self._filled = end, 0


def _dequantize(weight: RepackedTensor, start: int, out: Tensor, ops: Ops) -> None:
    """Rows from `start` on to out, fp32 [rows, in]."""
    blocks = weight.source.blocks[start : start + len(out)]
    panels = QuantizedPanels.pack([blocks], weight.source.format, ops, torch.float32, empty_pages)
    ops.quantized_embedding(out, torch.arange(len(out)), panels.data, weight.source.format)
