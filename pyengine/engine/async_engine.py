"""The engine in a thread of its own, with asyncio streams.

The step thread alone touches the `LLMEngine`. Other threads put additions and aborts into an intake, which it empties between
two steps; without work it sleeps on a condition. Tokenising runs in a thread of its own too, so that neither the step loop nor
an event loop waits for it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyengine.config import EngineConfig
from pyengine.engine.input_processor import ProcessedInput
from pyengine.engine.kv_event_log import KVEventLog
from pyengine.engine.kv_events import KVEventBatch, snapshot_batches
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.metrics import EngineMetrics
from pyengine.engine.output_stream import OutputStream
from pyengine.engine.stat_logger import StatLogger
from pyengine.engine.watchdog import StepClock, stack_of
from pyengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OutOfRangeError,
    PyEngineError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from pyengine.inputs import Prompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams

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


class AsyncLLMEngine:
    """Many requests from asyncio, one step loop.

    Args:
        engine: from now on this object's own.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._condition = threading.Condition()  # guards the five fields below
        # An addition, an id to abort, or a call for the step thread to make.
        self._intake: deque[tuple[OutputStream, ProcessedInput] | str | _ThreadCall] = deque()
        self._streams: dict[str, OutputStream] = {}  # by request id, until the reader is done with it
        self._is_draining = False
        self._is_stopping = False
        self._error: EngineDeadError | None = None
        self._thread: threading.Thread | None = None
        self._clock = StepClock()
        self._kv_events = KVEventLog()
        self._stats = engine.stats()
        self._stat_logger = StatLogger() if engine.log_stats else None
        # One thread: tokenizers of Transformers may not be used by two at a time.
        self._tokenizer_pool = ThreadPoolExecutor(1, thread_name_prefix="pyengine-tokenizer")

    # ---- life

    def start(self) -> None:
        """Start the step thread.

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

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for those in flight.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Whether all of them ended in time.
        """
        with self._condition:
            self._is_draining = True
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._streams:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def shutdown(self) -> None:
        """End what is in flight with UnavailableError, join the step thread, release everything. Blocks; idempotent."""
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
        self._tokenizer_pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_running(self) -> bool:
        """Whether the step thread runs and no step has failed."""
        return self._thread is not None and self._thread.is_alive() and self._error is None

    @property
    def errored(self) -> bool:
        """Whether a step failed for good: nothing runs any more."""
        return self._error is not None

    # ---- requests

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request's outputs, as `params.output_kind` asks; a reader that is late gets several in one.

        Closing the generator, or cancelling its reader, aborts the request. After `abort` the last output has reason
        "abort". See `InputProcessor.process` for the arguments.

        Raises:
            InvalidRequestError, UnsupportedError: naming the field, before the first output.
            UnavailableError: the engine is not started, draining or shut down.
            RequestCancelledError: aborted before it was queued.
            EngineDeadError: a step failed.
            PyEngineError: this request failed; the others go on.
        """
        arrival_time = time.monotonic()
        stream = self._open(request_id, params)
        try:
            process = partial(
                self._engine.input_processor.process,
                request_id,
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                arrival_time=arrival_time,
            )
            source = await stream.loop.run_in_executor(self._tokenizer_pool, process)
            self._submit(stream, source)
            while True:
                output = await stream.next()
                if output.error is not None:
                    raise PyEngineError(output.error)
                yield output
                if output.finished:
                    return
        finally:
            self._close(stream)

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its blocks are free after the step that runs now. Returns whether there was such a request."""
        with self._condition:
            stream = self._streams.get(request_id)
            if stream is None or stream.is_done:
                return False
            if stream.is_submitted:
                self._intake.append(request_id)
                self._condition.notify()
                return True
        # Still being tokenised: it must not be queued at all.
        self._wake([stream] if stream.fail(RequestCancelledError(f"request {request_id!r} was aborted")) else [])
        return True

    def _open(self, request_id: str, params: SamplingParams) -> OutputStream:
        """Reserve the id."""
        stream = OutputStream(request_id, asyncio.get_running_loop(), params.output_kind)
        with self._condition:
            if self._error is not None:
                raise EngineDeadError(str(self._error))
            if self._is_stopping or self._is_draining or self._thread is None:
                state = "shut down" if self._is_stopping else "draining" if self._is_draining else "not started"
                raise UnavailableError(f"the engine is {state}")
            if request_id in self._streams:
                raise InvalidRequestError("request_id", f"{request_id!r} is in use by a live request")
            self._streams[request_id] = stream
        return stream

    def _submit(self, stream: OutputStream, source: ProcessedInput) -> None:
        with self._condition:
            if not stream.is_done:
                stream.is_submitted = True
                self._intake.append((stream, source))
                self._clock.begin_work()
                self._condition.notify()

    def _close(self, stream: OutputStream) -> None:
        """The reader is done: free the id, and abort what still runs."""
        with self._condition:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
            if stream.is_submitted and not stream.is_done:
                self._intake.append(stream.request_id)
                self._condition.notify()

    # ---- text

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids.

        Raises:
            InvalidRequestError, UnsupportedError: naming the field.
        """
        loop = asyncio.get_running_loop()
        _, token_ids = await loop.run_in_executor(self._tokenizer_pool, self._engine.input_processor.tokenize, prompt)
        return token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            InvalidRequestError: naming the field.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer_pool, self._engine.input_processor.detokenize, token_ids)

    async def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder, as Transformers does.

        Raises:
            UnsupportedError: there is no tokenizer.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise UnsupportedError("skip_tokenizer_init", "leaves the engine without a tokenizer")
        await asyncio.get_running_loop().run_in_executor(self._tokenizer_pool, tokenizer.save_pretrained, str(folder))

    # ---- around it

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def has_tokenizer(self) -> bool:
        return self._engine.tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return getattr(self._engine.tokenizer, "chat_template", None) is not None

    def stats(self) -> dict[str, Any]:
        """`LLMEngine.stats` after the last step."""
        return dict(self._stats)

    @property
    def metrics(self) -> EngineMetrics:
        """Counters and histograms, written by the step thread; to be read only."""
        return self._engine.metrics

    async def reset_metrics(self) -> None:
        """Count from zero again, between two steps.

        Raises:
            UnavailableError: the engine is not started, or shut down.
            EngineDeadError: a step failed.
        """
        await self._call(self._reset_metrics)

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, between two steps. Returns False, and does nothing, while requests are in flight.

        Raises:
            UnavailableError, EngineDeadError: as `reset_metrics`.
        """

        def reset() -> bool:
            if self._engine.has_unfinished_requests():
                return False
            self._engine.reset_prefix_cache()
            return True

        return bool(await self._call(reset))

    async def _call(self, function: Callable[[], Any]) -> Any:
        """A function's result on the step thread, between two steps."""
        call = _ThreadCall(function, Future())
        with self._condition:
            if self._error is not None:
                raise EngineDeadError(str(self._error))
            if self._is_stopping or self._thread is None:
                raise UnavailableError("the engine does not run")
            self._intake.append(call)
            self._condition.notify()
        return await asyncio.wrap_future(call.done)

    # ---- KV events

    @asynccontextmanager
    async def kv_events(self, after: int = 0) -> AsyncIterator[AsyncGenerator[KVEventBatch, None]]:
        """What happens to the prefix cache, one batch a step at most. Entered once the subscription stands.

        Args:
            after: number of the last batch that the caller knows; 0: begin with a snapshot of the current state.

        Raises:
            UnsupportedError: there is no prefix cache.
            OutOfRangeError: batches after that one are gone.
            DataLostError: from the batches; the caller is too slow.
            UnavailableError, EngineDeadError: the engine does not run, or ended.
        """

        def begin() -> list[KVEventBatch]:
            cache = self._engine.prefix_cache
            if cache is None:
                raise UnsupportedError("enable_prefix_caching", "is off, so there are no KV events")
            cache.record_events(True)
            self._publish_kv_events()
            if after and not self._kv_events.holds_after(after):
                raise OutOfRangeError(f"start_sequence_number: batches after {after} are gone; 0 begins with the current state")
            return [] if after else snapshot_batches(cache.stored_blocks(), self._kv_events.last_number)

        async def batches(snapshot: list[KVEventBatch]) -> AsyncGenerator[KVEventBatch, None]:
            for batch in snapshot:
                yield batch
            async with aclosing(self._kv_events.follow(snapshot[-1].sequence_number if snapshot else after)) as news:
                async for batch in news:
                    yield batch

        self._kv_events.join()
        try:
            async with aclosing(batches(await self._call(begin))) as stream:
                yield stream
        finally:
            self._kv_events.leave()

    def stalled_for(self) -> float:
        """Seconds for which there has been work and no step ended; 0 without work. For health checks."""
        return self._clock.stalled_for()

    def where(self) -> str:
        """The step thread's stack, for a log line about a stalled engine."""
        return stack_of(self._thread)

    # ---- the step thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._take_intake()
                self._publish_kv_events()
                if self._engine.has_unfinished_requests():
                    outputs = self._engine.step()
                    self._stats = self._engine.stats()  # before the readers know, so that they see the state they are told of
                    self._publish(outputs)
                    self._publish_kv_events()
                    self._clock.progress()
                    if self._stat_logger is not None:
                        self._stat_logger.observe(time.monotonic(), self._stats)
        except BaseException as error:
            # EngineDeadError from a step; anything else is a bug of this thread and just as final.
            if not isinstance(error, EngineDeadError):
                logger.critical("the step thread failed", exc_info=error)
            dead = error if isinstance(error, EngineDeadError) else EngineDeadError(f"{type(error).__name__}: {error}")
            with self._condition:
                self._error = dead
            self._fail_streams(dead)
            self._kv_events.fail(dead)
        else:
            self._kv_events.fail(UnavailableError("the engine is shut down"))
        finally:
            self._clock.idle()
            self._engine.shutdown()
            self._stats = self._engine.stats()

    def _publish_kv_events(self) -> None:
        cache = self._engine.prefix_cache
        events = [] if cache is None else cache.take_events()
        if events and cache is not None:
            cache.record_events(self._kv_events.append(events))

    def _reset_metrics(self) -> None:
        self._engine.reset_metrics()
        self._stats = self._engine.stats()
        if self._stat_logger is not None:
            self._stat_logger = StatLogger()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread is to end."""
        with self._condition:
            while not (self._is_stopping or self._intake or self._engine.has_unfinished_requests()):
                self._clock.idle()
                self._condition.wait()
            return not self._is_stopping

    def _take_intake(self) -> None:
        """Apply what other threads asked for since the last step."""
        with self._condition:
            items = list(self._intake)
            self._intake.clear()
        if not items:
            return
        self._clock.progress()
        for item in items:
            if isinstance(item, str):
                outputs = self._engine.abort_request(item)
                if outputs:
                    self._stats = self._engine.stats()
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
        self._stats = self._engine.stats()

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
                    self._close(stream)

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
