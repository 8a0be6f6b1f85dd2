"""Runs a model over the tokens of a step: op by op from Python, or as one call that replays what was recorded of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache
from pyengine.models.interfaces import CausalLM
from pyengine.ops import get_ops, load_core
from pyengine.worker.input_batch import StepInputs
from pyengine.worker.step_recorder import Arena, NotReplayableError, record

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class StepLogits(NamedTuple):
    """Logits of the tokens that are sampled after, in the order of their sequences; valid until the next step."""

    logits: Tensor  # fp32 [num_rows, vocab_size]
    best: tuple[list[int], list[float]] | None = None  # each row's most likely token and its logit, where that is known


class StepRunner(Protocol):
    """Runs the model over the tokens of a step."""

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run the layers: input_ids, positions int64 [num_tokens] -> hidden states [num_tokens, hidden_size].

        The result is valid until the next call.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> fp32 [num_rows, vocab_size], valid until the next call."""


def without_torch_threads(function: Callable[P, R]) -> Callable[P, R]:
    """Without autograd, and torch's own operators on this thread: their pool would spin and take cores from the kernels'."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if threads != 1:
                stack.callback(torch.set_num_threads, threads)
                torch.set_num_threads(1)
            return function(*args, **kwargs)

    return call


class EagerStepRunner:
    """A `StepRunner` that calls the model."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerKVCache]) -> None:
        self._model = model
        self._kv_caches = kv_caches

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self._model.forward(self._model.embed_input_ids(input_ids), positions, self._kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


class ReplayedStepRunner:
    """A `StepRunner` that replays. Larger steps than it was made for run op by op.

    After a step, the kernels have walked over all weights, and little of Python's and torch's code is left in the caches: an
    operator of torch that takes 2 microseconds in a loop takes 100 there. So `run` calls none.

    Args:
        model: with its weights, which stay where they are.
        kv_caches: one for each layer; they stay where they are, too.
        max_num_tokens: of a step.
        max_num_rows: of logits.

    Raises:
        NotReplayableError: the model calls an operator that cannot be recorded.
    """

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerKVCache], *, max_num_tokens: int, max_num_rows: int) -> None:
        core = load_core()
        self._model = model
        self._eager = EagerStepRunner(model, kv_caches)
        self._step_inputs, self._run_step = core.StepInputs, core.run_step
        self._max_num_tokens, self._max_num_rows = max_num_tokens, max_num_rows
        self._arena = arena = Arena()  # keeps the memory
        self._logits_views: dict[int, Tensor] = {}
        with torch.no_grad():
            self._record_forward(kv_caches)
            self._rows = arena.empty((max_num_rows, self._hidden.shape[1]), self._hidden.dtype)
            self._logits_plan, (self._logits, self._token_ids, self._maxima) = record(
                self._logits_of_rows, arena, core.StepInputs(max_num_rows), gather=(self._rows, self._hidden)
            )
        self._best_addresses = (self._token_ids.data_ptr(), self._maxima.data_ptr())

    def _record_forward(self, kv_caches: Sequence[LayerKVCache]) -> None:
        model, arena = self._model, self._arena
        input_ids, positions, metadata = _made_up_step(self._max_num_tokens)

        def layers(hidden: Tensor) -> Tensor:
            return model.forward(hidden, positions, kv_caches, metadata)

        self._embedded: Tensor | None = None  # [max_num_tokens, hidden_size], where embeddings are looked up before the replay
        inputs = self._inputs(input_ids, positions, metadata)
        try:
            self._forward_plan, self._hidden = record(
                lambda: layers(model.embed_input_ids(input_ids)), arena, inputs, input_ids=input_ids
            )
        except NotReplayableError:
            row = model.embed_input_ids(input_ids[:1])
            embedded = self._embedded = arena.empty((self._max_num_tokens, row.shape[1]), row.dtype)
            self._forward_plan, self._hidden = record(lambda: layers(embedded), arena, inputs)

    def _logits_of_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._model.compute_logits(self._rows)
        token_ids = torch.empty(self._max_num_rows, dtype=torch.int64)
        maxima = torch.empty(self._max_num_rows, dtype=torch.float32)
        get_ops("cpu").argmax(token_ids, maxima, logits)
        return logits, token_ids, maxima

    def __del__(self) -> None:
        # A thread that lost its core in the last step may still read weights and arena.
        load_core().wait_for_late_workers()

    @property
    def num_bytes(self) -> int:
        """Of the memory that recorded tensors lie in."""
        return self._arena.num_bytes

    def covers(self, inputs: StepInputs) -> bool:
        """Whether the step is not too large for `run`."""
        return inputs.metadata.num_tokens <= self._max_num_tokens and inputs.num_samples <= self._max_num_rows

    def run(self, inputs: StepInputs) -> StepLogits:
        """Run a step that `covers` admits, and the logits of its last tokens."""
        num_rows = inputs.num_samples
        if self._embedded is not None:
            self._embed(inputs.input_ids)
        best = self._run_step(self._forward_plan, self._logits_plan, inputs.recorded, *self._best_addresses)
        logits = self._logits_views.get(num_rows)
        if logits is None:
            logits = self._logits_views[num_rows] = self._logits[:num_rows]
        return StepLogits(logits, best)

    @without_torch_threads
    def _embed(self, input_ids: Tensor) -> None:
        assert self._embedded is not None
        self._embedded[: len(input_ids)].copy_(self._model.embed_input_ids(input_ids))

    def _inputs(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Any:
        return self._step_inputs(
            metadata.num_tokens,
            metadata.num_seqs,
            metadata.max_query_len,
            metadata.max_seq_len,
            input_ids.data_ptr(),
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.block_table.stride(0),
        )

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        num_tokens = metadata.num_tokens
        if num_tokens > self._max_num_tokens:
            return self._eager.forward(input_ids, positions, metadata)
        if self._embedded is not None:
            self._embed(input_ids)
        self._forward_plan.run(self._inputs(input_ids, positions, metadata))
        return self._hidden[:num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        if num_rows > self._max_num_rows:
            return self._eager.compute_logits(hidden)
        self._rows[:num_rows].copy_(hidden)
        self._logits_plan.run(self._step_inputs(num_rows))
        return self._logits[:num_rows]

    def op_times(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> list[tuple[str, float]]:
        """Run a step and the logits of its sequences' last tokens; return (op, seconds) of each op, in order."""
        if self._embedded is not None:
            self._embed(input_ids)
        times: list[tuple[str, float]] = self._forward_plan.timed_run(self._inputs(input_ids, positions, metadata))
        last = metadata.query_start_loc[1:].long() - 1  # [num_seqs]
        self._rows[: len(last)].copy_(self._hidden[last])
        times += self._logits_plan.timed_run(self._step_inputs(len(last)))
        return times


def _made_up_step(num_tokens: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """A valid step of `num_tokens` sequences with a token each: input_ids and positions int64 [num_tokens], and the batch."""
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
    return torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(num_tokens, dtype=torch.int64), metadata


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
