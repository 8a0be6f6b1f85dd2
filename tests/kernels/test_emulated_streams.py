"""Emulated streams: copies run late, in random order, and only what an event or a synchronisation forces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pyengine.ops import get_ops, load_emulated

BLOCK_BYTES = 64


@pytest.fixture
def module() -> Iterator[ModuleType]:
    module = load_emulated()
    module.emulated_seed_streams(1)
    yield module
    module.emulated_set_stream(0)


@contextmanager
def on_stream(module: ModuleType, stream: int) -> Iterator[None]:
    previous = module.emulated_set_stream(stream)
    yield
    module.emulated_set_stream(previous)


def pool(num_blocks: int, start: int) -> Tensor:
    """Blocks [num_blocks, BLOCK_BYTES]; block i holds the byte start + i."""
    return (torch.arange(num_blocks, dtype=torch.uint8) + start)[:, None].repeat(1, BLOCK_BYTES)


def swap(module: ModuleType, stream: int, src: Tensor, dst: Tensor, *pairs: tuple[int, int]) -> None:
    with on_stream(module, stream):
        get_ops("emulated").swap_blocks(src, dst, torch.tensor(pairs, dtype=torch.int64))


def test_the_compute_stream_runs_at_once(module: ModuleType) -> None:
    src, dst = pool(3, 1), pool(3, 101)
    swap(module, 0, src, dst, (0, 2), (1, 0))
    assert dst[:, 0].tolist() == [2, 102, 1]


def test_a_copy_is_late_and_its_destination_poisoned(module: ModuleType) -> None:
    src, dst = pool(3, 1), pool(3, 101)
    stream = module.emulated_stream_create()
    swap(module, stream, src, dst, (0, 2))
    assert dst[:, 0].tolist() == [101, 102, 0xFF]
    module.emulated_stream_synchronize(stream)
    assert dst[:, 0].tolist() == [101, 102, 1]


def test_a_source_that_is_written_before_the_event_shows(module: ModuleType) -> None:
    src, dst = pool(3, 1), pool(3, 101)
    stream = module.emulated_stream_create()
    swap(module, stream, src, dst, (0, 0))
    src[0] = 77  # a block that is reused too early
    module.emulated_stream_synchronize(stream)
    assert dst[0, 0] == 77


def test_an_event_covers_what_was_queued_before_it(module: ModuleType) -> None:
    src, dst = pool(4, 1), pool(4, 101)
    stream = module.emulated_stream_create()
    swap(module, stream, src, dst, (0, 0), (2, 2))
    event = module.emulated_event_record(stream)
    swap(module, stream, src, dst, (3, 3))
    module.emulated_event_synchronize(event)
    assert dst[:, 0].tolist() == [1, 102, 3, 0xFF]
    module.emulated_stream_synchronize(stream)
    assert dst[3, 0] == 4
    module.emulated_event_release(event)


def test_asking_an_event_lets_work_go_on(module: ModuleType) -> None:
    src, dst = pool(3, 1), pool(3, 101)
    stream = module.emulated_stream_create()
    swap(module, stream, src, dst, (0, 2), (2, 0))
    event = module.emulated_event_record(stream)
    answers = [module.emulated_event_query(event)]
    while not answers[-1] and len(answers) < 1000:
        answers.append(module.emulated_event_query(event))
    assert answers[-1]
    assert len(answers) > 1
    assert dst[:, 0].tolist() == [3, 102, 1]


def test_one_stream_waits_for_another(module: ModuleType) -> None:
    device, host, back = pool(3, 1), pool(3, 101), pool(3, 201)
    first, second = module.emulated_stream_create(), module.emulated_stream_create()
    swap(module, first, device, host, (0, 1))
    event = module.emulated_event_record(first)
    module.emulated_stream_wait_event(second, event)
    module.emulated_event_release(event)
    swap(module, second, host, back, (1, 2))
    module.emulated_stream_synchronize(second)
    assert back[2, 0] == 1


def test_a_missing_wait_between_streams_shows(module: ModuleType) -> None:
    """For some seed the second stream's copy overtakes the first's."""
    seen = set()
    for seed in range(1, 30):
        module.emulated_seed_streams(seed)
        device, host, back = pool(3, 1), pool(3, 101), pool(3, 201)
        first, second = module.emulated_stream_create(), module.emulated_stream_create()
        swap(module, first, device, host, (0, 1))
        swap(module, second, host, back, (1, 2))
        module.emulated_stream_synchronize(second)
        seen.add(int(back[2, 0]))
        module.emulated_stream_synchronize(first)
    assert 0xFF in seen


def test_the_compute_stream_waits(module: ModuleType) -> None:
    src, dst = pool(3, 1), pool(3, 101)
    stream = module.emulated_stream_create()
    swap(module, stream, src, dst, (1, 1))
    event = module.emulated_event_record(stream)
    module.emulated_stream_wait_event(0, event)
    assert dst[1, 0] == 2


def test_copies_of_one_stream_keep_their_order(module: ModuleType) -> None:
    """A slot that is read and then filled again, as a swap-in followed by a swap-out is."""
    for seed in range(1, 20):
        module.emulated_seed_streams(seed)
        device, host = pool(4, 1), pool(2, 101)
        stream = module.emulated_stream_create()
        swap(module, stream, host, device, (0, 3))
        swap(module, stream, device, host, (1, 0))
        module.emulated_stream_synchronize(stream)
        assert device[3, 0] == 101
        assert host[0, 0] == 2


@pytest.mark.parametrize("seed", range(5))
def test_every_block_survives_random_interleavings(module: ModuleType, seed: int) -> None:
    """Swap out and back in over two streams with the waits that are needed: every checksum matches."""
    rng = random.Random(seed)
    module.emulated_seed_streams(seed + 1)
    device = torch.randint(0, 256, (16, 333), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    host = torch.zeros(24, 333, dtype=torch.uint8)
    expected = {block: device[block].clone() for block in range(16)}
    out, back = module.emulated_stream_create(), module.emulated_stream_create()
    for _ in range(12):
        blocks, slots = rng.sample(range(16), 6), rng.sample(range(24), 6)
        swap(module, out, device, host, *zip(blocks, slots, strict=True))
        left = module.emulated_event_record(out)
        if rng.random() < 0.5:
            module.emulated_event_query(left)
        module.emulated_event_synchronize(left)
        device[blocks] = 0  # free, and used by others meanwhile
        targets = rng.sample(blocks, len(blocks))
        swap(module, back, host, device, *zip(slots, targets, strict=True))
        arrived = module.emulated_event_record(back)
        module.emulated_stream_wait_event(0, arrived)
        moved = [expected[block] for block in blocks]
        expected.update(zip(targets, moved, strict=True))
        for event in (left, arrived):
            module.emulated_event_release(event)
    assert all(torch.equal(device[block], data) for block, data in expected.items())


@pytest.mark.parametrize("function", ["emulated_stream_synchronize", "emulated_set_stream", "emulated_event_query"])
def test_unknown_ids_are_errors(module: ModuleType, function: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        getattr(module, function)(10**9)
