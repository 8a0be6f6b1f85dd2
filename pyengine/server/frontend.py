"""What the gRPC and the HTTP API share: who may call now, which requests are in flight, and how a request ends."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PyEngineError,
    RequestCancelledError,
    UnavailableError,
)
from pyengine.inputs import Prompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.server.deadline import Deadline
from pyengine.server.engine_client import EngineClient
from pyengine.server.logs import REQUEST_ID
from pyengine.server.request_record import RequestRecord
from pyengine.server.tenancy import Size, Tenancy
from pyengine.tenants import Tenant


class State(enum.Enum):
    """What a new call is told."""

    LOADING = "the server is loading its model"
    SERVING = "serving"
    DRAINING = "the server is shutting down"
    STOPPED = "the server stopped before the request finished"
    FAILED = "the engine has failed"


@dataclass(frozen=True, kw_only=True)
class GenerationCall:
    """One request to generate, as the engine takes it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str | None
    tenant: str | None  # that the caller claims; `Tenancy.account` says whether it is believed
    echo: bool
    has_own_limit: bool = True  # params.max_tokens is what the client wrote, and no default of the API's
    trace_context: Mapping[str, str] | None = None  # traceparent and tracestate, where the request has them


class _InFlight(NamedTuple):
    tenant: str | None
    deadline: Deadline


class Frontend:
    """One engine behind every port. All methods run on the server's event loop.

    Args:
        version: of this program.
        max_concurrent_requests: choices in flight, and calls of the tokenizer; more are refused.
        request_timeout: seconds that a request may take; None: as long as its client waits.
        max_output_tokens: that a choice may have; None: as many as the model and the request allow.
        trust_chat_template: whether clients may send chat templates.
        on_engine_dead: told by the first request that finds the engine dead.
        tenants: who shares the engine; none: every request is anybody's.
        observers: told of each request once it is over.
    """

    def __init__(
        self,
        *,
        version: str,
        max_concurrent_requests: int,
        request_timeout: float | None = None,
        max_output_tokens: int | None = None,
        trust_chat_template: bool = False,
        on_engine_dead: Callable[[EngineDeadError], None] = lambda error: None,
        tenants: Sequence[Tenant] = (),
        observers: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        self._observers = observers
        self.tenancy = Tenancy(tenants)
        self.state = State.LOADING
        self.is_stalled = False  # there is work, and no step has been made for long
        self.version = version
        self.max_concurrent_requests = max_concurrent_requests
        self.trust_chat_template = trust_chat_template
        self._request_timeout = request_timeout
        self._max_output_tokens = max_output_tokens
        self._on_engine_dead = on_engine_dead
        self._serving_engine: EngineClient | None = None
        self._active: dict[str, _InFlight] = {}  # by request id
        self._num_choices = 0  # of the requests in flight, and calls of the tokenizer
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_sending = 0
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    # Lifecycle

    def serve(self, engine: EngineClient) -> None:
        """Begin to accept calls."""
        self._serving_engine = engine
        self.state = State.SERVING

    @property
    def engine(self) -> EngineClient:
        """Raises UnavailableError until there is one."""
        if self._serving_engine is None:
            raise UnavailableError(State.LOADING.value)
        return self._serving_engine

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.engine.config.model.served_model_name

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError unless a request's model is unset or the one served."""
        if name is not None and name != self.model_name:
            raise NotFoundError(f"model: {name!r} is not served here; {self.model_name!r} is")

    @property
    def num_active(self) -> int:
        """Requests in flight."""
        return len(self._active)

    @property
    def num_choices(self) -> int:
        """Choices of the requests in flight, and calls of the tokenizer: what max_concurrent_requests bounds."""
        return self._num_choices

    async def wait_idle(self, timeout: float) -> bool:
        """Whether every request in flight ended within `timeout` seconds."""
        return await _is_set_within(self._idle, timeout)

    def sending(self) -> Callable[[object], None]:
        """Count an answer that is sent after its request is over, until what is returned is called."""
        self._num_sending += 1
        self._all_sent.clear()

        def sent(_: object) -> None:
            self._num_sending -= 1
            if self._num_sending == 0:
                self._all_sent.set()

        return sent

    async def wait_sent(self, timeout: float) -> bool:
        """Whether every answer that is being sent was so within `timeout` seconds."""
        return await _is_set_within(self._all_sent, timeout)

    async def abort_active(self) -> None:
        """Abort what is in flight; those calls end with UnavailableError."""
        self.state = State.STOPPED
        for request_id in list(self._active):
            await self.engine.abort(request_id)

    # Calls

    async def abort(self, request_id: str) -> bool:
        """Abort a request of the caller's own tenant, or of any if its key is trusted; say whether there was such a request."""
        if request_id in self._active and not self.tenancy.may_touch(self._active[request_id].tenant):
            return False
        return await self.engine.abort(request_id)

    @contextmanager
    def call(self, *, while_draining: bool = False) -> Iterator[None]:
        """Around everything that a call does.

        Raises:
            UnavailableError: no calls are taken now, or the server stopped before this one was done.
        """
        if self.state is not State.SERVING and not (while_draining and self.state is State.DRAINING):
            raise UnavailableError(self.state.value)
        try:
            yield
        except RequestCancelledError as error:
            if self.state is State.STOPPED:
                raise UnavailableError(State.STOPPED.value) from error
            raise
        except EngineDeadError as error:
            self._on_engine_dead(error)
            raise

    @contextmanager
    def admitted(self, calls: Sequence[GenerationCall]) -> Iterator[None]:
        """Counts one caller's requests as in flight, all of them or none.

        Raises:
            OverloadedError: with their choices there were more than max_concurrent_requests, or than their tenant may have.
            InvalidRequestError: they have more choices than that by themselves, a request of one of the ids is in flight, or
                they are said to be of an unknown tenant.
            DeadlineExceededError: they took longer than request_timeout, what the body sends to their client included.
        """
        request_ids = [call.request_id for call in calls]
        REQUEST_ID.set(", ".join(request_ids[:4]))
        for request_id in request_ids:
            if request_id in self._active:
                raise InvalidRequestError("request_id", f"{request_id!r} is in flight already")
        deadline = Deadline(self._request_timeout)
        with self._slots(calls[0].tenant, Size(len(calls), sum(call.params.n for call in calls))):
            self._active |= {call.request_id: _InFlight(self.tenancy.account(call).tenant, deadline) for call in calls}
            self._idle.clear()
            try:
                with deadline:
                    yield
            finally:
                for request_id in request_ids:
                    del self._active[request_id]
                if not self._active:
                    self._idle.set()

    @contextmanager
    def tokenizing(self, claimed_tenant: str | None) -> Iterator[None]:
        """Counts a call that wants nothing but the tokenizer, which all requests share, as one choice; raises as `admitted`."""
        with self._slots(claimed_tenant, Size(1, 1)):
            yield

    @contextmanager
    def _slots(self, claimed_tenant: str | None, size: Size) -> Iterator[None]:
        """Counts choices, for each of them is a sequence that the engine makes and runs; raises as `admitted`."""
        size.check_fits(self.max_concurrent_requests, "this server")
        if self._num_choices + size.choices > self.max_concurrent_requests:
            taken = f"this server takes {self.max_concurrent_requests}"
            raise OverloadedError(f"{self._num_choices} choices are in flight, and {size.choices} more came; {taken}")
        with self.tenancy.admitted(claimed_tenant, size, self.engine.config.scheduler.max_num_seqs):
            self._num_choices += size.choices
            try:
                yield
            finally:
                self._num_choices -= size.choices

    async def outputs(self, call: GenerationCall) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs for an admitted call. Closing the generator aborts the request.

        Raises:
            PyEngineError: the request failed, was aborted, asked for or took more than the server allows.
        """
        last: RequestOutput | None = None
        failure: Exception | None = None
        deadline = self._active[call.request_id].deadline
        call = replace(self.tenancy.account(call), params=self._limited(call))
        stream = self.engine.generate(
            call.prompt,
            call.params,
            call.request_id,
            priority=call.priority,
            cache_salt=call.cache_salt,
            tenant=call.tenant,
            max_output_tokens=self._max_output_tokens,
        )
        record = RequestRecord(call)
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    failure = failure or _failure_of(output)
                    last = output
                    record.observe(output)
                    yield output
            if failure is not None:
                raise failure
            if last is None or not last.finished:
                raise RuntimeError("the engine's outputs ended before the request did")
        except BaseException as error:
            record.error = deadline.error or error  # which closes or cancels this generator
            raise
        finally:
            record.ended = time.monotonic()
            for observe in self._observers:
                observe(record)

    def _limited(self, call: GenerationCall) -> SamplingParams:
        """Refuses what a client asks for beyond max_output_tokens. Where it sets no limit, the engine keeps to the server's."""
        params, limit = call.params, self._max_output_tokens
        if limit is None:
            return params
        asked = {"min_tokens": params.min_tokens, "max_tokens": params.max_tokens if call.has_own_limit else None}
        for field, value in asked.items():
            if value is not None and value > limit:
                raise InvalidRequestError(field, f"is {value}; this server generates at most {limit}")
        if params.max_tokens is not None and params.max_tokens > limit:
            return params.replace(max_tokens=limit)
        return params

    async def final_output(self, call: GenerationCall) -> RequestOutput:
        """The last output of an admitted call; raises as `outputs`."""
        last: RequestOutput | None = None
        async with aclosing(self.outputs(call)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None  # outputs would have raised
        return last

    async def fill_prompt_text(self, output: RequestOutput) -> None:
        """The text of a prompt that came as token ids."""
        if output.prompt is None and self.engine.has_tokenizer:
            output.prompt = await self.engine.detokenize(output.prompt_token_ids)


async def _is_set_within(event: asyncio.Event, timeout: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except asyncio.TimeoutError:
        return False
    return True


def _failure_of(output: RequestOutput) -> Exception | None:
    """The error that the call ends with, if a choice was aborted or failed."""
    for choice in output.outputs:
        if choice.finish_reason == "abort":
            return RequestCancelledError("the request was aborted")
        if choice.finish_reason == "error":
            return PyEngineError(output.error or f"choice {choice.index} failed in the engine")
    return None
