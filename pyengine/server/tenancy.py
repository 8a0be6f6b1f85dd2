"""Which tenant a request is accounted to, and what its tenant may have in flight. The engine shares out the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyengine.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from pyengine.server.auth import CALLER
from pyengine.tenants import DEFAULT_TENANT, Tenant

if TYPE_CHECKING:
    from pyengine.server.frontend import GenerationCall

#: Why requests are refused.
REFUSALS = ("queue_full", "rate")


@dataclass(frozen=True)
class Size:
    """What one caller asks for at once."""

    requests: int  # prompts; what a rate counts
    choices: int  # sequences that the engine makes and runs for them; what is in flight

    def check_fits(self, limit: int, who: str) -> None:
        """So that nobody is told to try again with what would be refused every time.

        Raises:
            InvalidRequestError: there are more choices than `limit`, which `who` may have in flight.
        """
        if self.choices > limit:
            field = "n" if self.choices > self.requests else "prompt"
            raise InvalidRequestError(field, f"asks for {self.choices} choices in all; {who} may have {limit} in flight")


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
        self.requests_in_flight: Counter[str] = Counter(dict.fromkeys(self._tenants, 0))
        self.choices_in_flight: Counter[str] = Counter(dict.fromkeys(self._tenants, 0))
        self.refused: Counter[tuple[str, str]] = Counter({(name, why): 0 for name in self._tenants for why in REFUSALS})

    def name_of(self, claimed: str | None) -> str | None:
        """Whose a call is; None without tenants. Must run where the call's key was checked, or in a task that came from there.

        A claim (`x-tenant`) without a trusted key is passed over, and the call is that key's tenant's.

        Raises:
            InvalidRequestError: a trusted key claims a tenant that there is not.
        """
        if not self._tenants:
            return None
        caller = CALLER.get()
        if not caller.trusted or claimed is None:
            return caller.tenant or DEFAULT_TENANT
        if claimed not in self._tenants:
            raise InvalidRequestError("x-tenant", f"{claimed!r} is no tenant of this server")
        return claimed

    def account(self, call: GenerationCall) -> GenerationCall:
        """The call as its tenant may make it. Must run where `name_of` must, and raises as it does."""
        name = self.name_of(call.tenant)
        if name is None:
            return replace(call, tenant=None)
        return replace(call, tenant=name, priority=max(call.priority, self._tenants[name].priority_cap))

    def require_trust(self, what: str) -> None:
        """For what concerns every tenant. Must run where `name_of` must.

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
    def admitted(self, claimed: str | None, size: Size, max_num_seqs: int) -> Iterator[None]:
        """Counts what one caller asks for as in flight, all of it or nothing.

        Args:
            claimed: the tenant that it claims.
            size: of what it asks for.
            max_num_seqs: that the engine runs at once.

        Raises:
            OverloadedError: the tenant's queue is full, or its rate exceeded.
            InvalidRequestError: it is more than the tenant may ever have in flight; and as `name_of`.
        """
        name = self.name_of(claimed)
        if name is None:
            yield
            return
        tenant = self._tenants[name]
        if tenant.max_queued is not None:
            limit = (tenant.max_concurrent or max_num_seqs) + tenant.max_queued
            size.check_fits(limit, f"tenant {name}")
            if self.choices_in_flight[name] + size.choices > limit:
                self.refused[name, "queue_full"] += size.requests
                having = f"tenant {name} has {self.choices_in_flight[name]} choices in flight, and {size.choices} more came"
                raise OverloadedError(f"{having}; it may have {limit}")
        if name in self._buckets:
            seconds = self._buckets[name].take(size.requests)
            if seconds > 0:
                self.refused[name, "rate"] += size.requests
                raise OverloadedError(f"tenant {name} may send {tenant.rate:g} requests a second", retry_after=seconds)
        self.requests_in_flight[name] += size.requests
        self.choices_in_flight[name] += size.choices
        try:
            yield
        finally:
            self.requests_in_flight[name] -= size.requests
            self.choices_in_flight[name] -= size.choices
