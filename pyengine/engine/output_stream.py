"""One request's outputs on their way from the step thread to an event loop."""

from __future__ import annotations

import asyncio
import threading

from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.sampling_params import RequestOutputKind


def _merge_choice(into: CompletionOutput, new: CompletionOutput) -> None:
    into.text += new.text
    into.token_ids += new.token_ids
    if new.logprobs is not None:
        into.logprobs = (into.logprobs or []) + new.logprobs
    into.cumulative_logprob = new.cumulative_logprob
    into.finish_reason, into.stop_reason = new.finish_reason, new.stop_reason


def merge_deltas(into: RequestOutput, new: RequestOutput) -> None:
    """Append a DELTA output to an earlier one that was not read yet."""
    known = {choice.index: choice for choice in into.outputs}
    for choice in new.outputs:
        if choice.index in known:
            _merge_choice(known[choice.index], choice)
        else:
            into.outputs.append(choice)
    into.finished = new.finished
    into.prompt_logprobs = into.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs
    into.num_cached_tokens, into.metrics, into.error = new.num_cached_tokens, new.metrics, new.error


class OutputStream:
    """A slot for one output. What arrives before the last was read is merged into it, so a slow reader costs no more memory
    than its request's whole output.

    Args:
        request_id: the request's.
        loop: the reader's event loop.
        kind: how outputs are merged.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.loop = loop
        self.is_submitted = False  # queued for the engine; an abort has to go the same way
        self.is_running = False  # the engine has the request; set and read by the step thread
        self.is_done = False  # the last output, or the error, is in the slot or was read
        self._kind = kind
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._is_signalled = False  # a wake-up is on its way to the loop
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> bool:
        """Add an output. From any thread.

        Returns:
            Whether `wake` must be called on the loop.
        """
        with self._lock:
            if self.is_done:
                return False
            if self._output is not None and self._kind is RequestOutputKind.DELTA:
                merge_deltas(self._output, output)
            else:
                self._output = output
            self.is_done = output.finished
            return self._signal()

    def fail(self, error: Exception) -> bool:
        """End the stream with an error, which is raised after what is in the slot was read; else as `put`."""
        with self._lock:
            if self.is_done:
                return False
            self._error = error
            self.is_done = True
            return self._signal()

    def _signal(self) -> bool:
        must_wake = not self._is_signalled
        self._is_signalled = True
        return must_wake

    def wake(self) -> None:
        """Let the reader look into the slot. On the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """The next output, as soon as there is one; one reader at a time."""
        while True:
            with self._lock:
                output, self._output = self._output, None
                self._is_signalled = False
                error = self._error
            if output is not None:
                return output
            if error is not None:
                raise error
            self._waiter = self.loop.create_future()
            await self._waiter
