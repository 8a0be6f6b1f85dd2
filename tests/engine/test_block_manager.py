"""Block tables: growth, sharing, copy-on-write, giving back, swapping, and what counts as used."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyengine.engine.block_manager import AppendedSlots, BlockManager, BlockTable, SharedPrefix

EMPTY = SharedPrefix([], 0, None)


def token_slice(token_ids: list[int]) -> Callable[[int, int], list[int]]:
    return lambda start, end: token_ids[start:end]


def append(manager: BlockManager, table: BlockTable, num_tokens: int) -> AppendedSlots:
    """Append and insist that there is room."""
    slots = manager.append_slots(table, num_tokens, manager.num_free_blocks)
    assert slots is not None
    return slots


def open_with(manager: BlockManager, num_tokens: int) -> BlockTable:
    """A table of its own with that many tokens."""
    table = manager.open_table(EMPTY, None)
    append(manager, table, num_tokens)
    return table


def computed(manager: BlockManager, token_ids: list[int], salt: str | None = None) -> BlockTable:
    """A table whose tokens are all computed, and cached."""
    table = manager.open_table(EMPTY, salt)
    append(manager, table, len(token_ids))
    manager.cache_full_blocks(table, token_slice(token_ids), len(token_ids))
    return table


def test_blocks_come_only_for_the_tokens_asked_for() -> None:
    manager = BlockManager(8, 4)
    table = manager.open_table(EMPTY, None)
    assert append(manager, table, 5).new_block_ids == [1, 2]
    assert append(manager, table, 3).new_block_ids == []
    assert append(manager, table, 1).new_block_ids == [3]
    assert (table.block_ids, table.num_tokens) == ([1, 2, 3], 9)


def test_too_few_blocks_change_nothing() -> None:
    manager = BlockManager(8, 4)
    table = open_with(manager, 4)
    assert manager.append_slots(table, 5, 1) is None
    assert (table.block_ids, table.num_tokens, manager.num_free_blocks) == ([1], 4, 7)
    assert manager.num_slots_within(table, 1) == 4
    assert manager.append_slots(table, 4, 1) is not None


def test_utilisation_is_used_over_allocated_slots() -> None:
    manager = BlockManager(8, 4)
    assert manager.kv_utilisation == 0.0
    table = open_with(manager, 5)
    assert manager.kv_utilisation == 5 / 8
    append(manager, table, 3)
    assert manager.kv_utilisation == 1.0
    manager.free(table)
    assert manager.kv_utilisation == 0.0
    assert manager.num_free_blocks == 8


def test_the_first_write_into_a_shared_block_copies_it() -> None:
    manager = BlockManager(8, 4)
    source = open_with(manager, 6)
    fork = manager.open_table(manager.fork_prefix(source, 6), None)
    assert fork.block_ids == source.block_ids == [1, 2]
    assert manager.kv_utilisation == 6 / 8, "shared blocks count once"
    slots = append(manager, fork, 1)
    assert slots.copied == (1, 2, 3)
    assert (fork.block_ids, source.block_ids) == ([1, 3], [1, 2])
    assert manager.pool.ref_counts[1:4] == [2, 1, 1]
    assert manager.kv_utilisation == (4 + 2 + 3) / 12
    assert append(manager, source, 1).copied is None, "alone again, it writes in place"
    assert append(manager, fork, 1).copied is None


def test_whoever_writes_first_copies() -> None:
    manager = BlockManager(8, 4)
    source = open_with(manager, 6)
    forks = [manager.open_table(manager.fork_prefix(source, 6), None) for _ in range(2)]
    assert append(manager, source, 1).copied == (1, 2, 3)
    assert append(manager, forks[0], 1).copied == (1, 2, 4)
    assert append(manager, forks[1], 1).copied is None
    for table in (source, *forks):
        manager.free(table)
    assert manager.num_free_blocks == 8
    assert manager.pool.num_used_slots == 0


def test_a_full_shared_block_is_never_copied() -> None:
    manager = BlockManager(8, 4)
    source = open_with(manager, 8)
    fork = manager.open_table(manager.fork_prefix(source, 8), None)
    slots = append(manager, fork, 1)
    assert (slots.new_block_ids, slots.copied) == ([3], None)


def test_a_copy_needs_a_free_block() -> None:
    manager = BlockManager(2, 4)
    source = open_with(manager, 6)
    fork = manager.open_table(manager.fork_prefix(source, 6), None)
    assert manager.num_slots_within(fork, 0) == 0
    assert manager.append_slots(fork, 1, manager.num_free_blocks) is None
    assert fork.block_ids == source.block_ids


def test_a_fork_may_share_less_than_its_source_has() -> None:
    manager = BlockManager(8, 4)
    source = open_with(manager, 11)
    prefix = manager.fork_prefix(source, 5)
    assert prefix.block_ids == [1, 2]
    assert manager.num_new_blocks(prefix, 6) == 1, "the second block will be copied"
    assert manager.fork_prefix(source, 4).block_ids == [1]


def test_blocks_are_cached_when_they_are_full_of_computed_tokens() -> None:
    manager = BlockManager(8, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    table = open_with(manager, 6)
    assert table.cache_at == 2
    manager.cache_full_blocks(table, token_slice(tokens), 3)
    assert table.cache_at == 4
    assert manager.match_prefix(None, token_slice(tokens), 6).block_ids == [1]
    manager.cache_full_blocks(table, token_slice(tokens), 6)
    assert manager.match_prefix(None, token_slice([*tokens, 7]), 7).block_ids == [1, 2, 3]


def test_a_match_leaves_the_last_token_to_compute() -> None:
    manager = BlockManager(8, 2)
    computed(manager, [1, 2, 3, 4])
    assert manager.match_prefix(None, token_slice([1, 2, 3, 4]), 4).num_tokens == 2
    assert manager.match_prefix(None, token_slice([1, 2, 3, 4, 5]), 5).num_tokens == 4
    assert manager.match_prefix(None, token_slice([1]), 1).num_tokens == 0


def test_cached_blocks_count_as_free_and_are_found_until_they_are_needed() -> None:
    manager = BlockManager(4, 2)
    manager.free(computed(manager, [1, 2, 3, 4]))
    assert manager.num_free_blocks == 4
    prefix = manager.match_prefix(None, token_slice([1, 2, 3, 4, 5]), 5)
    assert prefix.num_tokens == 4
    assert manager.num_new_blocks(prefix, 5) == 3, "free blocks, all three"
    table = manager.open_table(prefix, None)
    assert manager.num_free_blocks == 2
    assert manager.kv_utilisation == 1.0
    again = manager.match_prefix(None, token_slice([1, 2, 3, 4, 5]), 5)
    assert manager.num_new_blocks(again, 5) == 1, "the others are held"
    manager.free(table)


def test_of_one_sequence_the_tail_is_evicted_first_and_of_several_the_least_recently_used() -> None:
    manager = BlockManager(6, 2)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    manager.free(computed(manager, old))
    manager.free(computed(manager, new))
    lengths = []
    table = manager.open_table(EMPTY, None)
    for _ in range(6):
        append(manager, table, 2)
        lengths.append(tuple(manager.match_prefix(None, token_slice([*t, 0]), 7).num_tokens for t in (old, new)))
    assert lengths == [(4, 6), (2, 6), (0, 6), (0, 4), (0, 2), (0, 0)]


def test_matching_counts_as_use() -> None:
    manager = BlockManager(4, 2)
    first, second = [1, 2], [3, 4]
    manager.free(computed(manager, first))
    manager.free(computed(manager, second))
    manager.free(manager.open_table(manager.match_prefix(None, token_slice([*first, 0]), 3), None))
    open_with(manager, 6)  # takes both blocks without content, and the least recently used one
    assert manager.match_prefix(None, token_slice([*first, 0]), 3).num_tokens == 2
    assert manager.match_prefix(None, token_slice([*second, 0]), 3).num_tokens == 0


def test_a_second_copy_of_some_content_takes_over_when_the_first_is_evicted() -> None:
    manager = BlockManager(4, 2)
    first, second = computed(manager, [1, 2]), computed(manager, [1, 2])
    manager.free(first)
    filler = open_with(manager, 6)  # evicts the first
    assert manager.match_prefix(None, token_slice([1, 2, 3]), 3).num_tokens == 0
    block_id = second.block_ids[0]
    manager.free(second)
    assert manager.match_prefix(None, token_slice([1, 2, 3]), 3).block_ids == [block_id]
    manager.free(filler)


def test_a_fork_goes_on_with_its_sources_chain() -> None:
    manager = BlockManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    source = computed(manager, tokens)
    fork = manager.open_table(manager.fork_prefix(source, 3), None)
    append(manager, fork, 3)
    manager.cache_full_blocks(fork, token_slice([1, 2, 3, 9, 8, 7]), 6)
    match = manager.match_prefix(None, token_slice([1, 2, 3, 9, 8, 7, 0]), 7)
    assert match.block_ids == fork.block_ids
    for table in (source, fork):
        manager.free(table)


def test_rule_03_a_fork_of_a_sequence_that_stopped_being_cached_is_not_cached_either() -> None:
    """Behaviour 3: its place in the chain is unknown, and a guess would give wrong hits."""
    manager = BlockManager(12, 2, hash_function=lambda parent_hash, token_ids: sum(token_ids))
    computed(manager, [1, 2])
    source = computed(manager, [4, 4, 3, 0, 5, 6])  # the hash of its second block is taken
    assert source.num_chained_blocks == 1
    assert manager.fork_prefix(source, 3).tip is source.tip
    fork = manager.open_table(manager.fork_prefix(source, 5), None)
    append(manager, fork, 1)
    assert fork.cache_at > 100
    manager.cache_full_blocks(fork, token_slice([4, 4, 3, 0, 5, 6]), 6)
    assert manager.match_prefix(None, token_slice([4, 4, 5, 6, 0]), 5).num_tokens == 2


def test_without_prefix_caching_nothing_is_kept_and_forks_still_share() -> None:
    manager = BlockManager(8, 2, enable_prefix_caching=False)
    table = computed(manager, [1, 2, 3, 4])
    assert manager.match_prefix(None, token_slice([1, 2, 3, 4, 5]), 5) == EMPTY
    fork = manager.open_table(manager.fork_prefix(table, 3), None)
    assert append(manager, fork, 1).copied == (1, 2, 3)


# ---- swapping


def swap_out(manager: BlockManager, table: BlockTable) -> list[tuple[int, int]]:
    copies = manager.swap_out(table)
    assert copies is not None
    manager.swap_space.start_step()
    return copies


def test_a_table_moves_to_the_cpu_pool_and_back() -> None:
    manager = BlockManager(4, 2, num_cpu_blocks=4)
    table = open_with(manager, 5)
    assert swap_out(manager, table) == [(1, 0), (2, 1), (3, 2)]
    assert (manager.num_free_blocks, manager.swap_space.num_free_blocks) == (4, 1)
    assert manager.pool.num_used_slots == 0
    assert manager.num_swap_in_blocks(table, 6) == 3
    assert manager.num_swap_in_blocks(table, 7) == 4
    copies = manager.swap_in(table)
    assert [cpu for cpu, _ in copies] == [0, 1, 2]
    assert [device for _, device in copies] == table.block_ids
    assert (manager.pool.num_used_slots, manager.swap_space.num_free_blocks) == (5, 4)
    append(manager, table, 1)
    manager.free(table)
    assert manager.num_free_blocks == 4


def test_a_full_cpu_pool_refuses_and_changes_nothing() -> None:
    manager = BlockManager(4, 2, num_cpu_blocks=2)
    table = open_with(manager, 5)
    assert manager.swap_out(table) is None
    assert (table.block_ids, table.is_swapped, manager.swap_space.num_free_blocks) == ([1, 2, 3], False, 2)


def test_rule_04_cpu_blocks_freed_in_a_step_are_taken_in_a_later_one() -> None:
    """Behaviour 4: a block whose copy may be under way is not written."""
    manager = BlockManager(4, 2, num_cpu_blocks=2)
    first, second = open_with(manager, 3), open_with(manager, 3)
    swap_out(manager, first)
    manager.swap_in(first)
    assert manager.swap_space.num_free_blocks == 2
    assert manager.swap_out(second) is None
    manager.swap_space.start_step()
    assert manager.swap_out(second) is not None


def test_a_swapped_table_can_be_freed() -> None:
    manager = BlockManager(4, 2, num_cpu_blocks=4)
    table = computed(manager, [1, 2, 3])
    swap_out(manager, table)
    manager.free(table)
    assert (manager.num_free_blocks, manager.swap_space.num_free_blocks) == (4, 4)
    manager.free(open_with(manager, 8))  # evicts what it had cached
    assert manager.prefix_cache is not None
    assert (manager.prefix_cache._entries, manager.prefix_cache._roots) == ({}, {})


def test_sequences_that_share_blocks_share_their_copies_both_ways() -> None:
    manager = BlockManager(8, 2, num_cpu_blocks=8)
    source = open_with(manager, 5)
    forks = []
    for _ in range(2):
        forks.append(manager.open_table(manager.fork_prefix(source, 5), None))
        append(manager, forks[-1], 1)
    shared = source.block_ids[:2]
    assert len(swap_out(manager, forks[0])) == 3
    assert swap_out(manager, forks[1]) == [(forks_own(manager, source, 5), forks[1].block_ids[2])], (
        "two blocks are there already"
    )
    assert forks[0].block_ids[:2] == forks[1].block_ids[:2]
    # One comes back while the source still holds the originals: only its own block is copied.
    assert manager.num_swap_in_blocks(forks[0], 6) == 1
    assert len(manager.swap_in(forks[0])) == 1
    assert forks[0].block_ids[:2] == shared
    # The originals go; the other one brings its own copies back.
    manager.free(source)
    manager.free(forks[0])
    assert manager.num_swap_in_blocks(forks[1], 6) == 3
    assert len(manager.swap_in(forks[1])) == 3
    manager.free(forks[1])
    assert (manager.num_free_blocks, manager.swap_space.num_free_blocks) == (8, 8)


def forks_own(manager: BlockManager, source: BlockTable, device_block: int) -> int:
    """The device block that only a fork held, free by now."""
    assert device_block not in source.block_ids
    assert manager.pool.ref_counts[device_block] == 0
    return device_block


def test_the_first_to_come_back_brings_shared_blocks_for_the_others() -> None:
    manager = BlockManager(8, 2, num_cpu_blocks=8)
    source = open_with(manager, 4)
    fork = manager.open_table(manager.fork_prefix(source, 4), None)
    append(manager, fork, 1)
    swap_out(manager, fork)
    assert swap_out(manager, source) == [], "its blocks were copied for the fork"
    assert manager.num_free_blocks == 8
    assert len(manager.swap_in(source)) == 2
    assert manager.num_swap_in_blocks(fork, 5) == 1
    assert len(manager.swap_in(fork)) == 1
    assert fork.block_ids[:2] == source.block_ids


def test_a_partial_shared_block_gets_its_own_copy() -> None:
    manager = BlockManager(8, 2, num_cpu_blocks=8)
    source = open_with(manager, 3)
    fork = manager.open_table(manager.fork_prefix(source, 3), None)
    swap_out(manager, fork)
    append(manager, source, 1)  # alone now, and may write into the block
    assert manager.num_swap_in_blocks(fork, 3) == 1
    copies = manager.swap_in(fork)
    assert [cpu for cpu, _ in copies] == [1], "the full block is shared, the partial one is not"


def test_num_shared_tokens_counts_full_blocks_that_others_hold() -> None:
    manager = BlockManager(8, 2)
    source = open_with(manager, 5)
    assert manager.num_shared_tokens(source) == 0
    fork = manager.open_table(manager.fork_prefix(source, 5), None)
    assert manager.num_shared_tokens(fork) == 4


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_waste_is_less_than_a_block_a_sequence(block_size: int) -> None:
    manager = BlockManager(64, block_size)
    tables = [manager.open_table(EMPTY, None) for _ in range(3)]
    for step in range(1, 20):
        for table in tables:
            if manager.num_free_blocks > 3:
                append(manager, table, step % 3 + 1)
        allocated = manager.pool.num_allocated_blocks * block_size
        assert 0 <= allocated - manager.pool.num_used_slots < block_size * len(tables)
