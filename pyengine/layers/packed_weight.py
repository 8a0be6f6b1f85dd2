"""Weights in the forms that the CPU kernels read: panels of 16 output features, of plain values or of quantised blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyengine.layers.weights import QuantizedTensor, Weight, plain
from pyengine.ops import Ops
from pyengine.ops.host_memory import ChunkAllocator

_MEMORY = ChunkAllocator()

#: Output features in one panel of a packed weight (`kLinearPanel` in csrc/layers/params.h, `kQuantPanel` in quantization's).
PANEL = 16


@dataclass(frozen=True)
class TileSizes:
    """Of a quantised format, as csrc/quantization/params.h has them."""

    block_size: int  # values of a row that are stored together
    block_bytes: int  # what they take in a file
    tile_bytes: int  # 16 such blocks, packed


FORMATS = {
    "Q4_0": TileSizes(32, 18, 288),
    "Q4_1": TileSizes(32, 20, 320),
    "Q5_0": TileSizes(32, 22, 352),
    "Q5_1": TileSizes(32, 24, 384),
    "Q8_0": TileSizes(32, 34, 544),
    "Q4_K": TileSizes(256, 144, 2368),
    "Q5_K": TileSizes(256, 176, 2880),
    "Q6_K": TileSizes(256, 210, 3360),
}


class PackedWeight(Protocol):
    """A weight [out, in] that only the kernels read."""

    out_features: int

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] = x [num_tokens, in] times this weight transposed, plus bias [out]."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` (int64 [num_tokens]) of the weight, dequantised: [num_tokens, in]."""


class GatedWeight(Protocol):
    """Two weights [out, in], of a gate and of what it gates: act(x gate^T) * (x up^T) is one product."""

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] from x [num_tokens, in] and bias [2 * out], the gate's first."""


class PlainPanels:
    """Plain values.

    Args:
        data: [ceil(out / 16), in, 16].
        out_features: rows; the last panel may have more.
    """

    def __init__(self, data: Tensor, out_features: int, ops: Ops) -> None:
        self.data, self.out_features = data, out_features
        self._ops = ops

    @classmethod
    def pack(cls, tensors: Sequence[Tensor], ops: Ops, dtype: torch.dtype) -> PlainPanels:
        """Pack tensors [out, in], one after another, converted to `dtype`."""
        num_rows = sum(len(tensor) for tensor in tensors)
        data = _MEMORY.empty((-(-num_rows // PANEL), tensors[0].shape[1], PANEL), dtype)
        for panels, tensor in _panels(data, tensors):
            ops.pack_linear_weight(panels, tensor.to(dtype).contiguous())
        return cls(data, num_rows, ops)

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        self._ops.linear(out, x, self.data, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return self.data[indices // PANEL, :, indices % PANEL]


class QuantizedPanels:
    """Blocks of a GGUF format.

    Args:
        data: uint8 [ceil(out / 16), in / block size, tile bytes].
        out_features: rows; the last panel may have more.
        format: of the blocks.
        dtype: of the rows that `rows` gives.
    """

    def __init__(self, data: Tensor, out_features: int, format: str, ops: Ops, dtype: torch.dtype) -> None:
        self.data, self.out_features, self.format = data, out_features, format
        self._ops, self._dtype = ops, dtype

    @classmethod
    def pack(
        cls,
        tensors: Sequence[Tensor],
        format: str,
        ops: Ops,
        dtype: torch.dtype,
        empty: Callable[[tuple[int, ...], torch.dtype], Tensor] = _MEMORY.empty,
    ) -> QuantizedPanels:
        """Pack blocks uint8 [out, row bytes], one tensor after another.

        Args:
            empty: makes the memory, which is for as long as the process lives by default.
        """
        tile, num_rows = FORMATS[format], sum(len(tensor) for tensor in tensors)
        num_blocks = tensors[0].shape[1] // tile.block_bytes
        data = empty((-(-num_rows // PANEL), num_blocks, tile.tile_bytes), torch.uint8)
        for panels, tensor in _panels(data, tensors):
            ops.pack_quantized_weight(panels, tensor, format)
        return cls(data, num_rows, format, ops, dtype)

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        self._ops.quantized_linear(out, x, self.data, self.format, bias)

    def rows(self, indices: Tensor) -> Tensor:
        in_features = self.data.shape[1] * FORMATS[self.format].block_size
        out = torch.empty(indices.shape[0], in_features, dtype=self._dtype)
        self._ops.quantized_embedding(out, indices, self.data, self.format)
        return out


class QuantizedGatedPanels:
    """Blocks of a GGUF format, of a gate and of what it gates in panels turn about.

    Args:
        data: uint8 [2 * out / 16, in / block size, tile bytes].
        format: of the blocks.
        activation: silu or gelu_tanh.
    """

    def __init__(self, data: Tensor, format: str, activation: str, ops: Ops) -> None:
        self.data, self.format, self.activation = data, format, activation
        self._ops = ops

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        self._ops.quantized_gated_linear(out, x, self.data, self.format, self.activation, bias)


class PlainGatedPanels:
    """Plain fp32 values, of a gate and of what it gates in panels turn about.

    Args:
        data: fp32 [2 * out / 16, in, 16].
        activation: silu or gelu_tanh.
    """

    def __init__(self, data: Tensor, activation: str, ops: Ops) -> None:
        self.data, self.activation = data, activation
        self._ops = ops

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        self._ops.gated_linear(out, x, self.data, self.activation, bias)


def pack_gated(
    weights: Sequence[Weight], activation: str | None, ops: Ops, dtype: torch.dtype
) -> QuantizedGatedPanels | PlainGatedPanels | None:
    """One weight of gate and up; None where no product applies the activation, or these are neither blocks of one format nor
    fp32 values (between rounded products and the activation, the sums would have to be rounded too), in whole panels."""
    if activation is None or len(weights) != 2 or weights[0].shape[0] % PANEL:
        return None
    plain_weights = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain_weights) == 2 and dtype == torch.float32:
        return _pack_plain_gated(plain_weights, activation, ops)
    blocks = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    if len(blocks) != 2 or blocks[0].format != blocks[1].format:
        return None
    tile = FORMATS[blocks[0].format]
    num_panels, num_blocks = blocks[0].shape[0] // PANEL, blocks[0].blocks.shape[1] // tile.block_bytes
    data = _MEMORY.empty((num_panels, 2, num_blocks, tile.tile_bytes), torch.uint8)
    for which, weight in enumerate(blocks):
        panels = torch.empty(num_panels, num_blocks, tile.tile_bytes, dtype=torch.uint8)
        ops.pack_quantized_weight(panels, weight.blocks, weight.format)
        data[:, which].copy_(panels)
    return QuantizedGatedPanels(data.flatten(0, 1), blocks[0].format, activation, ops)


def _pack_plain_gated(weights: Sequence[Tensor], activation: str, ops: Ops) -> PlainGatedPanels:
    num_panels, in_features = weights[0].shape[0] // PANEL, weights[0].shape[1]
    data = _MEMORY.empty((num_panels, 2, in_features, PANEL), torch.float32)
    panels = torch.empty(num_panels, in_features, PANEL)
    for which, weight in enumerate(weights):
        ops.pack_linear_weight(panels, weight.to(torch.float32).contiguous())
        data[:, which].copy_(panels)
    return PlainGatedPanels(data.flatten(0, 1), activation, ops)


def _panels(data: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with its panels of `data`; tensors are joined where a panel would have rows of two of them."""
    if any(len(tensor) % PANEL for tensor in tensors[:-1]):
        tensors = [torch.cat(list(tensors))]
    panel = 0
    for tensor in tensors:
        end = panel + -(-len(tensor) // PANEL)
        yield data[panel:end], tensor
        panel = end


def pack(weights: Sequence[Weight], ops: Ops, dtype: torch.dtype) -> PackedWeight:
    """Pack projections [out, in] of one form, one after another.

    Args:
        weights: all of them quantised in one format, or none of them.
        dtype: plain values are converted to it.
    """
    blocks = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    if blocks:
        return QuantizedPanels.pack([weight.blocks for weight in blocks], blocks[0].format, ops, dtype)
    return PlainPanels.pack([plain(weight) for weight in weights], ops, dtype)
