"""Matrix products. One `Linear` may merge several projections of the same input, so that they run as one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pyengine.layers.weights import WeightSlot
from pyengine.ops import Ops

#: Output features in one panel of a packed weight (`kLinearPanel` in csrc/layers/params.h).
PANEL = 16


class Linear:
    """y = x W^T + b with W [out, in], the rows of W being one projection after another.

    On CPUs the weight is kept only in the packed form that the `linear` op reads, [ceil(out / 16), in, 16], and each row of y
    is summed in the same order whatever the number of rows is. On GPUs it stays as it is.

    Args:
        in_features: columns of W.
        out_features: rows of each projection, in order.
        bias: whether the projections have one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(out_features)
        self.bias = torch.zeros(self.out_features, dtype=dtype, device=device) if bias else None  # [out]
        self._parts = tuple(out_features)
        self._ops = ops
        self._dtype, self._device = dtype, device
        self._packs = device.type == "cpu"
        self._missing = set(range(len(self._parts)))
        self._weight: Tensor | None = None  # [out, in]; on CPUs only while projections are still to come
        self._packed: Tensor | None = None  # [ceil(out / 16), in, 16]

    def weight_slots(self, names: Sequence[str]) -> Iterator[WeightSlot]:
        """The tensors of the projections, whose modules Hugging Face calls `names`."""
        start = 0
        for part, (name, rows) in enumerate(zip(names, self._parts, strict=True)):
            yield WeightSlot(f"{name}.weight", (rows, self.in_features), partial(self._load_weight, part, start))
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (rows,), self.bias[start : start + rows].copy_)
            start += rows

    def _load_weight(self, part: int, start: int, weight: Tensor) -> None:
        if self._packs and len(self._parts) == 1:
            self._pack(weight.to(self._dtype).contiguous())
            return
        if self._weight is None:
            self._weight = torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self._device)
        self._weight[start : start + self._parts[part]].copy_(weight)
        self._missing.discard(part)
        if self._packs and not self._missing:
            self._pack(self._weight)
            self._weight = None  # from here on there is one copy

    def _pack(self, weight: Tensor) -> None:
        """weight [out, in]."""
        panels = -(-self.out_features // PANEL)
        self._packed = torch.empty(panels, self.in_features, PANEL, dtype=self._dtype)
        self._ops.pack_linear_weight(self._packed, weight)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiply.

        Args:
            x: [num_tokens, in].
            out_dtype: x's by default; may be fp32.

        Returns:
            [num_tokens, out].
        """
        if self._packed is not None:
            out = torch.empty(x.shape[0], self.out_features, dtype=out_dtype or x.dtype)
            self._ops.linear(out, x, self._packed, self.bias)
            return out
        assert self._weight is not None, "called before its weights were loaded"
        out = torch.nn.functional.linear(x, self._weight, self.bias)
        return out if out_dtype is None else out.to(out_dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W: what an embedding that shares this weight looks up.

        Args:
            indices: int64 [num_tokens].

        Returns:
            [num_tokens, in].
        """
        if self._packed is not None:
            return self._packed[indices // PANEL, :, indices % PANEL]
        assert self._weight is not None, "called before its weights were loaded"
        return self._weight.index_select(0, indices)
