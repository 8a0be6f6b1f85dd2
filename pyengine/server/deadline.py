"""The time that a request may take."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

from pyengine.errors import DeadlineExceededError


class Deadline:
    """Around everything that is done for a request: cancels the task inside once the time is over, whatever it waits for.

    Python 3.10 has no asyncio.timeout.

    Args:
        seconds: from entering on; None: no limit.

    Raises:
        DeadlineExceededError: on leaving, in place of that cancellation.
    """

    def __init__(self, seconds: float | None) -> None:
        self.error: DeadlineExceededError | None = None  # once the time is over
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Deadline:
        if self._seconds is not None:
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        return self

    def _expire(self) -> None:
        self.error = DeadlineExceededError(
            f"the request took longer than {self._seconds:g} s, which is all that the server allows"
        )
        assert self._task is not None
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.error is None:
            return
        is_cancelled_by_others = False
        if sys.version_info >= (3, 11):
            assert self._task is not None
            is_cancelled_by_others = self._task.uncancel() > 0
        if kind is asyncio.CancelledError and not is_cancelled_by_others:
            raise self.error from None
