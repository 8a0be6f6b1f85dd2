"""Prefixes that are being computed in a step, so that others who begin with the same tokens need not compute them too."""

from __future__ import annotations

from collections.abc import Mapping

from pyengine.engine.admission import AdmissionPlan
from pyengine.engine.block_manager import BlockManager
from pyengine.engine.request import Request

#: Waiting for a step costs time to first token; fewer tokens than these are computed again instead.
MIN_SHARED_TOKENS = 64


class PendingPrefixes:
    """What one step computes and the prefix cache does not have yet.

    A request that would compute the same waits for the next step, where it finds more of its prefix in the cache than now. So
    it waits only as often as that grows, and no longer than somebody gets on with it.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        # By the cache's entry before the first of these blocks, and that block's tokens: whose they are, and how far it gets.
        self._leaders: dict[tuple[int, tuple[int, ...]], tuple[Request, int]] = {}

    def add_scheduled(self, num_scheduled_tokens: Mapping[str, int], requests: Mapping[str, Request]) -> None:
        """Take in a step that is half made. Requests that are due one token compute nobody's prefix."""
        for request_id, num_tokens in num_scheduled_tokens.items():
            if num_tokens > 1:
                self.add(requests[request_id], num_tokens)

    def add(self, request: Request, num_tokens: int) -> None:
        """A request that holds blocks has been scheduled, and is not advanced yet."""
        table, size = request.block_table, self._manager.block_size
        end = request.num_computed_tokens + num_tokens
        if table is None or table.tip is None or end < table.cache_at:
            return
        start = table.num_chained_blocks * size
        self._leaders.setdefault((id(table.tip), tuple(request.token_ids(start, start + size))), (request, end))

    def num_shared_tokens(self, plan: AdmissionPlan) -> int:
        """Tokens, whole blocks, that a scheduled request computes in this step and that the plan would compute again."""
        request, prefix, cache, size = plan.request, plan.prefix, self._manager.prefix_cache, self._manager.block_size
        if prefix is None or plan.source is not None or cache is None or not self._leaders or not request.may_match_prefix:
            return 0
        tip = cache.root(request.cache_salt) if prefix.tip is None else prefix.tip
        start = prefix.num_tokens
        last = (request.num_tokens - 1) // size * size  # the last token must be computed in any case
        if tip is None or start + size > last:
            return 0
        found = self._leaders.get((id(tip), tuple(request.token_ids(start, start + size))))
        if found is None:
            return 0
        leader, end = found
        last = min(last, end // size * size)
        position = start + size
        while position < last and leader.token_ids(position, position + size) == request.token_ids(position, position + size):
            position += size
        return position - start
