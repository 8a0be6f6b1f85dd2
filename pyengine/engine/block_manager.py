"""Block tables: how sequences get, share, copy, swap and give back KV blocks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from pyengine.engine.block_pool import BlockPool
from pyengine.engine.block_usage import BlockUsage
from pyengine.engine.prefix_cache import CachedBlock, HashFunction, PrefixCache, TokenSlice, hash_block
from pyengine.engine.swap_space import SwapSpace

NEVER = sys.maxsize


class BlockTable:
    """The blocks of one sequence, in order: on the device, or after `swap_out` in the CPU pool."""

    __slots__ = ("block_ids", "cache_at", "is_swapped", "num_chained_blocks", "num_tokens", "tip", "usage")

    def __init__(self, usage: BlockUsage | None = None) -> None:
        self.usage = usage  # counts device blocks against a quota
        self.block_ids: list[int] = []
        self.num_tokens = 0  # slots in use; the last block is partial unless this is a multiple of the block size
        self.is_swapped = False
        self.tip: CachedBlock | None = None  # entry of full block num_chained_blocks - 1, or a root; None: not cached
        self.num_chained_blocks = 0  # leading blocks that have an entry, whether it stands for this very block or a twin
        self.cache_at = NEVER  # computed tokens with which the next block can be cached


@dataclass(slots=True)
class SharedPrefix:
    """Blocks that a new table may start with. Nothing is held until `open_table`, which must follow in the same step."""

    block_ids: list[int]
    num_tokens: int  # in those blocks; the last block may be partial
    tip: CachedBlock | None  # entry of the last full block


class AppendedSlots(NamedTuple):
    """What `append_slots` changed."""

    new_block_ids: list[int]
    copied: tuple[int, int, int] | None  # copy-on-write: (index in the table, source block, new block)


class BlockManager:
    """The tables of all sequences over one device pool, its prefix cache and the CPU pool.

    A block is written by a sequence only while that sequence alone holds it: the first write into a shared block copies it.
    Blocks are allocated for the tokens of one step, never for later ones, so that a sequence has at most its last block
    partly empty.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.swap_space = SwapSpace(num_cpu_blocks)
        self.prefix_cache = PrefixCache(block_size, hash_function) if enable_prefix_caching else None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those with cached content included."""
        return self.pool.num_free_blocks

    @property
    def kv_utilisation(self) -> float:
        """Used slots over allocated slots, a shared block counting once; 0 while nothing is allocated."""
        allocated = self.pool.num_allocated_blocks * self.block_size
        return self.pool.num_used_slots / allocated if allocated else 0.0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of that many tokens takes by itself."""
        return -(-num_tokens // self.block_size)

    # ---- starting a table

    def match_prefix(self, salt: str | None, token_slice: TokenSlice, num_tokens: int) -> SharedPrefix:
        """The longest cached prefix of a sequence, short of its last token, which must be computed to give logits."""
        if self.prefix_cache is None:
            return SharedPrefix([], 0, None)
        entries = self.prefix_cache.match(salt, token_slice, (num_tokens - 1) // self.block_size)
        block_ids = [entry.block_id for entry in entries if entry.block_id is not None]
        return SharedPrefix(block_ids, len(block_ids) * self.block_size, entries[-1] if entries else None)

    def fork_prefix(self, table: BlockTable, num_tokens: int) -> SharedPrefix:
        """The first `num_tokens` tokens of another table, a partly used last block included."""
        num_full = num_tokens // self.block_size
        tip = table.tip
        for _ in range(table.num_chained_blocks - num_full):
            assert tip is not None
            tip = tip.parent
        if table.num_chained_blocks < num_full:
            tip = None
        return SharedPrefix(table.block_ids[: self.num_blocks_for(num_tokens)], num_tokens, tip)

    def num_new_blocks(self, prefix: SharedPrefix, num_tokens: int) -> int:
        """Free blocks that a sequence of `num_tokens` takes when it starts with `prefix`.

        A prefix block that nobody holds is one of the free ones; a partial one will be copied.
        """
        ref_counts = self.pool.ref_counts
        num_full = prefix.num_tokens // self.block_size
        in_use = sum(1 for block_id in prefix.block_ids[:num_full] if ref_counts[block_id])
        return self.num_blocks_for(num_tokens) - in_use

    def num_new_held_blocks(self, usage: BlockUsage, prefix: SharedPrefix, num_tokens: int) -> int:
        """As `num_new_blocks`, but blocks that come to be held by those whom `usage` counts."""
        num_full = prefix.num_tokens // self.block_size
        return self.num_blocks_for(num_tokens) - sum(1 for block_id in prefix.block_ids[:num_full] if block_id in usage)

    def open_table(self, prefix: SharedPrefix, salt: str | None, usage: BlockUsage | None = None) -> BlockTable:
        """Start a sequence's table with the blocks of `prefix`, shared; `usage` counts what the table holds."""
        table = BlockTable(usage)
        table.block_ids = list(prefix.block_ids)
        table.num_tokens = prefix.num_tokens
        for block_id in prefix.block_ids:
            self.pool.acquire(block_id)
            if usage is not None:
                usage.acquire(block_id)
        num_full = prefix.num_tokens // self.block_size
        if self.prefix_cache is not None and (prefix.tip is not None or num_full == 0):
            cache = self.prefix_cache
            table.tip = cache.hold_root(salt) if prefix.tip is None else cache.hold(prefix.tip)
            table.num_chained_blocks = num_full
            table.cache_at = (num_full + 1) * self.block_size
        return table

    # ---- growing one

    def num_slots_within(self, table: BlockTable, max_blocks: int) -> int:
        """Tokens that `append_slots` can make room for with that many free blocks."""
        num_blocks = len(table.block_ids) + max_blocks
        if table.num_tokens % self.block_size and self.pool.ref_counts[table.block_ids[-1]] > 1:
            num_blocks -= 1  # for the copy
        return max(0, num_blocks * self.block_size - table.num_tokens)

    def append_slots(self, table: BlockTable, num_tokens: int, max_blocks: int) -> AppendedSlots | None:
        """Make room for the next tokens, taking `max_blocks` free blocks at most; None, and no change, if that is too few."""
        pool, size, block_ids = self.pool, self.block_size, table.block_ids
        start = table.num_tokens
        end = start + num_tokens
        num_new = -(-end // size) - len(block_ids)
        is_partial = start % size != 0
        must_copy = is_partial and pool.ref_counts[block_ids[-1]] > 1
        if num_new + must_copy > max_blocks:
            return None
        copied = self._copy_last_block(table) if must_copy else None
        if is_partial:
            pool.set_fill(block_ids[-1], min(end - (len(block_ids) - 1) * size, size))
        new_block_ids = []
        for _ in range(num_new):
            block_id = self._take_free()
            pool.set_fill(block_id, min(end - len(block_ids) * size, size))
            block_ids.append(block_id)
            new_block_ids.append(block_id)
            if table.usage is not None:
                table.usage.acquire(block_id)
        table.num_tokens = end
        return AppendedSlots(new_block_ids, copied)

    def cache_full_blocks(self, table: BlockTable, token_slice: TokenSlice, num_computed_tokens: int) -> None:
        """Enter the blocks that are full of computed KV into the prefix cache. Call when `table.cache_at` is reached."""
        cache, size = self.prefix_cache, self.block_size
        while table.cache_at <= num_computed_tokens:
            assert cache is not None
            assert table.tip is not None
            index = table.num_chained_blocks
            token_ids = tuple(token_slice(index * size, (index + 1) * size))
            tip = cache.insert(table.tip, token_ids, table.block_ids[index])
            if tip is None:  # its hash is taken by another content
                table.cache_at = NEVER
                return
            table.tip = tip
            table.num_chained_blocks = index + 1
            table.cache_at += size

    # ---- ending one

    def free(self, table: BlockTable) -> None:
        """Give every block back. The table must not be used again."""
        if table.is_swapped:
            for block_id in table.block_ids:
                self.swap_space.release(block_id)
        else:
            self._release_device_blocks(table)
        if table.tip is not None:
            assert self.prefix_cache is not None
            self.prefix_cache.drop(table.tip)
            table.tip = None
        table.block_ids = []
        table.num_tokens = 0

    def stop_caching(self, table: BlockTable) -> None:
        """Forget the table's place in the prefix cache, which is being reset."""
        table.tip = None
        table.num_chained_blocks = 0
        table.cache_at = NEVER

    # ---- swapping

    def num_shared_tokens(self, table: BlockTable) -> int:
        """Tokens in full blocks that others hold too, and that would be shared again after a recompute."""
        ref_counts, num_full = self.pool.ref_counts, table.num_tokens // self.block_size
        return self.block_size * sum(1 for block_id in table.block_ids[:num_full] if ref_counts[block_id] > 1)

    def swap_out(self, table: BlockTable) -> list[tuple[int, int]] | None:
        """Move a table to the CPU pool; None, and no change, if there is no room.

        Returns:
            The copies to make, (device block, CPU block). The device blocks are free at once.
        """
        swap_space = self.swap_space
        if not swap_space.has_room(swap_space.num_copies_out(table.block_ids)):
            return None
        num_full = table.num_tokens // self.block_size
        cpu_blocks, copies = [], []
        for index, block_id in enumerate(table.block_ids):
            is_shared = index < num_full and self.pool.ref_counts[block_id] > 1
            cpu_block, must_copy = swap_space.store(block_id, stays_on_device=is_shared)
            cpu_blocks.append(cpu_block)
            if must_copy:
                copies.append((block_id, cpu_block))
        self._release_device_blocks(table)
        table.block_ids = cpu_blocks
        table.is_swapped = True
        return copies

    def num_swap_in_blocks(self, table: BlockTable, num_tokens: int) -> int:
        """Free device blocks that a swapped table takes to come back and grow to `num_tokens` tokens."""
        growth = self.num_blocks_for(num_tokens) - len(table.block_ids)
        return self.swap_space.num_missing_twins(table.block_ids) + growth

    def num_swap_in_held_blocks(self, usage: BlockUsage, table: BlockTable, num_tokens: int) -> int:
        """As `num_swap_in_blocks`, but blocks that come to be held by those whom `usage` counts."""
        twins = map(self.swap_space.device_twin, table.block_ids)
        return self.num_blocks_for(num_tokens) - sum(1 for twin in twins if twin is not None and twin in usage)

    def swap_in(self, table: BlockTable) -> list[tuple[int, int]]:
        """Bring a table back to the device.

        Returns:
            The copies to make, (CPU block, device block). The CPU blocks may be taken again from the next step on.
        """
        size = self.block_size
        device_blocks, copies = [], []
        for index, cpu_block in enumerate(table.block_ids):
            twin = self.swap_space.device_twin(cpu_block)
            if twin is not None:
                self.pool.acquire(twin)
                self.swap_space.release(cpu_block)
                device_blocks.append(twin)
                continue
            block_id = self._take_free()
            self.pool.set_fill(block_id, min(table.num_tokens - index * size, size))
            self.swap_space.loaded(cpu_block, block_id)
            device_blocks.append(block_id)
            copies.append((cpu_block, block_id))
        table.block_ids = device_blocks
        table.is_swapped = False
        if table.usage is not None:
            for block_id in device_blocks:
                table.usage.acquire(block_id)
        return copies

    # ---- blocks

    def _take_free(self) -> int:
        block_id = self.pool.take_free()
        if self.prefix_cache is not None:
            self.prefix_cache.evict(block_id)
        return block_id

    def _copy_last_block(self, table: BlockTable) -> tuple[int, int, int]:
        source = table.block_ids[-1]
        block_id = self._take_free()
        self.pool.release(source, keep_content=True)  # others hold it
        table.block_ids[-1] = block_id
        if table.usage is not None:
            table.usage.release(source)
            table.usage.acquire(block_id)
        return len(table.block_ids) - 1, source, block_id

    def _release_device_blocks(self, table: BlockTable) -> None:
        """Tail first: of one sequence's cached blocks the last ones are evicted first, and its prefix stays longest."""
        cache, entry = self.prefix_cache, table.tip
        for index in range(len(table.block_ids) - 1, -1, -1):
            block_id = table.block_ids[index]
            if entry is not None and index < table.num_chained_blocks:
                assert cache is not None
                cache.adopt(entry, block_id)  # the block that stood for this content may be gone
                entry = entry.parent
            keep = cache is not None and block_id in cache
            if self.pool.release(block_id, keep_content=keep):
                self.swap_space.device_block_freed(block_id)
            if table.usage is not None:
                table.usage.release(block_id)
