"""Decode steps from recorded graphs: one graph a size of batch, replayed over buffers that stay where they are.

A decode step of a GPU is hundreds of small launches, which take the host longer to queue than the device to run. They are
recorded once (CUDA graphs) and then cost one call. A graph has fixed shapes, so a batch is padded to the next recorded size:
padding rows write to slot -1, which is no slot, and their work entries do nothing. The split-KV plan is made once a step and
copied into the graph's own buffer, padded likewise; under a plan attention's results do not depend on the padding.

Other steps (prefill, mixed) run op by op, and so do batches that are larger than the largest graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from pyengine.config import EngineConfig
from pyengine.layers.attention_metadata import AttentionMetadata, LogitsRows
from pyengine.loader.weights import MODEL_DTYPES
from pyengine.worker.backend import Graph, GraphRecorder
from pyengine.worker.backends.attention_plan import DEFAULT_SPLIT_SIZE, workspace_size
from pyengine.worker.step_replay import StepRunner

logger = logging.getLogger(__name__)

#: Runs the layers: input_ids, positions int64 [num_tokens], the batch -> hidden states [num_tokens, hidden_size].
Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]

_PADDING_WORK = (-1, 0, 0, -1)  # an entry of a plan that does nothing


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that are recorded, ascending: fine steps where a batch is small, and max_num_seqs last."""
    sizes = chain((1, 2, 4), range(8, 32, 8), range(32, 128, 16), range(128, 512, 32))
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 512)]


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """Sizes that graphs are made for."""

    hidden_size: int
    max_num_seqs: int
    max_model_len: int
    max_blocks: int  # of a sequence
    max_work: int  # entries of a plan
    workspace_floats: int  # of attention's workspace for such a plan

    @staticmethod
    def of(config: EngineConfig) -> GraphShape:
        """An engine's. A plan splits what the pool holds; one that shares more than that by prefixes runs op by op."""
        arch, cache = config.model.arch, config.cache
        max_work = config.scheduler.max_num_seqs + cache.num_blocks * cache.block_size // DEFAULT_SPLIT_SIZE
        return GraphShape(
            hidden_size=arch.hidden_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            max_blocks=-(-config.model.max_model_len // cache.block_size),
            max_work=max_work,
            workspace_floats=workspace_size(max_work, arch.num_heads, arch.head_dim),
        )


class DecodeGraphs:
    """Replays decode steps.

    Args:
        forward: the model over its KV caches; only operators that a graph can record.
        recorder: the device's.
        shape: sizes of the engine.
        dtype: of hidden states, with their `device`.
    """

    def __init__(
        self,
        forward: Forward,
        recorder: GraphRecorder,
        *,
        shape: GraphShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._buckets = batch_buckets(shape.max_num_seqs)
        self._max_model_len = shape.max_model_len
        self._graphs: dict[tuple[int, int], Graph] = {}
        rows = self._buckets[-1]
        self._max_work = shape.max_work

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # What graphs read and write. A graph of n sequences uses the first n rows.
        self._input_ids = zeros(rows, dtype=torch.int64)
        self._positions = zeros(rows, dtype=torch.int64)
        self._slot_mapping = zeros(rows, dtype=torch.int64)
        self._seq_lens = zeros(rows, dtype=torch.int32)
        self._block_table = zeros(rows, shape.max_blocks, dtype=torch.int32)
        self._query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._plan = zeros(self._max_work, 4, dtype=torch.int32)
        self._no_work = torch.tensor(_PADDING_WORK, dtype=torch.int32).to(device)  # [4]
        self._workspace = zeros(shape.workspace_floats, dtype=torch.float32)
        self._hidden = zeros(rows, shape.hidden_size, dtype=dtype)

    @property
    def num_graphs(self) -> int:
        """Recorded so far."""
        return len(self._graphs)

    def covers(self, metadata: AttentionMetadata) -> bool:
        """Whether a step is a decode step that some graph can run."""
        plan = metadata.plan
        return (
            metadata.max_query_len == 1
            and metadata.num_seqs <= self._buckets[-1]
            and plan is not None
            and len(plan) <= self._max_work
        )

    def record_common(self) -> None:
        """Record what most steps need, so that no request waits for it: each batch size, with sequences of moderate length."""
        start = time.monotonic()
        for size in reversed(self._buckets):  # the largest first: the others fit into its memory
            self._graph(size, 2 * size)
        seconds = time.monotonic() - start
        logger.info("recorded %d decode graphs for up to %d sequences, %.2f s", self.num_graphs, self._buckets[-1], seconds)

    def run(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Replay a step that `covers` admits.

        Args:
            input_ids, positions: int64 [num_seqs].
            metadata: with its plan.

        Returns:
            Hidden states [num_seqs, hidden_size], valid until the next call.
        """
        assert metadata.plan is not None
        num_seqs, num_work = metadata.num_seqs, len(metadata.plan)
        size = next(bucket for bucket in self._buckets if bucket >= num_seqs)
        graph = self._graph(size, num_work)
        self._pad(num_seqs, size, num_work)
        self._input_ids[:num_seqs].copy_(input_ids)
        self._positions[:num_seqs].copy_(positions)
        self._slot_mapping[:num_seqs].copy_(metadata.slot_mapping)
        self._seq_lens[:num_seqs].copy_(metadata.seq_lens)
        self._block_table[:num_seqs, : metadata.block_table.shape[1]].copy_(metadata.block_table)
        self._plan[:num_work].copy_(metadata.plan)
        graph.replay()
        return self._hidden[:num_seqs]

    def _graph(self, size: int, num_work: int) -> Graph:
        """The graph of `size` sequences whose plan has room for `num_work` entries; recorded now if it is needed first."""
        capacity = size
        while capacity < num_work:
            capacity *= 2
        capacity = min(capacity, self._max_work)
        key = size, capacity
        if key not in self._graphs:
            self._pad(0, size, 0)  # recording may run the step: it must not touch a block
            self._graphs[key] = self._recorder.record(lambda: self._step(size, capacity))
        return self._graphs[key]

    def _step(self, size: int, capacity: int) -> None:
        """What is recorded."""
        metadata = AttentionMetadata(
            num_seqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._block_table[:size],
            slot_mapping=self._slot_mapping[:size],
            plan=self._plan[:capacity],
            workspace=self._workspace,
        )
        self._hidden[:size].copy_(self._forward(self._input_ids[:size], self._positions[:size], metadata))

    def _pad(self, num_seqs: int, size: int, num_work: int) -> None:
        """Make padding of rows from num_seqs on and work from num_work on: a token of the null block, written nowhere."""
        self._input_ids[num_seqs:size].zero_()
        self._positions[num_seqs:size].zero_()
        self._slot_mapping[num_seqs:size].fill_(-1)
        self._seq_lens[num_seqs:size].fill_(1)
        self._block_table[num_seqs:size].zero_()
        self._plan[num_work:].copy_(self._no_work)


class GraphStepRunner:
    """A `StepRunner` that replays the decode steps that its graphs cover, and leaves the others to another one.

    Args:
        step: runs what no graph covers, and what is recorded.
        recorder: the device's.
        config: resolved.
        device: of hidden states.
    """

    def __init__(self, step: StepRunner, recorder: GraphRecorder, config: EngineConfig, device: torch.device) -> None:
        self._step = step
        dtype = MODEL_DTYPES[config.model.dtype]
        with torch.inference_mode():
            self.graphs = DecodeGraphs(step.forward, recorder, shape=GraphShape.of(config), dtype=dtype, device=device)
            if recorder.records_at_start:
                self.graphs.record_common()

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: LogitsRows | None = None
    ) -> Tensor:
        if not self.graphs.covers(metadata):
            return self._step.forward(input_ids, positions, metadata, rows)
        hidden = self.graphs.run(input_ids, positions, metadata)
        return hidden if rows is None else rows.of(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._step.compute_logits(hidden)
