"""How a layer says which checkpoint tensors it takes, and takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor


class QuantizedTensor(NamedTuple):
    """A matrix as its file holds it: blocks of a GGUF format, which the CPU kernels multiply with as they are."""

    blocks: Tensor  # uint8 [out, row bytes]
    format: str  # Q4_1, ...: see `Ops.pack_quantized_weight`
    shape: tuple[int, int]  # of the values: (out, in)


class CheckpointWeight(NamedTuple):
    """A matrix in the layout of a quantised Hugging Face checkpoint, which the ops of `pyengine.layers.checkpoint_linear` take.

    Its columns (features of the input) come in the order of their groups; `order` says which each of them is.
    """

    kind: Literal["gptq", "awq", "fp8", "int8"]  # whose op: gptq_linear, ...
    weight: Tensor  # as the op takes it
    scales: Tensor  # 4 bits: [in / group_size, out]; else fp32 [out] or [1]
    zeros: Tensor | None  # 4 bits: int32 [in / group_size, out / 8]
    group_size: int  # 4 bits: columns that share a scale and a zero
    order: Tensor | None  # int64 [in]; None: columns are where they belong
    shape: tuple[int, int]  # of the values: (out, in)


class RepackedTensor(NamedTuple):
    """A matrix that is to be run as `pyengine.layers.repacked_weight` has it: weights of 8 bits, activations of 16."""

    source: QuantizedTensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the values: (out, in)."""
        return self.source.shape


Weight: TypeAlias = Tensor | QuantizedTensor | RepackedTensor | CheckpointWeight


class WeightSlot(NamedTuple):
    """One tensor that a layer expects.

    `load` copies the tensor into the layer, converting type and device. A layer that merges several keeps the first ones until
    the last is there, and no longer.
    """

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    load: Callable[[Weight], object]


def plain(weight: Weight) -> Tensor:
    """A weight that may not be quantised here.

    Raises:
        TypeError: it is; a checkpoint gives only matrices that way, and only where they were asked for.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"a {type(weight).__name__} where a plain tensor is expected")
    return weight
