"""A stand-in for CUDA graphs: records the operators of a function once and calls them again, with the same tensors.

As with a graph, nothing of the function's Python runs in a replay: a number that it passed, or a shape that it chose, stays
as it was recorded. What a GPU could not record, such as reading a value on the host, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: Memory that a replay finds as the recording left it.
_FACTORIES = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default}
#: They would make the host wait for the device.
_HOST_READS = {
    *(_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default),
    *(_aten.nonzero.default, _aten.equal.default),
}


class _Recording(TorchDispatchMode):
    """Runs operators and keeps (operator, arguments, result) of those that a replay has to run again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_READS:
            raise RuntimeError(f"{func} makes the host wait, which a recorded step must not")
        result = func(*args, **kwargs)
        if func not in _FACTORIES and not _is_view(func, args, result):
            self.calls.append((func, args, kwargs, result))
        return result


def _is_view(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether the operator did nothing but name memory of its first argument anew."""
    if func._schema.is_mutable or not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


class EmulatedGraph:
    """A `Graph`."""

    def __init__(self, recording: _Recording) -> None:
        self._calls = recording.calls

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._calls:
            result = func(*args, **kwargs)
            # A new tensor's values go to where the recorded one lies; what was written in place is there already.
            if isinstance(result, Tensor) and result.data_ptr() != recorded.data_ptr():
                recorded.copy_(result)


class EmulatedGraphRecorder:
    """A `GraphRecorder`."""

    records_at_start = False  # emulated steps are slow

    def record(self, run: Callable[[], None]) -> EmulatedGraph:
        recording = _Recording()
        with recording:
            run()
        return EmulatedGraph(recording)
