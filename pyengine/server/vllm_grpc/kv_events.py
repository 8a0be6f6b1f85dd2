"""The engine's KV events as messages."""

from __future__ import annotations

from collections.abc import Iterable

from smg_grpc_proto.generated import common_pb2 as pb

from pyengine.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch


class KVEventMessages:
    """One subscription's batches; its events are numbered from 1, those of a snapshot 0."""

    def __init__(self) -> None:
        self._num_events = 0

    def batch(self, batch: KVEventBatch) -> pb.KvEventBatch:
        message = pb.KvEventBatch(sequence_number=batch.sequence_number, timestamp=batch.timestamp, dp_rank=0)
        if batch.snapshot is not None:
            part = batch.snapshot
            message.snapshot.CopyFrom(pb.KvSnapshotChunk(index=part.index, count=part.count, blocks=part.num_blocks))
        for event in _joined(batch.events):
            if batch.snapshot is None:
                self._num_events += 1
                event.event_id = self._num_events
            message.events.append(event)
        return message


def _joined(events: Iterable[KVEvent]) -> Iterable[pb.KvCacheEvent]:
    """Events as messages; a block that continues the one before it goes into the same one, and so do removals in a row."""
    last: pb.KvCacheEvent | None = None
    last_stored: BlockStored | None = None
    for event in events:
        if isinstance(event, BlockStored):
            continues = last_stored is not None and event.parent_block_hash == last_stored.block_hash
            if last is None or not continues:
                if last is not None:
                    yield last
                last = pb.KvCacheEvent(stored=_stored_header(event))
            last.stored.blocks.append(
                pb.KvBlock(block_hash=event.block_hash, token_ids=event.token_ids, block_size=len(event.token_ids))
            )
            last_stored = event
            continue
        last_stored = None
        if isinstance(event, BlockRemoved) and last is not None and last.WhichOneof("data") == "removed":
            last.removed.block_hashes.append(event.block_hash)
            continue
        if last is not None:
            yield last
        if isinstance(event, AllBlocksCleared):
            last = pb.KvCacheEvent(cleared=pb.KvCacheCleared())
        else:
            last = pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=[event.block_hash], tier=pb.KV_CACHE_TIER_DEVICE))
    if last is not None:
        yield last


def _stored_header(event: BlockStored) -> pb.KvBlocksStored:
    message = pb.KvBlocksStored(tier=pb.KV_CACHE_TIER_DEVICE)
    if event.parent_block_hash is not None:
        message.parent_block_hash = event.parent_block_hash
    if event.cache_salt is not None:
        message.cache_salt = event.cache_salt
    return message
