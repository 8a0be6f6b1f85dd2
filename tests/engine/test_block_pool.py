"""The device's blocks: references, the order of reuse, fill."""

from __future__ import annotations

import pytest

from pyengine.engine.block_pool import BlockPool


def test_ids_run_from_one_and_the_null_block_is_in_no_count() -> None:
    pool = BlockPool(num_blocks=4, block_size=8)
    assert [pool.take_free() for _ in range(4)] == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    assert pool.num_allocated_blocks == 4
    with pytest.raises(RuntimeError, match="no free KV block"):
        pool.take_free()


def test_blocks_with_content_are_reused_least_recently_freed_first_and_others_before_them() -> None:
    pool = BlockPool(num_blocks=5, block_size=8)
    blocks = [pool.take_free() for _ in range(5)]
    pool.release(blocks[2], keep_content=True)
    pool.release(blocks[0], keep_content=False)
    pool.release(blocks[4], keep_content=True)
    pool.release(blocks[1], keep_content=False)
    assert pool.free_block_ids() == [blocks[1], blocks[0], blocks[2], blocks[4]]
    assert pool.take_free() == blocks[1]


def test_a_free_block_with_content_can_be_held_again_from_anywhere_in_the_list() -> None:
    pool = BlockPool(num_blocks=3, block_size=8)
    blocks = [pool.take_free() for _ in range(3)]
    for block_id in blocks:
        pool.set_fill(block_id, 8)
        pool.release(block_id, keep_content=True)
    assert pool.num_used_slots == 0
    pool.acquire(blocks[1])
    assert pool.free_block_ids() == [blocks[0], blocks[2]]
    assert pool.num_used_slots == 8
    pool.acquire(blocks[1])
    assert pool.num_used_slots == 8, "a shared block counts once"
    assert not pool.release(blocks[1], keep_content=True)
    assert pool.num_free_blocks == 2
    assert pool.release(blocks[1], keep_content=True)
    assert pool.free_block_ids() == [blocks[0], blocks[2], blocks[1]], "it is the most recently used one now"


def test_a_second_free_is_an_error() -> None:
    pool = BlockPool(num_blocks=2, block_size=8)
    block_id = pool.take_free()
    pool.release(block_id, keep_content=False)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release(block_id, keep_content=False)


def test_fill_follows_the_blocks() -> None:
    pool = BlockPool(num_blocks=2, block_size=8)
    first, second = pool.take_free(), pool.take_free()
    pool.set_fill(first, 8)
    pool.set_fill(second, 3)
    pool.set_fill(second, 4)
    assert pool.num_used_slots == 12
    pool.release(second, keep_content=False)
    assert pool.num_used_slots == 8
    assert pool.take_free() == second
    assert pool.num_used_slots == 8, "what a block held before does not count"
