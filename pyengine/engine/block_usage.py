"""KV blocks that a tenant holds, against its quota."""

from __future__ import annotations


class BlockUsage:
    """Counts the distinct blocks that a tenant's sequences hold: what they share is held once.

    Args:
        quota: blocks that it may hold; all there are, if it is not rationed.
    """

    __slots__ = ("_holds", "quota")

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._holds: dict[int, int] = {}  # block -> sequences of the tenant that hold it

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._holds

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self._holds)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that the quota leaves."""
        return self.quota - len(self._holds)

    def num_holds(self, block_id: int) -> int:
        """Sequences of the tenant that hold the block."""
        return self._holds.get(block_id, 0)

    def acquire(self, block_id: int) -> None:
        """A sequence holds the block from now on."""
        self._holds[block_id] = self._holds.get(block_id, 0) + 1

    def release(self, block_id: int) -> None:
        """A sequence holds it no more."""
        count = self._holds[block_id] - 1
        if count:
            self._holds[block_id] = count
        else:
            del self._holds[block_id]
