"""The device's KV blocks: who holds each one, how full it is, and in which order free ones are used again."""

from __future__ import annotations

NULL_BLOCK = 0  # padding may point at it; in no count


class BlockPool:
    """Blocks 1..num_blocks with reference counts, fill, and a free list.

    The free list is doubly linked through two arrays, block 0 being its sentinel, so that every operation is O(1). Blocks are
    taken at its head. A freed block whose content may be used again joins the tail, so that the least recently used content
    goes first; one without content joins the head, where it is taken before any cached one.

    Fill: the slots of a held block that some holder has written or will write in this step. `num_used_slots` sums it over held
    blocks, a shared block counting once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * (num_blocks + 1)
        self.num_free_blocks = num_blocks
        self.num_used_slots = 0
        self.num_allocations = 0  # blocks taken from the free list, ever
        self._fill = [0] * (num_blocks + 1)  # slots, kept while a block is free with its content
        self._next = [*range(1, num_blocks + 1), NULL_BLOCK]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.num_free_blocks

    def take_free(self) -> int:
        """Take the next free block, with one reference and no content.

        Raises:
            RuntimeError: if none is free. Callers check; this is a bug in them.
        """
        block_id = self._next[NULL_BLOCK]
        if block_id == NULL_BLOCK:
            raise RuntimeError("no free KV block")
        self._unlink(block_id)
        self.ref_counts[block_id] = 1
        self._fill[block_id] = 0
        self.num_allocations += 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """Add a reference to a block with content, whether it is held or free."""
        if self.ref_counts[block_id] == 0:
            self._unlink(block_id)
            self.num_used_slots += self._fill[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep_content: bool) -> bool:
        """Drop a reference. With the last one the block is free, at the tail if its content may be used again.

        Returns:
            Whether it was the last one.

        Raises:
            RuntimeError: if the block is free already.
        """
        count = self.ref_counts[block_id] - 1
        if count < 0:
            raise RuntimeError(f"KV block {block_id} freed twice")
        self.ref_counts[block_id] = count
        if count:
            return False
        self.num_used_slots -= self._fill[block_id]
        self._link(block_id, before=NULL_BLOCK if keep_content else self._next[NULL_BLOCK])
        return True

    def set_fill(self, block_id: int, num_slots: int) -> None:
        """Say how many slots of a held block are in use."""
        self.num_used_slots += num_slots - self._fill[block_id]
        self._fill[block_id] = num_slots

    def free_block_ids(self) -> list[int]:
        """Free blocks in the order in which they will be taken; O(num_blocks), for tests."""
        block_ids = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self.num_free_blocks -= 1

    def _link(self, block_id: int, before: int) -> None:
        previous = self._previous[before]
        self._next[previous] = block_id
        self._previous[block_id] = previous
        self._next[block_id] = before
        self._previous[before] = block_id
        self.num_free_blocks += 1
