"""One log line every few seconds about a busy engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class StatLogger:
    """Turns `LLMEngine.stats` into a line with rates since the last one.

    Args:
        interval: seconds between two lines at least. An idle engine logs nothing, because it does not step.
    """

    def __init__(self, interval: float = 10.0) -> None:
        self._interval = interval
        self._last_time: float | None = None
        self._last: Mapping[str, Any] = {}

    def observe(self, now: float, stats: Mapping[str, Any]) -> None:
        """Take the numbers after a step.

        Args:
            now: seconds of `time.monotonic`.
            stats: of `LLMEngine.stats`.
        """
        if self._last_time is None:
            self._last_time, self._last = now, stats
        elapsed = now - self._last_time
        if elapsed < self._interval:
            return
        new = {name: stats[name] - self._last[name] for name in _COUNTERS}
        hit_rate = new["prefix_cache_hits"] / new["prefix_cache_queries"] if new["prefix_cache_queries"] else 0.0
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s; running %d, waiting %d, swapped %d; KV cache %.1f%% in use, "
            "prefix cache hit rate %.1f%%, preemptions %d",
            new["prompt_tokens"] / elapsed,
            new["generation_tokens"] / elapsed,
            stats["num_running"],
            stats["num_waiting"],
            stats["num_swapped"],
            100 * (1 - stats["num_free_blocks"] / stats["num_blocks"]),
            100 * hit_rate,
            new["num_preemptions_recompute"] + new["num_preemptions_swap"],
        )
        self._last_time, self._last = now, stats


_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions_recompute",
    "num_preemptions_swap",
)
