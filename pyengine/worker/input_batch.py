"""The batch between steps: every running sequence has a row of token ids and of block ids, changed by difference.

A step's inputs are computed from these rows by one call (csrc/common/input_batch.h), into buffers that are allocated once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LogitsRows
from pyengine.ops import load_core

IntArray = npt.NDArray[np.int64]


class RequestInputError(Exception):
    """One request cannot be run as the scheduler described it."""


@dataclass(slots=True)
class StepInputs:
    """What the model and the sampler need for one step. Sequences come in the order of their rows."""

    req_ids: list[str]  # [num_seqs]
    rows: IntArray  # [num_seqs], each sequence's row in the batch
    query_lens: IntArray  # [num_seqs]
    num_computed_tokens: IntArray  # [num_seqs], before this step
    samples: npt.NDArray[np.bool_]  # [num_seqs], whether the step reaches the sequence's last token
    num_samples: int
    input_ids: Tensor  # int64 [num_tokens], on the device
    positions: Tensor  # int64 [num_tokens], on the device
    metadata: AttentionMetadata
    query_start_loc: npt.NDArray[np.int32]  # [num_seqs + 1], on the host
    recorded: Any  # the step as a recorded one takes it (`StepInputs` of the core)

    def logits_rows(self, row_lens: IntArray) -> LogitsRows | None:
        """The last row_lens[i] query tokens of each sequence i; None if these are all."""
        step = self.metadata
        starts = np.concatenate(([0], row_lens.cumsum()))  # of each sequence's rows
        num_rows = int(starts[-1])
        if num_rows == step.num_tokens:
            return None
        indices = np.repeat(self.query_start_loc[1:] - starts[1:], row_lens) + np.arange(num_rows)
        seqs = np.flatnonzero(row_lens)

        def on_device(array: npt.NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(array).to(self.input_ids.device, dtype)

        kept = on_device(seqs)
        metadata = AttentionMetadata(
            num_seqs=len(seqs),
            num_tokens=num_rows,
            max_query_len=int(row_lens.max()),
            max_seq_len=step.max_seq_len,
            query_start_loc=on_device(np.append(starts[seqs], num_rows), torch.int32),
            seq_lens=step.seq_lens.index_select(0, kept),
            block_table=step.block_table.index_select(0, kept),
            slot_mapping=step.slot_mapping[:0],
        )
        return LogitsRows(on_device(indices), metadata)


@dataclass(slots=True)
class _StepViews:
    """The parts of the buffers that steps of one size use."""

    sizes: tuple[int, int]  # num_seqs, num_tokens
    rows: IntArray  # [num_seqs], as the three that follow
    query_lens: IntArray
    computed: IntArray
    samples: npt.NDArray[np.bool_]
    host_query_start_loc: npt.NDArray[np.int32]  # [num_seqs + 1]
    input_ids: Tensor  # [num_tokens], as the two that follow
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs]
    block_table: Tensor | None = None  # [num_seqs, max_blocks], where it is the first rows of the batch's


class InputBatch:
    """Token ids, block tables and lengths of the running sequences.

    Args:
        max_num_seqs: rows.
        max_model_len: columns of token ids.
        max_num_batched_tokens: query tokens of one step.
        block_size: tokens in a block, a power of two.
        vocab_size: for checking token ids.
        device: where inputs go.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._device = device
        self._block_size = block_size
        self._block_shift = block_size.bit_length() - 1
        self._max_blocks = -(-max_model_len // block_size)
        # Rows. Zeroed memory is mapped when it is first written, so long rows cost nothing until they fill.
        self._row_of: dict[str, int] = {}
        self._req_ids: list[str] = []
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self._block_table = np.zeros((max_num_seqs, self._max_blocks), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        # A step's buffers.
        self._input_ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._query_start_loc = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self._rows = np.zeros(max_num_seqs, dtype=np.int64)
        self._query_lens = np.zeros(max_num_seqs, dtype=np.int64)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._samples = np.zeros(max_num_seqs, dtype=np.bool_)
        self._gathered_blocks = np.zeros_like(self._block_table)
        self._preparer = load_core().StepPreparer(
            {
                "token_ids": self._token_ids,
                "block_table": self._block_table,
                "num_tokens": self._num_tokens,
                "num_blocks": self._num_blocks,
                "num_computed": self._num_computed,
                "input_ids": self._input_ids,
                "positions": self._positions,
                "slot_mapping": self._slot_mapping,
                "query_start_loc": self._query_start_loc,
                "seq_lens": self._seq_lens,
                "rows": self._rows,
                "query_lens": self._query_lens,
                "computed": self._computed,
                "samples": self._samples,
                "gathered_blocks": self._gathered_blocks,
                "logits_indices": np.zeros(max_num_seqs, dtype=np.int64),
                "logits_starts": np.arange(max_num_seqs + 1, dtype=np.int32),
                "logits_seq_lens": np.zeros(max_num_seqs, dtype=np.int32),
                "logits_blocks": np.zeros_like(self._block_table),
            },
            self._block_shift,
        )
        self._views: _StepViews | None = None

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    def __len__(self) -> int:
        return len(self._req_ids)

    def check_tokens(self, token_ids: Sequence[int]) -> IntArray:
        """`token_ids` as an array.

        Raises:
            RequestInputError: too many for a row, or an id outside the vocabulary.
        """
        if len(token_ids) > self._max_model_len:
            raise RequestInputError(f"the sequence has {len(token_ids)} tokens, max_model_len is {self._max_model_len}")
        array = np.array(token_ids, dtype=np.int64)
        if len(array) == 0:
            raise RequestInputError("the sequence has no tokens")
        if array.min() < 0 or array.max() >= self._vocab_size:
            wrong = array[(array < 0) | (array >= self._vocab_size)][0]
            raise RequestInputError(f"token id {wrong} is outside the vocabulary of {self._vocab_size}")
        return array

    def add(self, req_id: str, token_ids: IntArray, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Give a sequence a row. `token_ids` [num_tokens] are checked."""
        row = len(self._req_ids)
        if req_id in self._row_of or row == len(self._num_tokens):
            raise RuntimeError(f"sequence {req_id} has a row already, or all {row} rows are taken")
        self._req_ids.append(req_id)
        self._row_of[req_id] = row
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        self._num_computed[row] = num_computed_tokens
        self._block_table[row, : len(block_ids)] = block_ids
        self._num_blocks[row] = len(block_ids)

    def remove(self, req_id: str) -> IntArray:
        """Free a sequence's row, and return its token ids [num_tokens]. The last row moves into the gap."""
        row, last = self._row_of.pop(req_id), len(self._req_ids) - 1
        token_ids = self._token_ids[row, : self._num_tokens[row]].copy()
        if row != last:
            num_tokens, num_blocks = self._num_tokens[last], self._num_blocks[last]
            self._token_ids[row, :num_tokens] = self._token_ids[last, :num_tokens]
            self._block_table[row, :num_blocks] = self._block_table[last, :num_blocks]
            self._num_tokens[row], self._num_blocks[row] = num_tokens, num_blocks
            self._num_computed[row] = self._num_computed[last]
            self._req_ids[row] = self._req_ids[last]
            self._row_of[self._req_ids[row]] = row
        self._req_ids.pop()
        return token_ids

    def update(
        self,
        req_ids: Sequence[str],
        new_block_ids: Sequence[Sequence[int]],
        replaced_block_ids: Sequence[Sequence[tuple[int, int]]],
        num_computed_tokens: Sequence[int],
    ) -> None:
        """Apply what changed in running sequences; the arguments run in parallel."""
        rows = [self._row_of[req_id] for req_id in req_ids]
        self._preparer.set_computed(rows, num_computed_tokens)
        for row, replaced, new in zip(rows, replaced_block_ids, new_block_ids, strict=True):
            for index, block_id in replaced:
                self._block_table[row, index] = block_id
            if new:
                start = self._num_blocks[row]
                self._block_table[row, start : start + len(new)] = new
                self._num_blocks[row] = start + len(new)

    def append_sampled(self, token_ids: Sequence[int]) -> None:
        """Append a token to each sequence that the prepared step samples, in the order of their rows."""
        # A sequence that has just reached max_model_len ends with this token, which nothing reads again.
        self._preparer.append_sampled(token_ids)

    def prepare(self, num_scheduled_tokens: Mapping[str, int]) -> StepInputs:
        """The inputs of a step over these sequences and numbers of query tokens, valid until the next step's.

        Raises:
            RuntimeError: the scheduler's and the worker's idea of a sequence differ.
        """
        scheduled = [self._row_of[req_id] for req_id in num_scheduled_tokens]
        num_tokens, max_query_len, max_seq_len, num_samples, wrong_row = self._preparer.prepare(
            scheduled, list(num_scheduled_tokens.values())
        )
        if wrong_row >= 0:
            raise self._misfit(wrong_row, num_scheduled_tokens)
        if num_tokens > len(self._positions):
            raise RuntimeError(f"{num_tokens} tokens are scheduled, max_num_batched_tokens is {len(self._positions)}")
        views = self._views_of((len(scheduled), num_tokens))
        is_whole = len(scheduled) == len(self._req_ids)
        metadata = AttentionMetadata(
            num_seqs=len(scheduled),
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc=views.query_start_loc,
            seq_lens=views.seq_lens,
            block_table=self._blocks_of(views, max(scheduled), -(-max_seq_len // self._block_size)),
            slot_mapping=views.slot_mapping,
        )
        return StepInputs(
            req_ids=self._req_ids.copy() if is_whole else [self._req_ids[row] for row in views.rows.tolist()],
            rows=views.rows,
            query_lens=views.query_lens,
            num_computed_tokens=views.computed,
            samples=views.samples,
            num_samples=num_samples,
            input_ids=views.input_ids,
            positions=views.positions,
            metadata=metadata,
            query_start_loc=views.host_query_start_loc,
            recorded=self._preparer.inputs,
        )

    def token_ids(self, row: int) -> IntArray:
        """A view of a row's token ids [num_tokens]."""
        return self._token_ids[row, : self._num_tokens[row]]

    def _misfit(self, row: int, num_scheduled_tokens: Mapping[str, int]) -> RuntimeError:
        req_id = self._req_ids[row]
        query_len = num_scheduled_tokens[req_id]
        return RuntimeError(
            f"sequence {req_id} is scheduled up to token {self._num_computed[row] + query_len}, {query_len} of them now, "
            f"but has {self._num_tokens[row]} tokens and {self._num_blocks[row]} blocks of {self._block_size}"
        )

    def _views_of(self, sizes: tuple[int, int]) -> _StepViews:
        """Those of a step of (num_seqs, num_tokens). On a CPU they serve the next steps of these sizes, too."""
        if self._views is not None and self._views.sizes == sizes and self._device.type == "cpu":
            return self._views
        num_seqs, num_tokens = sizes
        self._views = _StepViews(
            sizes=sizes,
            rows=self._rows[:num_seqs],
            query_lens=self._query_lens[:num_seqs],
            computed=self._computed[:num_seqs],
            samples=self._samples[:num_seqs],
            host_query_start_loc=self._query_start_loc[: num_seqs + 1],
            input_ids=self._on_device(self._input_ids[:num_tokens]),
            positions=self._on_device(self._positions[:num_tokens]),
            slot_mapping=self._on_device(self._slot_mapping[:num_tokens]),
            query_start_loc=self._on_device(self._query_start_loc[: num_seqs + 1]),
            seq_lens=self._on_device(self._seq_lens[:num_seqs]),
        )
        return self._views

    def _blocks_of(self, views: _StepViews, last_row: int, num_columns: int) -> Tensor:
        """Block tables [num_seqs, num_columns or more]: no copy where they are the first rows, as in most steps."""
        num_seqs = views.sizes[0]
        if last_row != num_seqs - 1:
            return self._on_device(self._gathered_blocks[:num_seqs, :num_columns])
        if self._device.type != "cpu":
            return self._on_device(self._block_table[:num_seqs, :num_columns])
        if views.block_table is None:
            views.block_table = torch.from_numpy(self._block_table[:num_seqs])
        return views.block_table

    def _on_device(self, array: npt.NDArray[np.int32] | IntArray) -> Tensor:
        # The copy to a GPU waits: the buffer is written again before the next step's work is known to be done.
        return torch.from_numpy(array).to(self._device)
