"""Cached blocks by content: chains, salts, collisions, eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyengine.engine.prefix_cache import CachedBlock, HashFunction, PrefixCache, hash_block

SIZE = 2


def token_slice(token_ids: list[int]) -> Callable[[int, int], list[int]]:
    return lambda start, end: token_ids[start:end]


def matched(cache: PrefixCache, token_ids: list[int], salt: str | None = None) -> list[int | None]:
    """The blocks that a sequence finds."""
    return [entry.block_id for entry in cache.match(salt, token_slice(token_ids), len(token_ids) // SIZE)]


def insert(cache: PrefixCache, token_ids: list[int], block_ids: list[int], salt: str | None = None) -> CachedBlock:
    """Enter a sequence's full blocks, and return the tip that it holds."""
    tip = cache.hold_root(salt)
    for index, block_id in enumerate(block_ids):
        new = cache.insert(tip, tuple(token_ids[index * SIZE : (index + 1) * SIZE]), block_id)
        if new is None:
            break
        tip = new
    return tip


def test_a_sequence_finds_the_longest_cached_prefix_in_whole_blocks() -> None:
    cache = PrefixCache(SIZE)
    insert(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    assert matched(cache, [1, 2, 3, 4, 5, 6, 7]) == [11, 12, 13]
    assert matched(cache, [1, 2, 3, 4, 9, 9]) == [11, 12]
    assert matched(cache, [1, 2, 3]) == [11]
    assert matched(cache, [3, 4, 5, 6]) == [], "the same tokens after another prefix are another content"
    assert cache.match(None, token_slice([1, 2, 3, 4]), 1)[-1].block_id == 11, "no more than asked for"


def test_rule_03_salts_do_not_share() -> None:
    """Behaviour 3: only requests of the same salt see each other's blocks."""
    cache = PrefixCache(SIZE)
    insert(cache, [1, 2], [11], salt="a")
    insert(cache, [1, 2], [12], salt=None)
    assert matched(cache, [1, 2], "a") == [11]
    assert matched(cache, [1, 2], None) == [12]
    assert matched(cache, [1, 2], "b") == []


@pytest.mark.parametrize("hash_function", [lambda parent, tokens: 7, lambda parent, tokens: sum(tokens) % 3])
def test_rule_03_a_colliding_hash_is_a_miss_and_never_a_wrong_hit(hash_function: HashFunction) -> None:
    """Behaviour 3: a hash hit is verified by content, that of the block and that of everything before it."""
    cache = PrefixCache(SIZE, hash_function)
    insert(cache, [1, 2, 3, 4], [11, 12])
    assert matched(cache, [1, 2]) == [11]
    assert matched(cache, [2, 1]) == [], "same hash, other tokens"
    assert matched(cache, [0, 3]) == []
    assert matched(cache, [1, 2], "a") == [], "same hash, other salt"
    tip = insert(cache, [2, 1, 3, 4], [13, 14])
    assert tip.parent is None, "a block whose hash is taken is not cached, nor what follows it"
    assert 13 not in cache
    assert 14 not in cache
    assert matched(cache, [2, 1, 3, 4]) == []


def test_rule_03_the_same_block_after_another_prefix_is_no_hit_even_if_all_hashes_agree() -> None:
    """Behaviour 3: the parent is verified, not only the block's own tokens."""

    def blind_to_parents(parent_hash: int, token_ids: tuple[int, ...]) -> int:
        return hash(token_ids)

    cache = PrefixCache(SIZE, blind_to_parents)
    insert(cache, [1, 2, 3, 4], [11, 12])
    insert(cache, [5, 6], [13])
    assert matched(cache, [5, 6, 3, 4]) == [13]
    assert matched(cache, [3, 4]) == []


def test_content_that_is_cached_already_stays_where_it_is() -> None:
    cache = PrefixCache(SIZE)
    insert(cache, [1, 2], [11])
    insert(cache, [1, 2, 3, 4], [21, 22])
    assert matched(cache, [1, 2, 3, 4]) == [11, 22]
    assert 21 not in cache


def test_an_evicted_block_ends_the_prefix() -> None:
    cache = PrefixCache(SIZE)
    insert(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    cache.evict(12)
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == [11]
    cache.evict(99)  # was never cached


def test_a_chain_is_found_again_when_its_missing_link_is_computed_anew() -> None:
    cache = PrefixCache(SIZE)
    cache.drop(insert(cache, [1, 2, 3, 4], [11, 12]))
    cache.evict(11)
    assert matched(cache, [1, 2, 3, 4]) == []
    insert(cache, [1, 2], [21])
    assert matched(cache, [1, 2, 3, 4]) == [21, 12]


def test_nothing_is_remembered_of_what_is_gone() -> None:
    cache = PrefixCache(SIZE)
    for salt in ("a", "b"):
        cache.drop(insert(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13] if salt == "a" else [21, 22, 23], salt))
    for block_id in (11, 13, 12, 22, 21, 23):
        cache.evict(block_id)
    assert (len(cache), cache._entries, cache._roots) == (0, {}, {})


def test_a_tip_that_a_sequence_holds_outlives_its_block() -> None:
    cache = PrefixCache(SIZE)
    tip = insert(cache, [1, 2], [11])
    cache.evict(11)
    extended = cache.insert(tip, (3, 4), 12)
    assert extended is not None
    insert(cache, [1, 2], [21])
    assert matched(cache, [1, 2, 3, 4]) == [21, 12]


def test_reset_forgets_everything() -> None:
    cache = PrefixCache(SIZE)
    insert(cache, [1, 2], [11])
    cache.reset()
    assert matched(cache, [1, 2]) == []
    assert 11 not in cache


def test_the_hash_covers_parent_and_tokens() -> None:
    assert hash_block(1, (1, 2)) == hash_block(1, (1, 2))
    assert len({hash_block(p, t) for p in (1, 2) for t in ((1, 2), (2, 1), (1, 3))}) == 6
