"""The split-KV plan of paged attention on GPUs: which part of which sequence each block of the decode kernel works on.

Only short sequences are planned (decode, speculative verify): those whose query rows fill one tile of the tensor core. Longer
ones (prefill, chunked prefill) go to the prefill kernel, which needs no plan. Keys are cut at fixed multiples of `split_size`,
whatever else is in the batch, so a row's result is bitwise the same alone and in any batch. One plan serves every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILE_ROWS = 16  # query rows of one tile: csrc/attention/cuda/query_rows.cuh, kTileRows
DEFAULT_SPLIT_SIZE = 512  # keys; a multiple of every tile's length
_PADDING = (-1, 0, 0, -1)


@dataclass(frozen=True)
class AttentionPlan:
    """Rows of `paged_attention`'s `plan`: (seq, kv_begin, kv_end, part).

    `part` is the first workspace slot of the part, one slot a query token; -1 where a sequence has one part only, which then
    writes the output itself. Parts of a sequence are neighbours, in the order of their keys.
    """

    work: list[tuple[int, int, int, int]]
    num_slots: int


def is_short(query_len: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether the decode kernel serves a sequence: the rule of csrc/attention/cuda/query_rows.cuh."""
    return query_len == 1 or query_len * (num_heads // num_kv_heads) <= TILE_ROWS


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    *,
    split_size: int = DEFAULT_SPLIT_SIZE,
    num_work: int | None = None,
) -> AttentionPlan:
    """Plan one step.

    Args:
        query_lens: query tokens of each sequence; 0 leaves a sequence out.
        seq_lens: tokens of each sequence with KV after this step.
        num_heads, num_kv_heads: of the attention layers.
        split_size: keys a part, a multiple of 64.
        num_work: pad the work list to this length with entries that do nothing, as a recorded step needs it.

    Raises:
        ValueError: a `split_size` that is not a multiple of 64, or more work than `num_work`.
    """
    if split_size <= 0 or split_size % 64:
        raise ValueError(f"split_size is {split_size}, it must be a positive multiple of 64")
    work: list[tuple[int, int, int, int]] = []
    num_slots = 0
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len == 0 or not is_short(query_len, num_heads, num_kv_heads):
            continue
        if seq_len <= split_size:
            work.append((seq, 0, seq_len, -1))
            continue
        for begin in range(0, seq_len, split_size):
            work.append((seq, begin, min(begin + split_size, seq_len), num_slots))
            num_slots += query_len
    if num_work is not None:
        if len(work) > num_work:
            raise ValueError(f"the plan has {len(work)} entries, num_work is {num_work}")
        work.extend([_PADDING] * (num_work - len(work)))
    return AttentionPlan(work, num_slots)


def workspace_size(num_slots: int, num_heads: int, head_dim: int) -> int:
    """Floats of `paged_attention`'s `workspace` for that many slots: csrc/attention/cuda/query_rows.cuh, slot_floats."""
    slot = (num_heads * (head_dim + 1) + 3) // 4 * 4
    return num_slots * slot
