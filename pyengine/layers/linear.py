"""Matrix products. One `Linear` may merge several projections of the same input, so that they run as one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

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
        self._ops, self._dtype = ops, dtype
        self._starts = tuple(accumulate(out_features, initial=0))  # of each projection's rows, and the end
        self._missing = set(range(len(out_features)))
        self._packed: Tensor | None = None  # [ceil(out / 16), in, 16]
        self._weight: Tensor | None = None  # [out, in]
        if device.type == "cpu":
            self._packed = torch.empty(-(-self.out_features // PANEL), in_features, PANEL, dtype=dtype)
        if self._packed is None or any(start % PANEL for start in self._starts[:-1]):
            # On CPUs only for projections that share a panel, and only until the last of them is there.
            self._weight = torch.empty(self.out_features, in_features, dtype=dtype, device=device)

    def weight_slots(self, names: Sequence[str]) -> Iterator[WeightSlot]:
        """The tensors of the projections, whose modules Hugging Face calls `names`."""
        for part, name in enumerate(names):
            start, end = self._starts[part], self._starts[part + 1]
            yield WeightSlot(f"{name}.weight", (end - start, self.in_features), partial(self._load_weight, part))
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (end - start,), self.bias[start:end].copy_)

    def _load_weight(self, part: int, weight: Tensor) -> None:
        start, end = self._starts[part], self._starts[part + 1]
        if self._weight is not None:
            self._weight[start:end].copy_(weight)
        elif self._packed is not None:
            panels = self._packed[start // PANEL : -(-end // PANEL)]
            self._ops.pack_linear_weight(panels, weight.to(self._dtype).contiguous())
        self._missing.discard(part)
        if self._packed is not None and self._weight is not None and not self._missing:
            self._ops.pack_linear_weight(self._packed, self._weight)
            self._weight = None

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
        assert self._weight is not None
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
        assert self._weight is not None
        return self._weight.index_select(0, indices)
