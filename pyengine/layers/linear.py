"""Matrix products. One `Linear` may merge several projections of the same input, so that they run as one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from pyengine.layers.activation import GatedActivation
from pyengine.layers.checkpoint_linear import CheckpointLinear, DenseLinear, merge
from pyengine.layers.packed_weight import GatedWeight, PackedWeight
from pyengine.layers.repacked_weight import pack_any, pack_gated_any
from pyengine.layers.weights import CheckpointWeight, QuantizedTensor, RepackedTensor, Weight, WeightSlot, plain
from pyengine.ops import Ops


class Linear:
    """y = x W^T + b with W [out, in], the rows of W being one projection after another.

    On CPUs the weight is kept only in the packed form that the kernels read, quantised where the checkpoint's is: neighbouring
    projections of one form together, others on their own. Each row of y is summed in the same order whatever the number of
    rows is. On GPUs W stays as it is, quantised or not.

    Args:
        in_features: columns of W.
        out_features: rows of each projection, in order.
        bias: whether the projections have one.
        activation: of two projections of one size, the gate and what it gates: the result is act(gate) * up.
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
        activation: GatedActivation | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(out_features)
        self.bias = torch.zeros(self.out_features, dtype=dtype, device=device) if bias else None  # [out]
        self._ops, self._dtype, self._device = ops, dtype, device
        self._starts = tuple(accumulate(out_features, initial=0))  # of each projection's rows, and the end
        self._waiting: dict[int, Weight] = {}  # projections that came before the last one
        self._activation = activation
        self._gated: GatedWeight | None = None  # W and the activation in one
        self._packed: list[PackedWeight | CheckpointLinear | DenseLinear] = []  # W from top to bottom
        self._weight: Tensor | None = None  # [out, in]: on GPUs, where no projection is quantised

    def weight_slots(self, names: Sequence[str]) -> Iterator[WeightSlot]:
        """The tensors of the projections, whose modules Hugging Face calls `names`."""
        for part, name in enumerate(names):
            start, end = self._starts[part], self._starts[part + 1]
            yield WeightSlot(f"{name}.weight", (end - start, self.in_features), partial(self._load_weight, part))
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (end - start,), partial(self._load_bias, start))

    def _load_bias(self, start: int, bias: Weight) -> None:
        assert self.bias is not None
        self.bias[start : start + bias.shape[0]].copy_(plain(bias))

    def _load_weight(self, part: int, weight: Weight) -> None:
        self._waiting[part] = weight
        if len(self._waiting) < len(self._starts) - 1:
            return
        weights = [self._waiting[part] for part in range(len(self._waiting))]
        self._waiting.clear()
        if self._device.type != "cpu" and all(isinstance(weight, Tensor) for weight in weights):
            self._weight = torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self._device)
            for start, end, weight in zip(self._starts, self._starts[1:], weights, strict=False):
                self._weight[start:end].copy_(plain(weight))
            return
        if self._activation is not None:
            self._gated = pack_gated_any(weights, self._activation.fused_name, self._ops, self._dtype)
        if self._gated is not None:
            return
        self._packed = [part for _, group in groupby(weights, _form) for part in self._pack(list(group))]

    def _pack(self, weights: list[Weight]) -> Sequence[PackedWeight | CheckpointLinear | DenseLinear]:
        """Neighbouring projections of one form."""
        quantized = [weight for weight in weights if isinstance(weight, CheckpointWeight)]
        if quantized:
            return merge(quantized, ops=self._ops, dtype=self._dtype, device=self._device)
        if self._device.type != "cpu":
            return [DenseLinear([plain(weight) for weight in weights], dtype=self._dtype, device=self._device)]
        return [pack_any(weights, self._ops, self._dtype)]

    @property
    def parts(self) -> Sequence[PackedWeight | CheckpointLinear | DenseLinear | GatedWeight]:
        """W from top to bottom, as it is multiplied with: neighbouring projections of one form in one, gate and up too."""
        return self._packed if self._gated is None else [self._gated]

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiply.

        Args:
            x: [num_tokens, in].
            out_dtype: x's by default; may be fp32.

        Returns:
            [num_tokens, out]; with an activation [num_tokens, out / 2].
        """
        if self._gated is not None:
            out = torch.empty(x.shape[0], self.out_features // 2, dtype=out_dtype or x.dtype)
            self._gated.multiply(out, x, self.bias)
            return out
        out = self._products(x, out_dtype)
        return out if self._activation is None else self._activation(out)

    def _products(self, x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
        if self._weight is not None:
            out = torch.nn.functional.linear(x, self._weight, self.bias)
            return out if out_dtype is None else out.to(out_dtype)
        out = torch.empty(x.shape[0], self.out_features, dtype=out_dtype or x.dtype, device=x.device)
        if len(self._packed) == 1:
            self._packed[0].multiply(out, x, self.bias)
            return out
        start = 0
        for packed in self._packed:
            end = start + packed.out_features
            packed.multiply(out[:, start:end], x, None if self.bias is None else self.bias[start:end])
            start = end
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W: what an embedding that shares this weight looks up. Not of one whose projections differ in format.

        Args:
            indices: int64 [num_tokens].

        Returns:
            [num_tokens, in].
        """
        if self._weight is not None:
            return self._weight.index_select(0, indices)
        (packed,) = self._packed
        assert not isinstance(packed, CheckpointLinear | DenseLinear), "no checkpoint's embeddings are in a GPU layout"
        return packed.rows(indices)


def _form(weight: Weight) -> str:
    """Projections of one form are merged where they are neighbours."""
    if isinstance(weight, QuantizedTensor):
        return weight.format
    if isinstance(weight, RepackedTensor):
        return "repacked"
    return weight.kind if isinstance(weight, CheckpointWeight) else "plain"
