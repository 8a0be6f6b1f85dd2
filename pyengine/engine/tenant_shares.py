"""Who is next among tenants, who must make way for whom, and how a step's tokens are divided.

Three things are scarce, and each is shared by weight among the tenants that have requests:

- Slots and blocks. A tenant that is short of slots (it could run one more and still have no more than its share) goes before
  those that are not, and what it lacks is taken from tenants that have more than theirs. Nothing is taken back from it in turn,
  as it has no more than its share afterwards; so nobody is preempted to and fro.
- Tokens. Every tenant has a virtual time: tokens computed for it over its weight. Among tenants that are equally short the one
  with the least goes first, and prompt tokens of a step are divided so as to even the times out (Sheng et al., "Fairness in
  Serving Large Language Models", OSDI 2024). A tenant that comes back from idling starts where the others are: it has saved up
  nothing, and owes nothing for what it used while nobody else wanted it.

What nobody else wants is anyone's: shares bind only where somebody is short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyengine.engine.block_usage import BlockUsage
from pyengine.engine.request import Request
from pyengine.errors import InvalidRequestError
from pyengine.tenants import DEFAULT_TENANT, Tenant


class TenantShare:
    """What one tenant has now, and has had."""

    __slots__ = (
        "num_computed_tokens",
        "num_generated_tokens",
        "num_live",
        "num_preemptions",
        "num_running",
        "tenant",
        "usage",
        "virtual_time",
    )

    def __init__(self, tenant: Tenant, usage: BlockUsage) -> None:
        self.tenant = tenant
        self.usage = usage
        self.virtual_time = 0.0  # tokens computed over weight, and what was lifted
        self.num_live = 0  # sequences that have not ended
        self.num_running = 0  # kept up within a step
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0


class TenantShares:
    """The tenants' shares of one scheduler.

    Args:
        tenants: their terms; `default` is one of them.
        max_num_seqs: slots that they share.
        num_blocks: KV blocks that they share.
    """

    def __init__(self, tenants: Sequence[Tenant], max_num_seqs: int, num_blocks: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._shares = {tenant.name: TenantShare(tenant, BlockUsage(int(tenant.kv_quota * num_blocks))) for tenant in tenants}
        self._active_weight = 0.0  # of the tenants that have requests

    def of(self, request: Request) -> TenantShare:
        """The share of the request's tenant, which `resolve` has looked up."""
        assert request.tenant is not None
        return self._shares[request.tenant]

    # ---- requests come and go

    def resolve(self, tenant: str | None) -> TenantShare:
        """The share of a request's tenant; nobody's requests are `default`'s.

        Raises:
            InvalidRequestError: there is no such tenant.
        """
        share = self._shares.get(DEFAULT_TENANT if tenant is None else tenant)
        if share is None:
            raise InvalidRequestError("tenant", f"{tenant!r} is not one of this engine's")
        return share

    def added(self, request: Request) -> None:
        """A request was queued. Its tenant, if it had none, begins where the others are."""
        share = self.of(request)
        if share.num_live == 0:
            active = [other.virtual_time for other in self._shares.values() if other.num_live]
            # With nobody to compare with, it begins where the last one left off.
            level = min(active) if active else max(other.virtual_time for other in self._shares.values())
            share.virtual_time = max(share.virtual_time, level)
            self._active_weight += share.tenant.weight
        share.num_live += 1

    def ended(self, request: Request) -> None:
        """A request is over."""
        share = self.of(request)
        share.num_live -= 1
        if share.num_live == 0:
            # Summed anew, so that no rounding error builds up.
            self._active_weight = sum(other.tenant.weight for other in self._shares.values() if other.num_live)

    # ---- a step

    def start_step(self, running: list[Request]) -> None:
        """Count, and put the running requests in order: by priority, then in turns, each tenant's first one before any second.

        Where memory runs short it is taken from the end, so from whoever has most for its weight.
        """
        for share in self._shares.values():
            share.num_running = 0
        running.sort(key=lambda request: request.urgency)
        for request in running:
            share = self.of(request)
            request.turn = share.num_running / share.tenant.weight
            share.num_running += 1
        running.sort(key=precedence)

    def admitted(self, request: Request) -> None:
        share = self.of(request)
        request.turn = share.num_running / share.tenant.weight
        share.num_running += 1

    def preempted(self, request: Request) -> None:
        share = self.of(request)
        share.num_running -= 1
        share.num_preemptions += 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """The step computes that many tokens of the request."""
        share = self.of(request)
        share.virtual_time += num_tokens / share.tenant.weight
        share.num_computed_tokens += num_tokens

    def precedence_of(self, head: Request) -> tuple[int, bool, float, int]:
        """What decides between the first waiting requests of the tenants; the least is next."""
        share = self.of(head)
        return (head.urgency[0], not self._is_short(share), share.virtual_time, head.urgency[1])

    def has_free_slot(self, request: Request) -> bool:
        """Whether the tenant may run one more."""
        share = self.of(request)
        return share.tenant.max_concurrent is None or share.num_running < share.tenant.max_concurrent

    def is_short(self, request: Request, num_running: int) -> bool:
        """Whether the tenant is short of slots while others run."""
        share = self.of(request)
        return num_running > share.num_running and self._is_short(share)

    def _is_short(self, share: TenantShare) -> bool:
        return share.num_running + 1 <= max(1.0, math.floor(self._part(share) * self._max_num_seqs))

    def _part(self, share: TenantShare) -> float:
        return share.tenant.weight / self._active_weight

    def displaceable(self, request: Request, num_blocks: int, running: Iterable[Request]) -> list[Request]:
        """Running requests that must make way for one of a tenant that is short: others' that are above their shares.

        Args:
            request: that waits.
            num_blocks: by which it raises what its tenant holds.
            running: most urgent first.

        Returns:
            In the order of `running`. To be taken from the end: the others stay above their shares only that long.
        """
        own = self.of(request)
        running = list(running)
        num_running = Counter({share.tenant.name: share.num_running for share in self._shares.values()})
        num_held = {name: share.usage.num_blocks for name, share in self._shares.items()}
        taken: dict[str, Counter[int]] = {name: Counter() for name in self._shares}  # by block: its holders among the found
        if own.num_running and num_held[own.tenant.name] + num_blocks > self._part(own) * self._num_blocks:
            return []
        found = []
        for other in reversed(running):
            share = self.of(other)
            name, part = share.tenant.name, self._part(share)
            has_many_blocks = num_held[name] > part * self._num_blocks and num_running[name] > 1
            has_much = has_many_blocks or num_running[name] > max(1.0, part * self._max_num_seqs)
            if share is own or not has_much or other.is_protected or other.urgency[0] < request.urgency[0]:
                continue
            num_running[name] -= 1
            assert other.block_table is not None
            taken[name].update(other.block_table.block_ids)
            # What others of the tenant share with it stays held until they are found too.
            num_held[name] -= sum(share.usage.num_holds(b) == taken[name][b] for b in other.block_table.block_ids)
            found.append(other)
        return found[::-1]

    def wanted_chunks(self, running: Iterable[Request], chunk: Callable[[int, int], int]) -> dict[str, int]:
        """By tenant, the prompt tokens that running requests lack, no more of any than `chunk` (of the lack, twice) allows."""
        wanted: Counter[str] = Counter()
        for request in running:
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens > 1:
                wanted[str(request.tenant)] += chunk(num_tokens, num_tokens)
        return dict(wanted)

    def divide(self, budget: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """Divide a step's prompt tokens so that virtual times come as near to each other as they can, leaving none unused.

        Args:
            budget: tokens.
            wanted: tokens that each tenant could use, by name.
        """
        budget = max(0, budget)
        if sum(wanted.values()) <= budget:
            return dict(wanted)
        shares = [self._shares[name] for name in wanted]
        low = min(share.virtual_time for share in shares)
        high = max(share.virtual_time + budget / share.tenant.weight for share in shares)

        def poured(level: float) -> dict[str, int]:
            return {
                share.tenant.name: max(
                    0, min(wanted[share.tenant.name], int((level - share.virtual_time) * share.tenant.weight))
                )
                for share in shares
            }

        for _ in range(50):  # halves the interval to nothing
            middle = (low + high) / 2
            if sum(poured(middle).values()) <= budget:
                low = middle
            else:
                high = middle
        given = poured(low)
        left = budget - sum(given.values())
        for share in sorted(shares, key=lambda share: share.virtual_time):
            more = min(left, wanted[share.tenant.name] - given[share.tenant.name])
            given[share.tenant.name] += more
            left -= more
        return given

    # ---- figures

    def stats(self, running: Iterable[Request]) -> dict[str, dict[str, Any]]:
        """Counters and gauges by tenant."""
        num_running = Counter(request.tenant for request in running)
        return {
            name: {
                "num_running": num_running[name],
                "num_waiting": share.num_live - num_running[name],
                "num_kv_blocks": share.usage.num_blocks,
                "kv_quota_blocks": share.usage.quota,
                "computed_tokens": share.num_computed_tokens,
                "generation_tokens": share.num_generated_tokens,
                "num_preemptions": share.num_preemptions,
            }
            for name, share in self._shares.items()
        }

    def reset_counters(self) -> None:
        """Count from zero again."""
        for share in self._shares.values():
            share.num_computed_tokens = share.num_generated_tokens = share.num_preemptions = 0


def precedence(request: Request) -> tuple[int, float, int]:
    """The order of running requests; without tenants every turn is 0."""
    priority, arrival = request.urgency
    return (priority, request.turn, arrival)
