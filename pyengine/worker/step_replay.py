"""How a step runs its model: op by op from Python, or as one call that replays what was recorded of it.

Recording runs the model's own `forward` once, on made-up inputs, without running a kernel: `Recorder` sees each operator that
the model calls. The ops of `pyengine.ops` go into a plan (csrc/cpu/step_plan.h), memory comes from an arena, views are views.
Anything else would be lost in a replay, so it ends the recording, and the model runs op by op. A replay runs the same kernels
over the same memory with the numbers of the step at hand, and so gives the same bits.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache
from pyengine.models.interfaces import CausalLM
from pyengine.ops import load_core

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """Runs the model over the tokens of a step."""

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run the layers: input_ids, positions int64 [num_tokens] -> hidden states [num_tokens, hidden_size].

        The result is valid until the next call.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> fp32 [num_rows, vocab_size], valid until the next call."""


class EagerStepRunner:
    """A `StepRunner` that calls the model."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerKVCache]) -> None:
        self._model = model
        self._kv_caches = kv_caches

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self._model.forward(self._model.embed_input_ids(input_ids), positions, self._kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


class NotReplayableError(Exception):
    """The model does something that a plan cannot record."""


class Arena:
    """Memory of recorded tensors. It goes round: a tensor's piece is handed out again once nothing refers to the tensor.

    Pieces are never returned to the system as long as the arena lives, for the plan has their addresses.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._pieces: list[Tensor] = []

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor with undefined values."""
        num_bytes = math.prod(size) * dtype.itemsize
        free = self._free.setdefault(num_bytes, [])
        if not free:
            free.append(torch.empty(num_bytes, dtype=torch.uint8))
            self._pieces.append(free[-1])
        piece = free.pop()
        array = piece.numpy()[:]  # an array of its own, which lives as long as the tensor's memory is in use
        weakref.finalize(array, free.append, piece).atexit = False
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
    """

    def __init__(self, plan: Any, arena: Arena) -> None:
        super().__init__()
        self._plan = plan
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is ever compiled; to see to that, torch would import its compiler: 800 modules, 60 MB, a second or more.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "pyengine":
            return func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.clone.default:
            return self._dense_copy(args[0])
        returned = [result.alias_info for result in func._schema.returns]
        if func is torch.ops.aten._unsafe_view.default or (
            returned and all(alias is not None and not alias.is_write for alias in returned)
        ):
            return func(*args, **kwargs)  # a view
        raise NotReplayableError(f"it calls {func}")

    def _dense_copy(self, source: Tensor) -> Tensor:
        """source [num_rows, ...], each row dense."""
        if not source[0].is_contiguous():
            raise NotReplayableError("it copies a tensor whose rows are not dense")
        copy = self._arena.empty(source.shape, source.dtype)
        row_bytes = source[0].numel() * source.element_size()
        stride = source.stride(0) * source.element_size()
        self._plan.record_copy(copy.data_ptr(), source.data_ptr(), row_bytes, stride, len(source))
        return copy


class _Recorded:
    """A function of rows, recorded: `call` with the inputs of a step runs it over the first rows of `input`.

    Args:
        function: input [max_rows, width] -> output [max_rows, ...], by recordable operators only.
        input: in the arena's care; rows in it are written before each call.
        inputs: a `StepInputs` of max_rows tokens.

    Raises:
        NotReplayableError: it does something else.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], input: Tensor, arena: Arena, inputs: Any) -> None:
        self.plan = load_core().StepPlan()
        self.input = input
        self.plan.begin_recording(inputs)
        try:
            with Recorder(self.plan, arena):
                self.output = function(input)
        except (RuntimeError, ValueError) as error:  # what an op says that cannot be recorded
            raise NotReplayableError(str(error).splitlines()[0]) from error
        finally:
            self.plan.end_recording()


class ReplayedStepRunner:
    """A `StepRunner` that replays. Larger steps than it was made for run op by op.

    Args:
        model: with its weights, which stay where they are.
        kv_caches: one for each layer; they stay where they are, too.
        max_num_tokens: of a step.
        max_num_rows: of logits.

    Raises:
        NotReplayableError: the model calls an operator that cannot be recorded.
    """

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerKVCache], *, max_num_tokens: int, max_num_rows: int) -> None:
        self._model = model
        self._eager = EagerStepRunner(model, kv_caches)
        self._step_inputs = load_core().StepInputs
        with torch.no_grad():
            embedded = model.embed_input_ids(torch.zeros(1, dtype=torch.int64))  # [1, hidden_size]
            arena = Arena()
            positions, metadata = _made_up_step(max_num_tokens)
            self._forward = _Recorded(
                lambda hidden: model.forward(hidden, positions, kv_caches, metadata),
                arena.empty((max_num_tokens, embedded.shape[1]), embedded.dtype),
                arena,
                self._inputs(positions, metadata),
            )
            self._logits = _Recorded(
                model.compute_logits,
                arena.empty((max_num_rows, embedded.shape[1]), embedded.dtype),
                arena,
                self._step_inputs(max_num_rows),
            )
        self._arena = arena  # keeps the memory

    def __del__(self) -> None:
        # A thread that lost its core in the last step may still read weights and arena.
        load_core().wait_for_late_workers()

    def _inputs(self, positions: Tensor, metadata: AttentionMetadata) -> Any:
        return self._step_inputs(
            metadata.num_tokens,
            metadata.num_seqs,
            metadata.max_query_len,
            metadata.max_seq_len,
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.block_table.stride(0),
        )

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        num_tokens = metadata.num_tokens
        if num_tokens > len(self._forward.input):
            return self._eager.forward(input_ids, positions, metadata)
        self._forward.input[:num_tokens].copy_(self._model.embed_input_ids(input_ids))
        self._forward.plan.run(self._inputs(positions, metadata))
        return self._forward.output[:num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        if num_rows > len(self._logits.input):
            return self._eager.compute_logits(hidden)
        self._logits.input[:num_rows].copy_(hidden)
        self._logits.plan.run(self._step_inputs(num_rows))
        return self._logits.output[:num_rows]

    @property
    def num_bytes(self) -> int:
        """Of the memory that recorded tensors lie in."""
        return self._arena.num_bytes

    def op_times(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> list[tuple[str, float]]:
        """Run a step and the logits of as many rows as it has sequences; return (op, seconds) of each op in order.

        The embedding is not among them.
        """
        num_tokens = metadata.num_tokens
        self._forward.input[:num_tokens].copy_(self._model.embed_input_ids(input_ids))
        times: list[tuple[str, float]] = self._forward.plan.timed_run(self._inputs(positions, metadata))
        num_rows = metadata.num_seqs
        self._logits.input[:num_rows].copy_(self._forward.output[:num_rows])
        times += self._logits.plan.timed_run(self._step_inputs(num_rows))
        return times


def _made_up_step(num_tokens: int) -> tuple[Tensor, AttentionMetadata]:
    """Valid inputs of a step of `num_tokens` sequences with a token each: positions int64 [num_tokens] and the batch."""
    metadata = AttentionMetadata(
        num_seqs=num_tokens,
        num_tokens=num_tokens,
        max_query_len=1,
        max_seq_len=1,
        query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32),
        seq_lens=torch.ones(num_tokens, dtype=torch.int32),
        block_table=torch.zeros(num_tokens, 1, dtype=torch.int32),
        slot_mapping=torch.full((num_tokens,), -1),
    )
    return torch.zeros(num_tokens, dtype=torch.int64), metadata


def create_step_runner(
    model: CausalLM, kv_caches: Sequence[LayerKVCache], *, replay: bool, max_num_tokens: int, max_num_rows: int
) -> StepRunner:
    """The fastest `StepRunner` for this model.

    Args:
        model: with its weights.
        kv_caches: one for each layer.
        replay: whether steps may be recorded; only the CPU's can.
        max_num_tokens: of a step.
        max_num_rows: of logits.
    """
    if replay:
        try:
            return ReplayedStepRunner(model, kv_caches, max_num_tokens=max_num_tokens, max_num_rows=max_num_rows)
        except NotReplayableError as error:
            logger.warning("the model's steps cannot be recorded and run op by op, which is slower: %s", error)
    return EagerStepRunner(model, kv_caches)
