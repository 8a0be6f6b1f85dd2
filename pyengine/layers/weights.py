"""How a layer says which checkpoint tensors it takes, and takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class WeightSlot(NamedTuple):
    """One tensor that a layer expects.

    `load` copies the tensor into the layer, converting type and device; it keeps no reference to it.
    """

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    load: Callable[[Tensor], object]
