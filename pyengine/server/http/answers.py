"""What completions and chat completions share in their answers: names, usage, and the loop from engine outputs to the wire."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.server.frontend import Frontend, GenerationCall
from pyengine.server.http.encoding import json_bytes
from pyengine.server.http.errors import describe, error_response
from pyengine.server.http.schemas import GenerationRequest

SSE_DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


class Formatter(ABC):
    """Turns the outputs of a body's prompts into OpenAI's objects.

    Args:
        calls: one a prompt; the choices of prompt i have indices i * n and on.
        model: the served model's name.
        request_id: the body's.
        body: what the stream is to say of usage.
    """

    #: the engine's names of what the body calls otherwise
    names: Mapping[str, str] = {}
    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, calls: Sequence[GenerationCall], model: str, request_id: str, body: GenerationRequest) -> None:
        self.calls = calls
        self.request_id = request_id
        self._base = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._include_usage = body.includes_usage
        self._usage_so_far = body.includes_usage_so_far
        self._completion_tokens = 0
        self._seen: dict[int, RequestOutput] = {}  # by prompt: its first output
        self.first_tokens: dict[int, str] = {}  # by prompt: its first token's text, where the answer needs it

    # To be said by each API

    @abstractmethod
    def choice(self, index: int, choice: CompletionOutput, call: GenerationCall, output: RequestOutput) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def chunk_choices(
        self, index: int, choice: CompletionOutput, call: GenerationCall, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """The next pieces of a choice."""

    def wants_prompt_text(self, call: GenerationCall) -> bool:
        """Whether the first output of a prompt needs the prompt's text."""
        return call.echo

    # Shared

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer made of each prompt's FINAL_ONLY output."""
        choices = []
        for i, output in enumerate(outputs):
            self._seen[i] = output
            for choice in sorted(output.outputs, key=lambda choice: choice.index):
                self._completion_tokens += self.num_tokens(choice)
                choices.append(self.choice(self._index(i, choice), choice, self.calls[i], output))
        return {**self._base, "object": self.object_name, "choices": choices, "usage": self.usage()}

    def chunks(self, i: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks of one DELTA output of prompt `i`."""
        self._seen.setdefault(i, output)
        for choice in output.outputs:
            self._completion_tokens += self.num_tokens(choice)
            for piece in self.chunk_choices(self._index(i, choice), choice, self.calls[i], output):
                yield self._chunk([piece])

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """What follows once every choice has ended."""
        if self._include_usage:
            yield {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": self.usage() if self._usage_so_far else None} if self._include_usage else {}
        return {**self._base, "object": self.chunk_name, "choices": choices, **usage}

    def _index(self, i: int, choice: CompletionOutput) -> int:
        return i * self.calls[i].params.n + choice.index

    def num_tokens(self, choice: CompletionOutput) -> int:
        """Tokens of a choice, or of a piece of it, that the client gets."""
        return len(choice.token_ids)

    def usage(self) -> dict[str, Any]:
        """Tokens of the whole body; a prompt counts once, whatever its n."""
        prompt = sum(len(output.prompt_token_ids) for output in self._seen.values())
        cached = sum(output.num_cached_tokens for output in self._seen.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Answer(Response):
    """Generates and sends, as one JSON object or as server-sent events. What runs is aborted once the client is gone."""

    def __init__(self, frontend: Frontend, formatter: Formatter, *, stream: bool) -> None:
        self.status_code = 200
        self.background = None
        self._frontend = frontend
        self._formatter = formatter
        self._stream = stream
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        formatter = self._formatter
        try:
            with self._frontend.call(), self._frontend.admitted(formatter.calls):
                if self._stream:
                    await self._send_events(send)
                else:
                    body = json_bytes(formatter.whole(await self._final_outputs()))
            # A client that has the end of its answer may use the id again: so the end is sent when the request is over.
            if not self._stream:
                response = Response(body, 200, {"x-request-id": formatter.request_id}, "application/json")
                await response(scope, receive, send)
                return
            last = b"".join(map(sse, formatter.last_chunks()))
        except Exception as error:
            if not self._has_begun:
                await error_response(error, formatter.names)(scope, receive, send)
                return
            last = sse(describe(error, formatter.names)[1])
        await send({"type": "http.response.body", "body": last + SSE_DONE})

    async def _final_outputs(self) -> list[RequestOutput]:
        last: dict[int, RequestOutput] = {}
        async with aclosing(_merged([self._frontend.outputs(call) for call in self._formatter.calls])) as outputs:
            async for i, output in outputs:
                last[i] = output
        for i, output in last.items():
            await self._add_prompt(i, output)
        return [last[i] for i in range(len(self._formatter.calls))]

    async def _send_events(self, send: Send) -> None:
        formatter = self._formatter
        started: set[int] = set()
        async with aclosing(_merged([self._frontend.outputs(call) for call in formatter.calls])) as outputs:
            async for i, output in outputs:
                if i not in started:
                    await self._add_prompt(i, output)
                started.add(i)
                events = b"".join(map(sse, formatter.chunks(i, output)))
                if events:
                    await self._begin(send)
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        await self._begin(send)

    async def _add_prompt(self, i: int, output: RequestOutput) -> None:
        """The prompt's text and, beside its log-probabilities, that of its first token, for which there is none."""
        if not self._formatter.wants_prompt_text(self._formatter.calls[i]):
            return
        await self._frontend.fill_prompt_text(output)
        if output.prompt_logprobs is not None and self._frontend.engine.has_tokenizer:
            self._formatter.first_tokens[i] = await self._frontend.engine.detokenize(output.prompt_token_ids[:1])

    async def _begin(self, send: Send) -> None:
        """Say 200, as late as possible: what is wrong with the request has shown by the first output."""
        if self._has_begun:
            return
        self._has_begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-request-id", self._formatter.request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _disconnected(receive: Receive) -> None:
    """Ends when the client is gone. The body has been read, so nothing else comes."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What the streams yield, as it comes, with the stream's number. They run at once and are closed with this one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return

    async def following(i: int) -> RequestOutput | None:
        return await anext(streams[i], None)

    pending = {asyncio.create_task(following(i)): i for i in range(len(streams))}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = pending.pop(task)
                following_output = task.result()
                if following_output is not None:
                    yield i, following_output
                    pending[asyncio.create_task(following(i))] = i
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
