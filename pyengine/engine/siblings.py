"""The sequences of one client's request with n > 1: who computes the prompt, and who waits to share it."""

from __future__ import annotations

from pyengine.engine.request import Request
from pyengine.engine.request_queue import FairQueue, RequestQueue


class _Group:
    __slots__ = ("computed", "computing", "members", "parked")

    def __init__(self) -> None:
        self.members: dict[str, Request] = {}
        self.computing: dict[str, Request] = {}  # running, the prompt not computed when this step began
        self.computed: dict[str, Request] = {}  # running, all but the last prompt token on the device or arriving in this step
        self.parked: dict[str, Request] = {}  # out of the queue until a sibling has computed the prompt, or left


class Siblings:
    """Keeps one prompt from being computed n times.

    The first sequence of a group to run computes the prompt. Until it has, the others are parked outside the queue, where they
    hold up nobody; then they start as forks of it. If it leaves the device before (preempted, ended), they return to the
    queue and the first of them computes.
    """

    def __init__(self, waiting: RequestQueue | FairQueue) -> None:
        self._waiting = waiting
        self._groups: dict[str, _Group] = {}
        self._num_parked = 0

    def add(self, request: Request) -> None:
        """A sequence was added.

        Raises:
            ValueError: if its prompt or salt differs from its siblings'. A bug of the caller: nothing else could be shared.
        """
        if request.parent_id is None:
            return
        group = self._groups.setdefault(request.parent_id, _Group())
        for sibling in group.members.values():
            if sibling.prompt_token_ids != request.prompt_token_ids or sibling.cache_salt != request.cache_salt:
                raise ValueError(f"{request.request_id} is no sibling of {sibling.request_id}: its prompt or salt differs")
            break
        group.members[request.request_id] = request

    @property
    def num_parked(self) -> int:
        """Requests that wait for a sibling."""
        return self._num_parked

    def source(self, request: Request) -> Request | None:
        """A sibling whose blocks hold the prompt, the last token perhaps missing.

        It is the one that has held it longest, and so never one whose last block is itself being copied in this step.
        """
        if request.parent_id is None:
            return None
        return next(iter(self._groups[request.parent_id].computed.values()), None)

    def park_first(self) -> bool:
        """Park the queue's first request if a sibling is computing its prompt, and say so."""
        request = self._waiting.peek()
        if request is None or request.parent_id is None:
            return False
        group = self._groups[request.parent_id]
        if group.computed or not group.computing:
            return False
        group.parked[request.request_id] = self._waiting.pop()
        self._num_parked += 1
        return True

    def started(self, request: Request) -> None:
        """A sequence was admitted, with `num_computed_tokens` on the device or arriving in this step."""
        if request.parent_id is not None:
            self._groups[request.parent_id].computing[request.request_id] = request
            self.advanced(request)

    def advanced(self, request: Request) -> None:
        """A sequence may have computed its prompt."""
        if request.parent_id is None or request.num_computed_tokens < request.num_prompt_tokens - 1:
            return
        group = self._groups[request.parent_id]
        if group.computing.pop(request.request_id, None) is not None:
            group.computed[request.request_id] = request
            self._release_parked(group)

    def stopped(self, request: Request) -> None:
        """A sequence has left the device."""
        if request.parent_id is None:
            return
        group = self._groups[request.parent_id]
        group.computing.pop(request.request_id, None)
        group.computed.pop(request.request_id, None)
        if not group.computing:
            self._release_parked(group)

    def remove(self, request: Request) -> None:
        """A sequence has ended, wherever it was."""
        if request.parent_id is None:
            return
        group = self._groups[request.parent_id]
        if group.parked.pop(request.request_id, None) is not None:
            self._num_parked -= 1
        self.stopped(request)
        del group.members[request.request_id]
        if not group.members:
            del self._groups[request.parent_id]

    def _release_parked(self, group: _Group) -> None:
        for request in group.parked.values():
            self._waiting.push(request)
        self._num_parked -= len(group.parked)
        group.parked.clear()
