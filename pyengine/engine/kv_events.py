"""What happens to the prefix cache, for those outside who want to know which prefixes this engine holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

#: Events in one batch of a snapshot.
SNAPSHOT_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block's KV can be found from now on."""

    block_hash: int  # 64 bits, signed; names the block's whole prefix, within this process
    parent_block_hash: int | None  # of the block before it; None for the first one
    token_ids: tuple[int, ...]  # block size of them
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """It cannot be found any more."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Where a batch stands in a snapshot."""

    index: int
    count: int
    num_blocks: int  # in the whole snapshot


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events in their order. Numbers of batches are consecutive."""

    sequence_number: int
    timestamp: float  # seconds since the epoch
    events: Sequence[KVEvent]
    snapshot: SnapshotChunk | None = None  # None: news


def snapshot_batches(stored: Sequence[BlockStored], number: int) -> list[KVEventBatch]:
    """The state at batch `number` as batches up to that number, the first of which clears what the subscriber knew.

    Args:
        stored: every cached block, parents before children.
        number: of the last batch that is in it.
    """
    pieces = [stored[start : start + SNAPSHOT_CHUNK] for start in range(0, len(stored), SNAPSHOT_CHUNK)] or [()]
    now = time.time()
    batches = []
    for index, piece in enumerate(pieces):
        events: list[KVEvent] = [AllBlocksCleared(), *piece] if index == 0 else list(piece)
        chunk = SnapshotChunk(index, len(pieces), len(stored))
        batches.append(KVEventBatch(number - len(pieces) + 1 + index, now, events, chunk))
    return batches
