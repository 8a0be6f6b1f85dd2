"""Gated activations: act(gate) * up, of a merged [gate, up] projection."""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.ops import Ops

#: Hugging Face's `hidden_act` -> whether GELU is meant, and whether its tanh approximation.
_ACTIVATIONS = {
    "silu": (False, False),
    "swish": (False, False),
    "gelu": (True, False),
    "gelu_new": (True, True),
    "gelu_pytorch_tanh": (True, True),
}


class GatedActivation:
    """act(x[:, :d]) * x[:, d:].

    Raises:
        ModelLoadError: for an activation that is not supported.
    """

    def __init__(self, hidden_act: str, *, ops: Ops) -> None:
        if hidden_act not in _ACTIVATIONS:
            raise ModelLoadError(f"hidden_act {hidden_act!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        self._is_gelu, self._tanh = _ACTIVATIONS[hidden_act]
        #: What products that apply it call it; None: there are none.
        self.fused_name = None if self._is_gelu and not self._tanh else "gelu_tanh" if self._is_gelu else "silu"
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, 2 d] -> [num_tokens, d]."""
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        if self._is_gelu:
            self._ops.gelu_and_mul(out, x, self._tanh)
        else:
            self._ops.silu_and_mul(out, x)
        return out
