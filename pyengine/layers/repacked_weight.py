"""Weights of 8 bits that are multiplied with activations of 16: what quantised weights become where CPUs have AMX.

There, the products of bytes cost so little that scaling every 32 of them, as `quantized_linear` does, takes most of the time.
With 256 weights to a scale, and activations of 16 bits with a scale for a whole row, little is left to scale, and the
predictions are as close to those of the unquantised model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyengine.layers.activation import GatedActivation
from pyengine.layers.packed_weight import PackedWeight, QuantizedPanels, pack
from pyengine.layers.weights import RepackedTensor, Weight
from pyengine.ops import Ops
from pyengine.ops.host_memory import ChunkAllocator

_MEMORY = ChunkAllocator()

# kW8A16Panel, kW8A16Step, kW8A16Group, kW8A16StepBytes and kW8A16Factors in csrc/quantization/params.h
_PANEL, _STEP, _GROUP, _STEP_BYTES, _FACTORS = 32, 64, 256, 2048, 64
#: Rows that are floats at a time, on their way from one form to the other.
_ROWS = 1024


class RepackedWeight:
    """A weight [out, in] as `w8a16_linear` takes it.

    Args:
        data: int8 [ceil(out / 32), ceil(in / 64), 2048].
        factors: fp32 [ceil(out / 32), ceil(in / 256), 64].
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
    """Two weights [out, in], of a gate and of what it gates, in panels turn about: act(x gate^T) * (x up^T) is one product.

    Args:
        data: int8 [2 * out / 32, ceil(in / 64), 2048].
        factors: fp32 [2 * out / 32, ceil(in / 256), 64].
        activation: silu or gelu_tanh.
    """

    def __init__(self, data: Tensor, factors: Tensor, activation: str, ops: Ops) -> None:
        self.data, self.factors, self.activation = data, factors, activation
        self._ops = ops

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] from x [num_tokens, in] and bias [2 * out], the gate's first."""
        self._ops.w8a16_gated_linear(out, x, self.data, self.factors, self.activation, bias)


def repack_gated(weights: Sequence[Weight], activation: GatedActivation | None, ops: Ops) -> RepackedGatedWeight | None:
    """One weight of gate and up; None where there is no activation, none that the product applies, or no whole panels."""
    repacked = [weight for weight in weights if isinstance(weight, RepackedTensor)]
    if activation is None or activation.fused_name is None or len(repacked) != 2 or repacked[0].shape[0] % _PANEL:
        return None
    gate, up = (_dequantized([weight], ops) for weight in repacked)
    pairs = (
        torch.stack([a.unflatten(0, (-1, _PANEL)), b.unflatten(0, (-1, _PANEL))], 1) for a, b in zip(gate, up, strict=True)
    )
    shape = (2 * repacked[0].shape[0], repacked[0].shape[1])
    data, factors = _packed((pair.flatten(0, 2) for pair in pairs), shape, ops)
    return RepackedGatedWeight(data, factors, activation.fused_name, ops)


def pack_any(weights: Sequence[Weight], ops: Ops, dtype: torch.dtype) -> PackedWeight:
    """Pack projections [out, in] of one form, one after another: repacked ones, or what `pack` takes."""
    repacked = [weight for weight in weights if isinstance(weight, RepackedTensor)]
    return repack(repacked, ops, dtype) if repacked else pack(weights, ops, dtype)


def repack(weights: Sequence[RepackedTensor], ops: Ops, dtype: torch.dtype) -> PackedWeight:
    """Repack projections [out, in] of any formats, one after another, into one weight."""
    shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
    data, factors = _packed(_whole_panels(_dequantized(weights, ops)), shape, ops)
    return RepackedWeight(data, factors, shape, ops, dtype)


def _packed(parts: Iterator[Tensor], shape: tuple[int, int], ops: Ops) -> tuple[Tensor, Tensor]:
    """Data and factors of a weight of `shape`, whose rows come in parts of whole panels but for the last."""
    num_panels = -(-shape[0] // _PANEL)
    data = _MEMORY.empty((num_panels, -(-shape[1] // _STEP), _STEP_BYTES), torch.int8)
    factors = _MEMORY.empty((num_panels, -(-shape[1] // _GROUP), _FACTORS), torch.float32)
    panel = 0
    for values in parts:
        end = panel + -(-len(values) // _PANEL)
        ops.pack_w8a16_weight(data[panel:end], factors[panel:end], values)
        panel = end
    return data, factors


def _dequantized(weights: Sequence[RepackedTensor], ops: Ops) -> Iterator[Tensor]:
    """All rows in order, some at a time: fp32 [rows, in]."""
    for weight in weights:
        blocks = weight.source.blocks
        for start in range(0, len(blocks), _ROWS):
            part = blocks[start : start + _ROWS]
            panels = QuantizedPanels.pack([part], weight.source.format, ops, torch.float32, _temporary)
            yield panels.rows(torch.arange(len(part)))


def _temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _whole_panels(parts: Iterator[Tensor]) -> Iterator[Tensor]:
    """The same rows in parts of whole panels, but for the last."""
    rest: Tensor | None = None
    for part in parts:
        rows = part if rest is None else torch.cat([rest, part])
        whole = len(rows) // _PANEL * _PANEL
        rest = rows[whole:] if whole < len(rows) else None
        if whole:
            yield rows[:whole]
    if rest is not None:
        yield rest
