"""The requests that wait to run, most urgent first."""

from __future__ import annotations

import heapq

from pyengine.engine.request import Request


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
