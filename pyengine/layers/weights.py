"""How a layer says which checkpoint tensors it takes, and takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor


class QuantizedTensor(NamedTuple):
    """A matrix as its file holds it: blocks of a GGUF format, which the CPU kernels multiply with as they are."""

    blocks: Tensor  # uint8 [out, row bytes]
    format: str  # Q4_1, ...: see `Ops.pack_quantized_weight`
    shape: tuple[int, int]  # of the values: (out, in)


Weight: TypeAlias = Tensor | QuantizedTensor


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
    if isinstance(weight, QuantizedTensor):
        raise TypeError(f"a {weight.format} matrix where a plain tensor is expected")
    return weight
