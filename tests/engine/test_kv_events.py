"""KV events: whoever applies them knows what the prefix cache holds, whenever they joined; nothing is kept for nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

import pytest
from test_async_engine import run_async, started, until

from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.kv_event_log import KVEventLog
from pyengine.engine.kv_events import (
    SNAPSHOT_CHUNK,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    snapshot_batches,
)
from pyengine.errors import DataLostError, OutOfRangeError, UnavailableError, UnsupportedError
from pyengine.inputs import TokensPrompt
from pyengine.sampling_params import SamplingParams


class Mirror:
    """What a subscriber knows, checked at every event."""

    def __init__(self) -> None:
        self.blocks: dict[int, BlockStored] = {}
        self.last_number = 0
        self.num_removed = 0

    def apply(self, batch: KVEventBatch) -> None:
        assert self.last_number in (0, batch.sequence_number - 1), "a gap"
        self.last_number = batch.sequence_number
        for event in batch.events:
            self.apply_event(event)

    def apply_event(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            self.num_removed += 1
            del self.blocks[event.block_hash]
        else:
            assert event.block_hash not in self.blocks, "stored twice"
            self.blocks[event.block_hash] = event


def cached(engine: AsyncLLMEngine) -> dict[int, BlockStored]:
    cache = engine._engine.prefix_cache
    assert cache is not None
    return {block.block_hash: block for block in cache.stored_blocks()}


async def generate(engine: AsyncLLMEngine, request_id: str, prompt: list[int], salt: str | None = None, n: int = 3) -> None:
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    async for _ in engine.generate(TokensPrompt(prompt), params, request_id, cache_salt=salt):
        pass


async def follow(events: AbstractAsyncContextManager[AsyncGenerator[KVEventBatch, None]], mirror: Mirror) -> None:
    async with events as batches:
        async for batch in batches:
            mirror.apply(batch)


@run_async
async def test_mirrors_agree_with_the_cache_through_evictions_whenever_they_join() -> None:
    rng = random.Random(7)
    async with started(num_kv_blocks=24, block_size=8, max_num_seqs=4) as (engine, _):
        mirrors: list[Mirror] = []
        tasks: list[asyncio.Task[None]] = []
        for round_number in range(12):
            if round_number % 4 == 0:
                mirrors.append(Mirror())
                tasks.append(asyncio.create_task(follow(engine.kv_events(), mirrors[-1])))
                await until(lambda: mirrors[-1].last_number > 0)
            prompts = [[rng.randrange(1, 4)] * 8 + [rng.randrange(1, 3) for _ in range(rng.randrange(40))] for _ in range(5)]
            salts = [rng.choice([None, "a"]) for _ in prompts]
            names = [f"{round_number}-{i}" for i in range(5)]
            await asyncio.gather(*(generate(engine, *each) for each in zip(names, prompts, salts, strict=True)))
        expected = cached(engine)
        assert expected
        await until(lambda: all(mirror.last_number == engine._step_thread.kv_events.last_number for mirror in mirrors))
        assert [mirror.blocks for mirror in mirrors] == [expected] * 3
        assert all(mirror.num_removed for mirror in mirrors), "the pool was too large to show evictions"
        for block in expected.values():
            assert len(block.token_ids) == 8
            parent = expected.get(block.parent_block_hash) if block.parent_block_hash is not None else None
            assert parent is None or parent.cache_salt == block.cache_salt
        assert {block.cache_salt for block in expected.values()} == {None, "a"}
        for task in tasks:
            task.cancel()


@run_async
async def test_a_reset_clears_and_happens_only_while_nothing_runs() -> None:
    async with started(block_size=8) as (engine, _):
        await generate(engine, "a", [5] * 20)
        mirror = Mirror()
        task = asyncio.create_task(follow(engine.kv_events(), mirror))
        await until(lambda: len(mirror.blocks) == 2)
        running = asyncio.create_task(generate(engine, "b", [6] * 20, n=50_000))
        await until(lambda: len(mirror.blocks) > 5)
        assert not await engine.reset_prefix_cache()
        running.cancel()
        while not await engine.reset_prefix_cache():
            await asyncio.sleep(0.001)
        await until(lambda: not mirror.blocks)
        assert not cached(engine)
        task.cancel()


@run_async
async def test_a_subscriber_resumes_where_it_left_and_not_where_it_never_was() -> None:
    async with started(block_size=8) as (engine, _):
        mirror = Mirror()
        task = asyncio.create_task(follow(engine.kv_events(), mirror))
        await until(lambda: mirror.last_number > 0)
        await generate(engine, "a", [5] * 20)
        await until(lambda: len(mirror.blocks) == 2)
        task.cancel()
        await generate(engine, "b", [6] * 20)
        task = asyncio.create_task(follow(engine.kv_events(mirror.last_number), mirror))
        await until(lambda: len(mirror.blocks) == 4)
        assert mirror.blocks == cached(engine)
        task.cancel()
        for unknown in (1, mirror.last_number + 1):
            with pytest.raises(OutOfRangeError, match="start_sequence_number"):
                await follow(engine.kv_events(unknown), Mirror())


@run_async
async def test_nothing_is_recorded_for_nobody() -> None:
    async with started(block_size=8) as (engine, _):
        cache = engine._engine.prefix_cache
        assert cache is not None
        await generate(engine, "a", [5] * 20)
        assert cache._events is None
        engine._step_thread.kv_events._max_events = 8
        mirror = Mirror()
        task = asyncio.create_task(follow(engine.kv_events(), mirror))
        await until(lambda: len(mirror.blocks) == 2)
        task.cancel()
        await generate(engine, "b", [6] * 200)  # more than the log holds, with nobody there
        await generate(engine, "c", [7] * 20)
        assert cache._events is None
        assert not engine._step_thread.kv_events._batches
        with pytest.raises(OutOfRangeError):
            await follow(engine.kv_events(mirror.last_number), mirror)


@run_async
async def test_without_a_prefix_cache_there_are_no_events() -> None:
    async with started(enable_prefix_caching=False) as (engine, _):
        with pytest.raises(UnsupportedError, match="enable_prefix_caching"):
            await follow(engine.kv_events(), Mirror())


@run_async
async def test_subscribers_are_told_when_the_engine_ends() -> None:
    async with started(block_size=8) as (engine, _):
        mirror = Mirror()
        task = asyncio.create_task(follow(engine.kv_events(), mirror))
        await until(lambda: mirror.last_number > 0)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(UnavailableError):
            await task


@run_async
async def test_a_slow_subscriber_loses_its_place_and_no_memory_is_spent_on_it() -> None:
    log = KVEventLog(max_events=10)
    log.join()
    start = log.last_number
    log.append([BlockRemoved(1)])
    batches = log.follow(start)
    assert (await anext(batches)).sequence_number == start + 1
    for _ in range(100):
        assert log.append([BlockRemoved(2)] * 3)
        assert log._num_events <= 10
    with pytest.raises(DataLostError):
        await anext(batches)


def test_a_snapshot_is_numbered_up_to_its_state_and_clears_first() -> None:
    stored = [BlockStored(i, i - 1 if i else None, (i,), None) for i in range(2 * SNAPSHOT_CHUNK + 1)]
    batches = snapshot_batches(stored, 5000)
    assert [batch.sequence_number for batch in batches] == [4998, 4999, 5000]
    mirror = Mirror()
    mirror.blocks[-1] = stored[0]
    for index, batch in enumerate(batches):
        assert batch.snapshot is not None
        assert (batch.snapshot.index, batch.snapshot.count, batch.snapshot.num_blocks) == (index, 3, len(stored))
        mirror.apply(batch)
    assert list(mirror.blocks.values()) == stored
    (empty,) = snapshot_batches([], 9)
    assert (empty.sequence_number, empty.events) == (9, [AllBlocksCleared()])
