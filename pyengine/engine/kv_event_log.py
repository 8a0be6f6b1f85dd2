"""Batches of KV events on their way from the step thread to whoever subscribes.

The prefix cache records events only while somebody listens. The step thread puts those of one step into a `KVEventLog` as one
numbered batch; subscribers read from there. The log is bounded: a subscriber that falls behind it is told so and starts anew
from a snapshot, so that a slow one costs no memory and holds up nobody.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from itertools import takewhile

from pyengine.engine.kv_events import KVEvent, KVEventBatch
from pyengine.errors import DataLostError, PyEngineError

#: Events kept for subscribers that are late or come back.
MAX_LOGGED_EVENTS = 32768


class KVEventLog:
    """The last batches. The step thread appends, event loops read.

    Args:
        max_events: that are kept; the newest batch always is.
    """

    def __init__(self, max_events: int = MAX_LOGGED_EVENTS) -> None:
        self._max_events = max_events
        self._lock = threading.Lock()
        self._batches: deque[KVEventBatch] = deque()
        self._num_events = 0
        # A clock, in microseconds: a number from an earlier run of the server is then below all of this one's, and never taken
        # for one of them. It leaves room below, too, for a snapshot, which is numbered backwards from its state's number.
        self._last_number = time.time_ns() // 1000
        self._num_subscribers = 0
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._error: PyEngineError | None = None

    @property
    def last_number(self) -> int:
        """Of the newest batch, whether it is still kept or not."""
        return self._last_number

    def append(self, events: Sequence[KVEvent]) -> bool:
        """Add a batch. On the step thread.

        Returns:
            Whether to go on recording: False once nobody is there and those who left would find a gap.
        """
        with self._lock:
            self._last_number += 1
            self._batches.append(KVEventBatch(self._last_number, time.time(), events))
            self._num_events += len(events)
            is_full = self._num_events > self._max_events
            while self._num_events > self._max_events and len(self._batches) > 1:
                self._num_events -= len(self._batches.popleft().events)
            goes_on = self._num_subscribers > 0 or not is_full
            if not goes_on:
                self._batches.clear()
                self._num_events = 0
                self._last_number += 1  # a gap: nobody may go on from here as if what follows had been recorded
            waiters, self._waiters = self._waiters, {}
        _wake(waiters)
        return goes_on

    def fail(self, error: PyEngineError) -> None:
        """End every subscription, those to come too. From any thread."""
        with self._lock:
            self._error = error
            waiters, self._waiters = self._waiters, {}
        _wake(waiters)

    def join(self) -> None:
        """Count a subscriber in, which is to `leave`."""
        with self._lock:
            self._num_subscribers += 1

    def leave(self) -> None:
        with self._lock:
            self._num_subscribers -= 1

    def holds_after(self, number: int) -> bool:
        """Whether a reader that has seen batch `number` can go on."""
        with self._lock:
            first = self._batches[0].sequence_number if self._batches else self._last_number + 1
            return first - 1 <= number <= self._last_number

    async def follow(self, number: int) -> AsyncGenerator[KVEventBatch, None]:
        """The batches after `number`, as they come.

        Raises:
            DataLostError: the reader was too slow.
            PyEngineError: the engine ended.
        """
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if self._error is not None:
                    raise type(self._error)(str(self._error))
                first = self._batches[0].sequence_number if self._batches else self._last_number + 1
                if number + 1 < first:
                    raise DataLostError(f"batches {number + 1} to {first - 1} are gone; subscribe from the current state")
                new = self._newer_than(number)
                waiter = None
                if not new:
                    waiter = loop.create_future()
                    self._waiters[waiter] = loop
            if waiter is not None:
                try:
                    await waiter
                finally:
                    with self._lock:
                        self._waiters.pop(waiter, None)
            for batch in new:
                number = batch.sequence_number
                yield batch

    def _newer_than(self, number: int) -> list[KVEventBatch]:
        """Those that are kept, from the end: a reader that keeps up has a few to take, however long the log is."""
        return list(takewhile(lambda batch: batch.sequence_number > number, reversed(self._batches)))[::-1]


def _wake(waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop]) -> None:
    for waiter, loop in waiters.items():
        try:
            loop.call_soon_threadsafe(_settle, waiter)
        except RuntimeError:  # its loop is closed, and the reader with it
            if not loop.is_closed():
                raise


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
