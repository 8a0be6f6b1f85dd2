"""The thread that alone touches the `LLMEngine`, and what other threads may ask of it.

They put additions, aborts and calls into an intake, which it empties between two steps; without work it sleeps on a condition.
Outputs go into an `OutputStream` each, whose reader is woken on its own event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pyengine.engine.input_processor import ProcessedInput
from pyengine.engine.kv_event_log import KVEventLog
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.output_stream import OutputStream
from pyengine.engine.stat_logger import StatLogger
from pyengine.engine.watchdog import StepClock, stack_of
from pyengine.errors import EngineDeadError, InvalidRequestError, PyEngineError, RequestCancelledError, UnavailableError
from pyengine.outputs import RequestOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ThreadCall:
    """A function for the step thread, and where its result goes."""

    function: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return  # the caller has gone
        try:
            result = self.function()
        except PyEngineError as error:
            self.done.set_exception(error)  # the caller's affair alone
        except BaseException as error:
            self.done.set_exception(error)
            raise
        else:
            self.done.set_result(result)


class StepThread:
    """Steps an engine while it has requests, and publishes what the steps bring.

    Args:
        engine: from now on this object's own, but for what any thread may read.

    Attributes:
        stats: `LLMEngine.stats` after the last step.
        clock: when it last got anywhere.
        kv_events: what happens to the prefix cache, for subscribers.
        error: set once a step failed for good.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._condition = threading.Condition()  # guards the five fields below
        # An addition, an id to abort, or a call to make.
        self._intake: deque[tuple[OutputStream, ProcessedInput] | str | _ThreadCall] = deque()
        self._streams: dict[str, OutputStream] = {}  # by request id, until the reader is done with it
        self._is_draining = False
        self._is_stopping = False
        self.error: EngineDeadError | None = None
        self._thread: threading.Thread | None = None
        self.clock = StepClock()
        self.kv_events = KVEventLog()
        self.stats = engine.stats()
        self._stat_logger = StatLogger() if engine.log_stats else None

    # ---- life

    def start(self) -> None:
        """Start it; nothing if it runs.

        Raises:
            UnavailableError: after `shutdown`.
        """
        with self._condition:
            if self._is_stopping:
                raise UnavailableError("the engine is shut down")
            if self._thread is not None:
                return
            # A daemon, so that a program that forgets `shutdown` can end; the exit handler stops it in order.
            self._thread = threading.Thread(target=self._run, name="pyengine-step", daemon=True)
        atexit.register(self.shutdown)
        self._thread.start()

    def refuse_new(self) -> None:
        """From now on open no stream."""
        with self._condition:
            self._is_draining = True

    def shutdown(self) -> None:
        """End what is in flight with UnavailableError, and the thread, and the engine. Blocks; idempotent."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        atexit.unregister(self.shutdown)
        thread = self._thread
        if thread is None:
            self._engine.shutdown()
        elif thread is not threading.current_thread():
            thread.join()
        self._fail_streams(UnavailableError("the engine is shut down"))

    @property
    def is_running(self) -> bool:
        """Whether the thread runs and no step has failed."""
        return self._thread is not None and self._thread.is_alive() and self.error is None

    @property
    def has_streams(self) -> bool:
        """Whether any reader is not done."""
        return bool(self._streams)

    def where(self) -> str:
        """The thread's stack, for a log line about a stalled engine."""
        return stack_of(self._thread)

    # ---- for other threads

    def open(self, stream: OutputStream) -> None:
        """Reserve a stream's id.

        Raises:
            InvalidRequestError: a live request has the id.
            UnavailableError: the thread is not started, draining or shut down.
            EngineDeadError: a step failed.
        """
        with self._condition:
            if self.error is not None:
                raise EngineDeadError(str(self.error))
            if self._is_stopping or self._is_draining or self._thread is None:
                state = "shut down" if self._is_stopping else "draining" if self._is_draining else "not started"
                raise UnavailableError(f"the engine is {state}")
            if stream.request_id in self._streams:
                raise InvalidRequestError("request_id", f"{stream.request_id!r} is in use by a live request")
            self._streams[stream.request_id] = stream

    def submit(self, stream: OutputStream, source: ProcessedInput) -> None:
        """Queue an open stream's request, unless it was aborted meanwhile."""
        with self._condition:
            if not stream.is_done:
                stream.is_submitted = True
                self._intake.append((stream, source))
                self.clock.begin_work()
                self._condition.notify()

    def abort(self, request_id: str) -> bool:
        """Abort a request; its blocks are free after the step that runs now. Returns whether there was such a request."""
        with self._condition:
            stream = self._streams.get(request_id)
            if stream is None or stream.is_done:
                return False
            if stream.is_submitted:
                self._intake.append(request_id)
                self._condition.notify()
                return True
            # Still being tokenised: it must not be queued at all, which `submit` sees to from the moment this lock is free.
            must_wake = stream.fail(RequestCancelledError(f"request {request_id!r} was aborted"))
        self._wake([stream] if must_wake else [])
        return True

    def close(self, stream: OutputStream) -> None:
        """The reader is done: free the id, and abort what still runs."""
        with self._condition:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
            if stream.is_submitted and not stream.is_done:
                self._intake.append(stream.request_id)
                self._condition.notify()

    async def call(self, function: Callable[[], Any]) -> Any:
        """A function's result on this thread, between two steps.

        Raises:
            UnavailableError: the thread is not started, or shut down.
            EngineDeadError: a step failed.
            PyEngineError: what the function raises.
        """
        call = _ThreadCall(function, Future())
        with self._condition:
            if self.error is not None:
                raise EngineDeadError(str(self.error))
            if self._is_stopping or self._thread is None:
                raise UnavailableError("the engine does not run")
            self._intake.append(call)
            self._condition.notify()
        return await asyncio.wrap_future(call.done)

    # ---- calls to make on it

    def publish_kv_events(self) -> None:
        """Number what was recorded since the last time, for subscribers."""
        cache = self._engine.prefix_cache
        events = [] if cache is None else cache.take_events()
        if events and cache is not None:
            cache.record_events(self.kv_events.append(events))

    def reset_metrics(self) -> None:
        """Count from zero again."""
        self._engine.reset_metrics()
        self.stats = self._engine.stats()
        if self._stat_logger is not None:
            self._stat_logger = StatLogger()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._take_intake()
                self.publish_kv_events()
                if self._engine.has_unfinished_requests():
                    outputs = self._engine.step()
                    self.stats = self._engine.stats()  # before the readers know, so that they see the state they are told of
                    self._publish(outputs)
                    self.publish_kv_events()
                    self.clock.progress()
                    if self._stat_logger is not None:
                        self._stat_logger.observe(time.monotonic(), self.stats)
        except BaseException as error:
            # EngineDeadError from a step; anything else is a bug of this thread and just as final.
            if not isinstance(error, EngineDeadError):
                logger.critical("the step thread failed", exc_info=error)
            dead = error if isinstance(error, EngineDeadError) else EngineDeadError(f"{type(error).__name__}: {error}")
            with self._condition:
                self.error = dead
            self._fail_streams(dead)
            self.kv_events.fail(dead)
        else:
            self.kv_events.fail(UnavailableError("the engine is shut down"))
        finally:
            self.clock.idle()
            self._engine.shutdown()
            self.stats = self._engine.stats()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread is to end."""
        with self._condition:
            while not (self._is_stopping or self._intake or self._engine.has_unfinished_requests()):
                self.clock.idle()
                self._condition.wait()
            return not self._is_stopping

    def _take_intake(self) -> None:
        """Apply what other threads asked for since the last step."""
        with self._condition:
            items = list(self._intake)
            self._intake.clear()
        if not items:
            return
        self.clock.progress()
        for item in items:
            if isinstance(item, str):
                outputs = self._engine.abort_request(item)
                if outputs:
                    self.stats = self._engine.stats()
                    self._publish(outputs)  # before a new request with this id runs
                continue
            if isinstance(item, _ThreadCall):
                item.run()
                continue
            stream, source = item
            if stream.is_done:
                continue
            try:
                self._engine.add_processed(source)
            except PyEngineError as error:
                self._wake([stream] if stream.fail(error) else [])
            else:
                stream.is_running = True
        self.stats = self._engine.stats()

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs into their streams and wake each event loop once."""
        with self._condition:
            # A stream that does not run yet has the id of one that was closed: the output is the closed one's.
            pairs = [(stream, o) for o in outputs if (stream := self._streams.get(o.request_id)) and stream.is_running]
        self._wake([stream for stream, output in pairs if stream.put(output)])

    def _wake(self, streams: Sequence[OutputStream]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
        for stream in streams:
            by_loop.setdefault(stream.loop, []).append(stream)
        for loop, woken in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, woken)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                for stream in woken:  # its readers are gone, and could not close their streams
                    self.close(stream)

    def _fail_streams(self, error: PyEngineError) -> None:
        with self._condition:
            streams = list(self._streams.values())
            calls = [item for item in self._intake if isinstance(item, _ThreadCall)]
            self._intake.clear()
        for call in calls:
            if call.done.set_running_or_notify_cancel():
                call.done.set_exception(type(error)(str(error)))
        # One exception a reader: each of them adds its own traceback.
        self._wake([stream for stream in streams if stream.fail(type(error)(str(error)))])


def _wake_all(streams: Sequence[OutputStream]) -> None:
    for stream in streams:
        stream.wake()
