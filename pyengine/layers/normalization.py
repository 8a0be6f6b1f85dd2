"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyengine.layers.weights import Weight, WeightSlot, plain
from pyengine.ops import Ops


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.eps = eps
        self.weight = torch.ones(size, dtype=dtype, device=device)  # [size]
        self._ops = ops

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", tuple(self.weight.shape), self._load)

    def _load(self, weight: Weight) -> None:
        self.weight.copy_(plain(weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [num_rows, size] into a new tensor."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._ops.rms_norm(out, x, self.weight, self.eps)
        return out

    def add_(self, x: Tensor, residual: Tensor) -> None:
        """residual += x, then x = the normalised sum; both [num_rows, size], both in place."""
        self._ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
