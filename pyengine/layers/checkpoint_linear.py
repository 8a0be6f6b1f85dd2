"""Products with weights as quantised Hugging Face checkpoints hold them: GPTQ, AWQ, FP8, INT8.

GPUs run them so. CPUs do not: their weights become blocks when they are loaded (`pyengine.loader.checkpoint_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from pyengine.layers.weights import CheckpointWeight
from pyengine.ops import Ops


class CheckpointLinear:
    """Projections [out, in] of one input, one after another, in one product.

    4-bit and FP8 weights are multiplied with inputs of 16 bits as they are; INT8 weights with inputs that are rounded to int8,
    one scale a row. Each row of the result is the same whatever the number of rows is.

    Args:
        weights: of one kind, group size and order of columns.
        dtype: of activations, which is float16 or bfloat16 on GPUs; 4-bit scales are converted to it.
        device: where the weights go.
    """

    def __init__(self, weights: Sequence[CheckpointWeight], *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        first = weights[0]
        self.kind, self.group_size = first.kind, first.group_size
        self.out_features = sum(weight.shape[0] for weight in weights)
        self._ops = ops
        self.order = None if first.order is None else first.order.to(device)  # int64 [in]
        self.zeros: Tensor | None = None  # int32 [groups, out / 8]
        if first.zeros is None:
            self.weight = torch.cat([weight.weight for weight in weights]).to(device)  # [out, in]
            scales = [weight.scales.expand(weight.shape[0]) for weight in weights]  # a row may share its scale with all others
            self.scales = torch.cat(scales).to(device)  # fp32 [out]
        else:
            # gptq: int32 [in / 8, out]; awq: int32 [in, out / 8]
            self.weight = torch.cat([weight.weight for weight in weights], 1).to(device)
            self.scales = torch.cat([weight.scales for weight in weights], 1).to(device, dtype)  # [groups, out]
            self.zeros = torch.cat([weight.zeros for weight in weights if weight.zeros is not None], 1).to(device)

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] = x [num_tokens, in] times this weight transposed, plus bias [out]."""
        if self.kind == "int8":
            codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
            scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
            self._ops.quantize_int8_rows(codes, scale, x)
            target = _in_dtype(out, x.dtype)  # bias has it too
            self._ops.int8_linear(target, codes, scale, self.weight, self.scales, bias)
        else:
            target = _in_dtype(out, x.dtype)
            if self.zeros is None:
                self._ops.fp8_linear(target, x, self.weight, self.scales, bias)
            else:
                op = self._ops.gptq_linear if self.kind == "gptq" else self._ops.awq_linear
                ordered = x if self.order is None else x.index_select(1, self.order)
                op(target, ordered, self.weight, self.scales, self.zeros, self.group_size, bias)
        if target is not out:
            out.copy_(target)


class DenseLinear:
    """A projection that the checkpoint leaves plain beside quantised ones: what `Linear` has on GPUs, as one of several parts.

    Args:
        weights: [out, in] each.
    """

    def __init__(self, weights: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.cat([weight.to(dtype) for weight in weights]).to(device)  # [out, in]
        self.out_features = self.weight.shape[0]

    def multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """out [num_tokens, out] = x [num_tokens, in] times this weight transposed, plus bias [out]."""
        out.copy_(torch.nn.functional.linear(x, self.weight, bias))


def merge(weights: Sequence[CheckpointWeight], *, ops: Ops, dtype: torch.dtype, device: torch.device) -> list[CheckpointLinear]:
    """As few products as the weights' forms allow; projections of one input usually have one."""

    def form(weight: CheckpointWeight) -> tuple[str, int, tuple[int, ...] | None]:
        return weight.kind, weight.group_size, None if weight.order is None else tuple(weight.order.tolist())

    return [CheckpointLinear(list(group), ops=ops, dtype=dtype, device=device) for _, group in groupby(weights, form)]


def _in_dtype(out: Tensor, dtype: torch.dtype) -> Tensor:
    return out if out.dtype == dtype else torch.empty(out.shape, dtype=dtype, device=out.device)
