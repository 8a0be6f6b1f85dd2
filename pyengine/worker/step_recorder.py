"""Records a model's step, so that one call can run it again.

Recording runs the model's own code once, on made-up inputs, without running a kernel: `Recorder` sees each operator that the
model calls. The ops of `pyengine.ops` go into a plan (csrc/cpu/step_plan.h), memory comes from an arena, views are views.
Anything else would be lost in a replay, so it ends the recording. A replay runs the same kernels over the same memory with the
numbers of the step at hand, and so gives the same bits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.ops import load_core


class NotReplayableError(Exception):
    """The model does something that a plan cannot record."""


class Arena:
    """Memory of recorded tensors. It goes round: a tensor's piece is handed out again once nothing refers to the tensor.

    Pieces are never returned to the system as long as the arena lives, for the plan has their addresses.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._pieces: list[Tensor] = []

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor with undefined values."""
        num_bytes = math.prod(size) * dtype.itemsize
        # A piece of about the size: a tensor of one row less, too, shall lie where the caches have it already.
        fits = [index for index, piece in enumerate(self._free) if num_bytes <= len(piece) <= num_bytes * 9 // 8]
        if fits:
            piece = self._free.pop(min(fits, key=lambda index: len(self._free[index])))
        else:
            piece = torch.empty(num_bytes, dtype=torch.uint8)
            self._pieces.append(piece)
        array = piece.numpy()[:num_bytes]  # an array of its own, which lives as long as the tensor's memory is in use
        weakref.finalize(array, self._free.append, piece).atexit = False
        return torch.from_numpy(array).view(dtype).view(*size)

    @property
    def num_bytes(self) -> int:
        """Of all pieces; what was never written takes no memory."""
        return sum(len(piece) for piece in self._pieces)


class Recorder(TorchDispatchMode):
    """Records the ops that run under it in this thread.

    Args:
        plan: a `StepPlan` that records.
        arena: where new tensors lie.
        input_ids: the recorded step's; rows of a table may be looked up by them.
        logits_indices: the recorded step's; those rows may be taken of what is computed.
    """

    def __init__(self, plan: Any, arena: Arena, input_ids: Tensor | None, logits_indices: Tensor | None) -> None:
        super().__init__()
        self._plan = plan
        self._arena = arena
        self._input_ids = input_ids
        self._logits_indices = logits_indices

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is ever compiled; to see to that, torch would import its compiler: 800 modules, 60 MB, a second or more.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func.namespace == "pyengine":
            return func(*args, **kwargs)
        if func is aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is aten.clone.default:
            return self._dense_copy(args[0])
        ids, indices = self._input_ids, self._logits_indices
        if ids is not None and func is aten.index_select.default and args[1] == 0 and args[2] is ids:
            return self._rows_of(args[0], len(ids))
        if indices is not None and func is aten.index_select.default and args[1] == 0 and args[2] is indices:
            return self._logits_rows_of(args[0], len(indices))
        returned = [result.alias_info for result in func._schema.returns]
        if func is aten._unsafe_view.default or (
            returned and all(alias is not None and not alias.is_write for alias in returned)
        ):
            return func(*args, **kwargs)  # a view
        raise NotReplayableError(f"it calls {func}")

    def _dense_copy(self, source: Tensor) -> Tensor:
        """source [num_rows, ...], each row dense."""
        copy = self._arena.empty(source.shape, source.dtype)
        self._plan.record_copy(copy.data_ptr(), source.data_ptr(), *_row_sizes(source), len(source))
        return copy

    def _rows_of(self, table: Tensor, num_tokens: int) -> Tensor:
        """The rows of table [num_rows, ...] that the step's input_ids name: [num_tokens, ...]."""
        rows = self._arena.empty((num_tokens, *table.shape[1:]), table.dtype)
        self._plan.record_gather(rows.data_ptr(), table.data_ptr(), *_row_sizes(table), num_tokens)
        return rows

    def _logits_rows_of(self, source: Tensor, num_rows: int) -> Tensor:
        """Those rows of source [num_tokens, ...] that logits are wanted of, moved to its front: [num_rows, ...]."""
        self._plan.record_logits_rows(source.data_ptr(), *_row_sizes(source))
        return source[:num_rows]


def _row_sizes(tensor: Tensor) -> tuple[int, int]:
    """Bytes of a row, and from one row to the next."""
    if not tensor[0].is_contiguous():
        raise NotReplayableError("it copies a tensor whose rows are not dense")
    return tensor[0].numel() * tensor.element_size(), tensor.stride(0) * tensor.element_size()


@contextmanager
def recording(plan: Any, inputs: Any) -> Iterator[None]:
    """Record the ops of this thread in `plan`, for steps like `inputs`.

    Raises:
        NotReplayableError: an op says that it cannot be recorded.
    """
    plan.begin_recording(inputs)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise NotReplayableError(str(error).splitlines()[0]) from error
    finally:
        plan.end_recording()


def record(
    function: Callable[[], Any],
    arena: Arena,
    inputs: Any,
    *,
    input_ids: Tensor | None = None,
    logits_indices: Tensor | None = None,
) -> tuple[Any, Any]:
    """Record what `function` runs.

    Args:
        function: by recordable operators only.
        arena: keeps the memory of what it computes; it must live as long as the plan.
        inputs: a `StepInputs` of the largest step.
        input_ids: the tensor that `inputs` has as such.
        logits_indices: the tensor that the logits rows of `inputs` have as `indices`.

    Returns:
        The plan, and what `function` returned.

    Raises:
        NotReplayableError: it does something else.
    """
    plan = load_core().StepPlan()
    with recording(plan, inputs), Recorder(plan, arena, input_ids, logits_indices):
        result = function()
    return plan, result
