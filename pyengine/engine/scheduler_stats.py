"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class SchedulerStats:
    """A snapshot. Counters count since the scheduler was made, or its `reset_stats`."""

    num_running: int = 0
    num_waiting: int = 0  # never ran, preempted by recompute, or waiting for a sibling's prompt
    num_swapped: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # cached blocks that nobody holds count as free
    num_cpu_blocks: int = 0
    num_free_cpu_blocks: int = 0
    kv_utilisation_now: float = 0.0  # used over allocated slots, a shared block counting once; 0 while nothing is allocated
    kv_utilisation: float = 0.0  # mean of the above over steps
    num_steps: int = 0  # that computed anything
    num_cached_tokens: int = 0  # not computed because the prefix cache had them, after preemptions too
    prefix_cache_queries: int = 0  # tokens of requests that looked their prefix up when they first ran
    prefix_cache_hits: int = 0  # those of them that were found
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_swap_fallbacks: int = 0  # of the preemptions by recompute, those that had no room in the CPU pool
    num_blocks_allocated: int = 0  # taken from the free list; shared blocks are not taken again
    num_blocks_swapped_out: int = 0  # copied
    num_blocks_swapped_in: int = 0

    def as_dict(self) -> dict[str, Any]:
        """By name. Made after every step, so without the copying of values that `dataclasses.asdict` does."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(SchedulerStats))
