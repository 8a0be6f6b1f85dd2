"""The CPU pool that swapped sequences' blocks live in."""

from __future__ import annotations

from collections.abc import Sequence


class SwapSpace:
    """CPU blocks 0..num_blocks - 1 with reference counts, and which of them have a twin on the device.

    Sequences that share a full block on the device share its copy here too: the first one to be swapped out copies it, and as
    long as somebody still holds the device block (its content cannot change, being full and shared), the next one only adds a
    reference. The same holds on the way back. A device block and a CPU block with the same content are called twins; the pair
    is forgotten when either of the two is free.

    A block whose last reference goes is taken again only after `start_step`: a copy out of it may be under way until then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack, so that touched pages are used again first
        self._freed_in_step: list[int] = []
        self._device_twin: dict[int, int] = {}  # CPU block -> device block
        self._cpu_twin: dict[int, int] = {}  # device block -> CPU block

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._freed_in_step)

    def start_step(self) -> None:
        """From here on, blocks that were freed before may be taken."""
        if self._freed_in_step:
            self._free += self._freed_in_step
            self._freed_in_step.clear()

    def device_twin(self, cpu_block: int) -> int | None:
        """The held device block with the same content, if there is one."""
        return self._device_twin.get(cpu_block)

    def num_missing_twins(self, cpu_blocks: Sequence[int]) -> int:
        """How many of these blocks must be copied to come back to the device."""
        twins = self._device_twin
        return sum(1 for block_id in cpu_blocks if block_id not in twins) if twins else len(cpu_blocks)

    def num_copies_out(self, device_blocks: Sequence[int]) -> int:
        """How many of these device blocks have no copy here yet."""
        twins = self._cpu_twin
        return sum(1 for block_id in device_blocks if block_id not in twins) if twins else len(device_blocks)

    def store(self, device_block: int, *, stays_on_device: bool) -> tuple[int, bool]:
        """Take a reference to a CPU block for a device block's content.

        Args:
            stays_on_device: the block is full and others go on holding it, so that the two become twins.

        Returns:
            The CPU block, and whether the content must be copied into it.

        Raises:
            IndexError: if no block can be taken. Callers check with `has_room`.
        """
        twin = self._cpu_twin.get(device_block)
        if twin is not None:
            self.ref_counts[twin] += 1
            return twin, False
        cpu_block = self._free.pop()
        self.ref_counts[cpu_block] = 1
        if stays_on_device:
            self._pair(cpu_block, device_block)
        return cpu_block, True

    def has_room(self, num_copies: int) -> bool:
        """Whether that many blocks can be taken now."""
        return num_copies <= len(self._free)

    def loaded(self, cpu_block: int, device_block: int) -> None:
        """A sequence copies its block into a device block and gives its reference up; others may still need the content."""
        if self.ref_counts[cpu_block] > 1:
            self._pair(cpu_block, device_block)
        self.release(cpu_block)

    def release(self, cpu_block: int) -> None:
        """Drop a reference.

        Raises:
            RuntimeError: if the block is free already.
        """
        count = self.ref_counts[cpu_block] - 1
        if count < 0:
            raise RuntimeError(f"CPU block {cpu_block} freed twice")
        self.ref_counts[cpu_block] = count
        if count == 0:
            self._freed_in_step.append(cpu_block)
            device_block = self._device_twin.pop(cpu_block, None)
            if device_block is not None:
                del self._cpu_twin[device_block]

    def device_block_freed(self, device_block: int) -> None:
        """Nobody holds the device block any more, so its content may change."""
        cpu_block = self._cpu_twin.pop(device_block, None)
        if cpu_block is not None:
            del self._device_twin[cpu_block]

    def _pair(self, cpu_block: int, device_block: int) -> None:
        self._device_twin[cpu_block] = device_block
        self._cpu_twin[device_block] = cpu_block
