"""Token embeddings that have a table of their own; tied ones are rows of the output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyengine.layers.packed_weight import PackedWeight
from pyengine.layers.repacked_weight import pack_any
from pyengine.layers.weights import QuantizedTensor, RepackedTensor, Weight, WeightSlot, plain
from pyengine.ops import Ops


class Embedding:
    """Rows of a table [vocab, hidden], which stays quantised where the checkpoint's is."""

    def __init__(self, vocab_size: int, hidden_size: int, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (vocab_size, hidden_size)
        self.weight: Tensor | None = None  # [vocab, hidden]
        self._packed: PackedWeight | None = None
        self._ops, self._dtype, self._device = ops, dtype, device

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.shape, self._load)

    def _load(self, weight: Weight) -> None:
        if isinstance(weight, QuantizedTensor | RepackedTensor):
            self._packed = pack_any([weight], self._ops, self._dtype)
        else:
            if self.weight is None:
                self.weight = torch.empty(self.shape, dtype=self._dtype, device=self._device)
            self.weight.copy_(plain(weight))  # in place: a recorded step has its address

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [num_tokens] -> [num_tokens, hidden]."""
        if self._packed is not None:
            return self._packed.rows(input_ids)
        assert self.weight is not None
        return self.weight.index_select(0, input_ids)
