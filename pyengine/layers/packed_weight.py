"""Weights in the forms that the CPU kernels read: panels of 16 output features, of plain values or of quantised blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    tile_bytes: int  # 16 such blocks, packed


FORMATS = {
    "Q4_0": TileSizes(32, 288),
    "Q4_1": TileSizes(32, 320),
    "Q5_0": TileSizes(32, 352),
    "Q5_1": TileSizes(32, 384),
    "Q8_0": TileSizes(32, 544),
    "Q4_K": TileSizes(256, 2368),
    "Q5_K": TileSizes(256, 2880),
    "Q6_K": TileSizes(256, 3360),
}


class PackedWeight:
    """A weight [out, in] that only the kernels read.

    Args:
        data: [ceil(out / 16), in, 16], or uint8 [ceil(out / 16), in / block size, tile bytes].
        out_features: rows; the last panel may have more.
        format: of the blocks; None: plain values.
        dtype: of the rows that `rows` gives.
    """

    def __init__(self, data: Tensor, out_features: int, format: str | None, ops: Ops, dtype: torch.dtype) -> None:
        self.data, self.out_features, self.format = data, out_features, format
        self._ops, self._dtype = ops, dtype

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] = x [num_tokens, in] times this weight transposed, plus bias [out]."""
        if self.format is None:
            self._ops.linear(out, x, self.data, bias)
        else:
            self._ops.quantized_linear(out, x, self.data, self.format, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` (int64 [num_tokens]) of the weight, dequantised: [num_tokens, in]."""
        if self.format is None:
            return self.data[indices // PANEL, :, indices % PANEL]
        in_features = self.data.shape[1] * FORMATS[self.format].block_size
        out = torch.empty(indices.shape[0], in_features, dtype=self._dtype)
        self._ops.quantized_embedding(out, indices, self.data, self.format)
        return out


def pack(weights: Sequence[Weight], ops: Ops, dtype: torch.dtype) -> PackedWeight:
    """Pack projections [out, in] of one format, one after another.

    Args:
        weights: all of them quantised in one format, or none of them.
        dtype: plain values are converted to it.
    """
    first = weights[0]
    format = first.format if isinstance(first, QuantizedTensor) else None
    tensors = [weight.blocks if isinstance(weight, QuantizedTensor) else plain(weight) for weight in weights]
    sizes = [len(tensor) for tensor in tensors]
    if any(size % PANEL for size in sizes[:-1]):  # a panel would have rows of two of them
        tensors = [torch.cat(tensors)]
    num_panels, in_features = -(-sum(sizes) // PANEL), first.shape[1]
    if format is None:
        data = _MEMORY.empty((num_panels, in_features, PANEL), dtype)
    else:
        tile = FORMATS[format]
        data = _MEMORY.empty((num_panels, in_features // tile.block_size, tile.tile_bytes), torch.uint8)
    panel = 0
    for tensor in tensors:
        end = panel + -(-len(tensor) // PANEL)
        if format is None:
            ops.pack_linear_weight(data[panel:end], tensor.to(dtype).contiguous())
        else:
            ops.pack_quantized_weight(data[panel:end], tensor, format)
        panel = end
    return PackedWeight(data, sum(sizes), format, ops, dtype)
