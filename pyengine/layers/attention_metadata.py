"""What layers need to know of a step's batch. Built once a step, passed as an argument, never global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LayerKVCache(NamedTuple):
    """One layer's view of the KV pool.

    The logical shape is the same on every backend; strides are the backend's own (the CPU pool keeps K dimension-major:
    `k.stride(2) == 1`), so kernels take strides.
    """

    k: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    k_scale: Tensor | None = None  # fp32 [num_blocks, num_kv_heads, block_size] (INT8) or [num_kv_heads] (FP8)
    v_scale: Tensor | None = None  # as k_scale


@dataclass(slots=True)
class AttentionMetadata:
    """A batch of sequences with any number of query tokens each, laid end to end.

    Sequence i owns query tokens query_start_loc[i]:query_start_loc[i + 1], which are its last tokens: token j of them has
    position seq_lens[i] - query_len + j and sees positions 0 up to its own.
    """

    num_seqs: int
    num_tokens: int  # query tokens, all sequences
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs], tokens with KV after this step
    block_table: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 [num_tokens], block * block_size + offset; -1: not written; empty in `LogitsRows`
    plan: Tensor | None = None  # int32 [num_work, 4], the device's split-KV work list; made once a step
    workspace: Tensor | None = None  # fp32, partial outputs of split-KV


@dataclass(slots=True)
class LogitsRows:
    """The tokens of a step whose logits are wanted: the last ones of each sequence, one or some or none.

    Of the others, the last layer's keys and values are all that anything reads.
    """

    indices: Tensor  # int64 [num_rows], of the step's tokens, ascending
    metadata: AttentionMetadata  # of these tokens as a batch of their own, whose keys and values are written

    def of(self, x: Tensor) -> Tensor:
        """x [num_tokens, ...] -> [num_rows, ...]. A recorded step moves rows within x, so x must not be used again."""
        return x.index_select(0, self.indices)
