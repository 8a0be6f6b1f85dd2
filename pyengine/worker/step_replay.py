"""Runs a model over the tokens of a step: op by op from Python, or as one call that replays what was recorded of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache, LogitsRows
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

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: LogitsRows | None = None
    ) -> Tensor:
        """Run the layers: input_ids, positions int64 [num_tokens] -> hidden states [num_rows, hidden_size], by default all.

        The result is valid until the next call.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> fp32 [num_rows, vocab_size]."""


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

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: LogitsRows | None = None
    ) -> Tensor:
        return self._model.forward(self._model.embed_input_ids(input_ids), positions, self._kv_caches, metadata, rows)

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
        max_num_rows: of logits that `run` computes.

    Raises:
        NotReplayableError: the model calls an operator that cannot be recorded.
    """

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerKVCache], *, max_num_tokens: int, max_num_rows: int) -> None:
        core = load_core()
        self._model = model
        self._eager = EagerStepRunner(model, kv_caches)
        self._step_inputs, self._run_step = core.StepInputs, core.run_step
        self._max_num_tokens, self._max_num_rows = max_num_tokens, max_num_rows
        self._arena = Arena()  # keeps the memory
        self._logits_views: dict[int, Tensor] = {}
        with torch.no_grad():
            self._record_forward(kv_caches)
            first = self._hidden[:max_num_rows]
            self._logits_plan, (self._logits, self._token_ids, self._maxima) = record(
                lambda: self._logits_and_best(first), self._arena, core.StepInputs(len(first))
            )
        self._best_addresses = (self._token_ids.data_ptr(), self._maxima.data_ptr())

    def _record_forward(self, kv_caches: Sequence[LayerKVCache]) -> None:
        model, arena = self._model, self._arena
        # One row less than tokens, so that an op shows which of them its rows are.
        num_tokens = self._max_num_tokens + 1
        input_ids, positions, metadata = _made_up_step(num_tokens)
        rows = LogitsRows(torch.arange(self._max_num_tokens), _made_up_step(self._max_num_tokens)[2])
        rows.metadata.slot_mapping = rows.metadata.slot_mapping[:0]

        def layers(hidden: Tensor) -> Tensor:
            return model.forward(hidden, positions, kv_caches, metadata, rows)

        self._embedded: Tensor | None = None  # [num_tokens, hidden_size], where embeddings are looked up before the replay
        inputs = self._inputs(input_ids, positions, metadata, rows)
        try:
            self._forward_plan, self._hidden = record(
                lambda: layers(model.embed_input_ids(input_ids)),
                arena,
                inputs,
                input_ids=input_ids,
                logits_indices=rows.indices,
            )
        except NotReplayableError:
            row = model.embed_input_ids(input_ids[:1])
            embedded = self._embedded = arena.empty((num_tokens, row.shape[1]), row.dtype)
            self._forward_plan, self._hidden = record(lambda: layers(embedded), arena, inputs, logits_indices=rows.indices)

    def _logits_and_best(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._model.compute_logits(hidden)
        token_ids = torch.empty(len(hidden), dtype=torch.int64)
        maxima = torch.empty(len(hidden), dtype=torch.float32)
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

    def _inputs(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: LogitsRows | None) -> Any:
        logits_rows = None
        if rows is not None:
            logits_rows = self._step_inputs(**_batch_inputs(rows.metadata), indices=rows.indices.data_ptr())
        return self._step_inputs(
            **_batch_inputs(metadata),
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            logits_rows=logits_rows,
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: LogitsRows | None = None
    ) -> Tensor:
        if metadata.num_tokens > self._max_num_tokens:
            return self._eager.forward(input_ids, positions, metadata, rows)
        if self._embedded is not None:
            self._embed(input_ids)
        self._forward_plan.run(self._inputs(input_ids, positions, metadata, rows))
        return self._hidden[: (rows.metadata if rows is not None else metadata).num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._eager.compute_logits(hidden)

    def op_times(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: LogitsRows | None
    ) -> list[tuple[str, float]]:
        """Run a step and the logits of `rows`; return (op, seconds) of each op, in order."""
        if self._embedded is not None:
            self._embed(input_ids)
        times: list[tuple[str, float]] = self._forward_plan.timed_run(self._inputs(input_ids, positions, metadata, rows))
        num_rows = (rows.metadata if rows is not None else metadata).num_tokens
        if num_rows:
            times += self._logits_plan.timed_run(self._step_inputs(num_rows))
        return times


def _batch_inputs(metadata: AttentionMetadata) -> dict[str, int]:
    """A batch as a recorded step takes it: arguments of the core's `StepInputs`."""
    return {
        "num_tokens": metadata.num_tokens,
        "num_seqs": metadata.num_seqs,
        "max_query_len": metadata.max_query_len,
        "max_seq_len": metadata.max_seq_len,
        "slot_mapping": metadata.slot_mapping.data_ptr(),
        "query_start_loc": metadata.query_start_loc.data_ptr(),
        "seq_lens": metadata.seq_lens.data_ptr(),
        "block_table": metadata.block_table.data_ptr(),
        "block_table_stride": metadata.block_table.stride(0),
    }


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
