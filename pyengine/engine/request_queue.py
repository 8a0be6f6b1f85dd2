"""The requests that wait to run, most urgent first."""

from __future__ import annotations

import heapq

from pyengine.engine.request import Request
from pyengine.engine.tenant_shares import TenantShares


class RequestQueue:
    """A heap by `Request.urgency`. Nothing here visits the requests behind the first one.

    A request that was preempted keeps its urgency and so comes back in front of those that arrived after it. Removal is lazy: a
    removed request's key stays in the heap until it surfaces, or until half of the heap is such keys.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], str]] = []
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def push(self, request: Request) -> None:
        """Add a request; O(log n)."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (request.urgency, request.request_id))

    def peek(self) -> Request | None:
        """The most urgent request, or None."""
        while self._heap:
            urgency, request_id = self._heap[0]
            request = self._requests.get(request_id)
            if request is not None and request.urgency == urgency:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the most urgent request.

        Raises:
            IndexError: if the queue is empty.
        """
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty request queue")
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands; amortised O(log n).

        Raises:
            KeyError: if it is not in the queue.
        """
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 8:
            self._heap = [(r.urgency, r.request_id) for r in self._requests.values()]
            heapq.heapify(self._heap)


class FairQueue:
    """A queue for each tenant; the next request is the first one of the tenant whose turn it is.

    Args:
        shares: decides whose turn it is.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._queues: dict[str | None, RequestQueue] = {}  # by tenant; none is empty
        self._closed: set[str | None] = set()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in queue for queue in self._queues.values())

    @property
    def tenants(self) -> list[str]:
        """Those that have requests here and are not passed over."""
        return [tenant for tenant in self._queues if tenant is not None and tenant not in self._closed]

    def push(self, request: Request) -> None:
        """Add a request."""
        self._queues.setdefault(request.tenant, RequestQueue()).push(request)

    def peek(self) -> Request | None:
        """The next request, or None."""
        heads = [queue.peek() for tenant, queue in self._queues.items() if tenant not in self._closed]
        return min((head for head in heads if head is not None), key=self._shares.precedence_of, default=None)

    def pop(self) -> Request:
        """Take the next request.

        Raises:
            IndexError: if there is none.
        """
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty request queue")
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands.

        Raises:
            KeyError: if it is not in the queue.
        """
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]

    def pass_over(self, request: Request) -> None:
        """Until `start_step` the other tenants' requests go before this one's, which has reached a limit of its own."""
        self._closed.add(request.tenant)

    def start_step(self) -> None:
        """Consider every tenant again."""
        self._closed.clear()
