"""Which tenant a request is accounted to, and what its tenant may have in flight. The engine shares out the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pyengine.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from pyengine.server.auth import CALLER
from pyengine.tenants import DEFAULT_TENANT, Tenant

if TYPE_CHECKING:
    from pyengine.server.frontend import GenerationCall

#: Why requests are refused.
REFUSALS = ("queue_full", "rate")


class _Bucket:
    """A token bucket: `rate` a second on average, `burst` at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._time = burst, clock()

    def take(self, count: int) -> float:
        """Take `count`; or take nothing, and return the seconds after which there are as many, or as many as there ever are."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._time) * self._rate)
        self._time = now
        # The margin is for sums of fractions that fall just short of a whole.
        missing = min(count, self._burst) - self._level - 1e-9
        if missing > 0:
            return missing / self._rate
        self._level -= count
        return 0.0


class Tenancy:
    """The tenants' side of a `Frontend`. Without tenants nothing is believed, capped or limited.

    Args:
        tenants: their terms, `default`'s among them; or none.
        clock: seconds, for rates.
    """

    def __init__(self, tenants: Sequence[Tenant], clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._buckets = {
            tenant.name: _Bucket(tenant.rate, max(1.0, tenant.burst or tenant.rate), clock)
            for tenant in tenants
            if tenant.rate is not None
        }
        self.in_flight: Counter[str] = Counter(dict.fromkeys(self._tenants, 0))
        self.refused: Counter[tuple[str, str]] = Counter({(name, why): 0 for name in self._tenants for why in REFUSALS})

    def account(self, call: GenerationCall) -> GenerationCall:
        """The call as its tenant may make it. Must run where the call's key was checked, or in a task that came from there.

        A claim (`x-tenant`) without a trusted key is passed over, and the request is that key's tenant's.

        Raises:
            InvalidRequestError: a trusted key claims a tenant that there is not.
        """
        if not self._tenants:
            return replace(call, tenant=None)
        caller = CALLER.get()
        name = caller.tenant or DEFAULT_TENANT
        if caller.trusted and call.tenant is not None:
            if call.tenant not in self._tenants:
                raise InvalidRequestError("x-tenant", f"{call.tenant!r} is no tenant of this server")
            name = call.tenant
        return replace(call, tenant=name, priority=max(call.priority, self._tenants[name].priority_cap))

    def require_trust(self, what: str) -> None:
        """For what concerns every tenant. Must run where `account` must.

        Raises:
            UnauthenticatedError: there are tenants, and the call's key is no trusted one.
        """
        if self._tenants and not CALLER.get().trusted:
            raise UnauthenticatedError(f"{what}: concerns every tenant, and needs a trusted key")

    def may_touch(self, tenant: str | None) -> bool:
        """Whether the caller may stop what this tenant runs."""
        caller = CALLER.get()
        return not self._tenants or caller.trusted or tenant == (caller.tenant or DEFAULT_TENANT)

    @contextmanager
    def admitted(self, calls: Sequence[GenerationCall], max_num_seqs: int) -> Iterator[None]:
        """Counts calls of one caller as in flight, all of them or none.

        Args:
            calls: as they came.
            max_num_seqs: that the engine runs at once.

        Raises:
            OverloadedError: the tenant's queue is full, or its rate exceeded.
            InvalidRequestError: as `account`.
        """
        name = self.account(calls[0]).tenant if calls else None
        if name is None:
            yield
            return
        tenant, count = self._tenants[name], len(calls)
        if tenant.max_queued is not None:
            limit = (tenant.max_concurrent or max_num_seqs) + tenant.max_queued
            if self.in_flight[name] + count > limit:
                self.refused[name, "queue_full"] += count
                having = f"tenant {name} has {self.in_flight[name]} requests in flight, and {count} more came"
                raise OverloadedError(f"{having}; it may have {limit}")
        if name in self._buckets:
            seconds = self._buckets[name].take(count)
            if seconds > 0:
                self.refused[name, "rate"] += count
                raise OverloadedError(f"tenant {name} may send {tenant.rate:g} requests a second", retry_after=seconds)
        self.in_flight[name] += count
        try:
            yield
        finally:
            self.in_flight[name] -= count
