"""Runs a device's ops on CPU tensors: every storage that an op sees is copied to the device and back, byte for byte.

So that the kernel tests, which make CPU tensors and compare them with float64, run unchanged on a GPU. What an op must not
touch (rows' padding, other slots, neighbours in one tensor) is copied too, and a stray write shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyengine.ops import CPU_OPS, Ops

#: Tensors that stay in host memory.
_HOST_ARGUMENTS = {("swap_blocks", "block_mapping")}


class MirroredOps:
    """An `Ops` whose device ops take CPU tensors.

    Args:
        ops: the device's.
        device: where copies of the tensors go; the CPU is a device like any other.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._device = device

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        return op if name in CPU_OPS or name == "name" else _MirroredOp(op, name, self._device)


class _MirroredOp:
    def __init__(self, op: Any, name: str, device: torch.device) -> None:
        self._op, self._name, self._device = op, name, device

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        mirrors: dict[int, tuple[Tensor, Tensor]] = {}  # by address: a storage's bytes, and their copy on the device
        names = [argument.name for argument in self._op._schema.arguments]
        positional = [self._moved(name, value, mirrors) for name, value in zip(names, args, strict=False)]
        named = {name: self._moved(name, value, mirrors) for name, value in kwargs.items()}
        self._op(*positional, **named)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for own, mirror in mirrors.values():
            own.copy_(mirror)

    def _moved(self, name: str, value: Any, mirrors: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if not isinstance(value, Tensor) or (self._name, name) in _HOST_ARGUMENTS:
            return value
        storage = value.untyped_storage()
        if storage.nbytes() == 0:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self._device)
        if storage.data_ptr() not in mirrors:
            own = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            mirrors[storage.data_ptr()] = own, own.to(self._device, copy=True)
        mirror = mirrors[storage.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=self._device)
        return empty.set_(mirror, value.storage_offset(), value.size(), value.stride())
