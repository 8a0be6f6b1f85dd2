"""The engine for asyncio: requests as streams, on a step thread.

Tokenising runs in a thread of its own too, so that neither the step loop nor an event loop waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyengine.config import EngineConfig
from pyengine.engine.kv_events import KVEventBatch, snapshot_batches
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.metrics import EngineMetrics
from pyengine.engine.output_stream import OutputStream
from pyengine.engine.step_thread import StepThread
from pyengine.errors import OutOfRangeError, PyEngineError, UnavailableError, UnsupportedError
from pyengine.inputs import Prompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams

T = TypeVar("T")


class AsyncLLMEngine:
    """Many requests from asyncio, one step loop.

    Args:
        engine: from now on this object's own.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._step_thread = StepThread(engine)
        # One thread: tokenizers of Transformers may not be used by two at a time.
        self._tokenizer_pool = ThreadPoolExecutor(1, thread_name_prefix="pyengine-tokenizer")

    # ---- life

    def start(self) -> None:
        """Start the step thread.

        Raises:
            UnavailableError: after `shutdown`.
        """
        self._step_thread.start()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for those in flight.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Whether all of them ended in time.
        """
        self._step_thread.refuse_new()
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._step_thread.has_streams:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def shutdown(self) -> None:
        """End what is in flight with UnavailableError, join the step thread, release everything. Blocks; idempotent."""
        self._step_thread.shutdown()
        self._tokenizer_pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_running(self) -> bool:
        """Whether the step thread runs and no step has failed."""
        return self._step_thread.is_running

    @property
    def errored(self) -> bool:
        """Whether a step failed for good: nothing runs any more."""
        return self._step_thread.error is not None

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
        max_output_tokens: int | None = None,
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
        stream = OutputStream(request_id, asyncio.get_running_loop(), params.output_kind)
        self._step_thread.open(stream)
        try:
            process = partial(
                self._engine.input_processor.process,
                request_id,
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                max_output_tokens=max_output_tokens,
                arrival_time=arrival_time,
            )
            source = await self._on_tokenizer_thread(process)
            self._step_thread.submit(stream, source)
            while True:
                output = await stream.next()
                if output.error is not None:
                    raise PyEngineError(output.error)
                yield output
                if output.finished:
                    return
        finally:
            self._step_thread.close(stream)

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its blocks are free after the step that runs now. Returns whether there was such a request."""
        return self._step_thread.abort(request_id)

    # ---- text

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids.

        Raises:
            InvalidRequestError, UnsupportedError: naming the field.
            UnavailableError: the engine is shut down.
        """
        _, token_ids = await self._on_tokenizer_thread(partial(self._engine.input_processor.tokenize, prompt))
        return token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            InvalidRequestError: naming the field.
            UnavailableError: the engine is shut down.
        """
        return await self._on_tokenizer_thread(partial(self._engine.input_processor.detokenize, token_ids))

    async def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder, as Transformers does.

        Raises:
            UnsupportedError: there is no tokenizer.
            UnavailableError: the engine is shut down.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise UnsupportedError("skip_tokenizer_init", "leaves the engine without a tokenizer")
        await self._on_tokenizer_thread(partial(tokenizer.save_pretrained, str(folder)))

    async def _on_tokenizer_thread(self, function: Callable[[], T]) -> T:
        """A function's result on the tokenizer's thread; UnavailableError if the engine is shut down before it begins."""
        try:
            future = asyncio.wrap_future(self._tokenizer_pool.submit(function))
        except RuntimeError:  # the pool takes nothing any more
            raise UnavailableError("the engine is shut down") from None
        try:
            # Raises CancelledError only if the caller is cancelled; to await the future would if `shutdown` cancels that, too.
            await asyncio.wait([future])
        finally:
            future.cancel()  # nothing, if it is done
        if future.cancelled():
            raise UnavailableError("the engine is shut down")
        return future.result()

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
        return dict(self._step_thread.stats)

    def stalled_for(self) -> float:
        """Seconds for which there has been work and no step ended; 0 without work. For health checks."""
        return self._step_thread.clock.stalled_for()

    def where(self) -> str:
        """The step thread's stack, for a log line about a stalled engine."""
        return self._step_thread.where()

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
        await self._step_thread.call(self._step_thread.reset_metrics)

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

        return bool(await self._step_thread.call(reset))

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
            self._step_thread.publish_kv_events()
            if after and not self._step_thread.kv_events.holds_after(after):
                raise OutOfRangeError(f"start_sequence_number: batches after {after} are gone; 0 begins with the current state")
            return [] if after else snapshot_batches(cache.stored_blocks(), self._step_thread.kv_events.last_number)

        async def batches(snapshot: list[KVEventBatch]) -> AsyncGenerator[KVEventBatch, None]:
            for batch in snapshot:
                yield batch
            async with aclosing(
                self._step_thread.kv_events.follow(snapshot[-1].sequence_number if snapshot else after)
            ) as news:
                async for batch in news:
                    yield batch

        self._step_thread.kv_events.join()
        try:
            async with aclosing(batches(await self._step_thread.call(begin))) as stream:
                yield stream
        finally:
            self._step_thread.kv_events.leave()
