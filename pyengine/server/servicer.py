"""The service `pyengine.v1.Inference` over an `EngineClient`."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc

from pyengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PyEngineError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind
from pyengine.server import convert
from pyengine.server.engine_client import EngineClient
from pyengine.server.status import errors_as_status

logger = logging.getLogger(__name__)

SERVICE_NAME: str = convert.SERVICE.full_name


class State(enum.Enum):
    """What a new call is told."""

    LOADING = "the server is loading its model"
    SERVING = "serving"
    DRAINING = "the server is shutting down"
    STOPPED = "the server stopped before the request finished"
    FAILED = "the engine has failed"


class InferenceServicer:
    """Handlers of `pyengine.v1.Inference`. All run on the server's event loop."""

    def __init__(
        self,
        *,
        version: str,
        max_concurrent_requests: int,
        trust_chat_template: bool = False,
        on_engine_dead: Callable[[EngineDeadError], None] = lambda error: None,
    ) -> None:
        self.state = State.LOADING
        self._version = version
        self._max_concurrent_requests = max_concurrent_requests
        self._trust_chat_template = trust_chat_template
        self._on_engine_dead = on_engine_dead
        self._serving_engine: EngineClient | None = None
        self._active: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # Lifecycle

    def serve(self, engine: EngineClient) -> None:
        """Begin to accept calls."""
        self._serving_engine = engine
        self.state = State.SERVING

    @property
    def num_active(self) -> int:
        """Generate and Complete calls in flight."""
        return len(self._active)

    async def wait_idle(self, timeout: float) -> bool:
        """Whether every call in flight ended within `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def abort_active(self) -> None:
        """Abort what is in flight; those calls end with UNAVAILABLE."""
        self.state = State.STOPPED
        for request_id in list(self._active):
            await self._engine.abort(request_id)

    @property
    def _engine(self) -> EngineClient:
        if self._serving_engine is None:
            raise UnavailableError(State.LOADING.value)
        return self._serving_engine

    # Methods of the service

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        # Written with context.write, not as an async generator: a cancellation must surface inside this coroutine, so that
        # the engine's generator is closed there and then, and not when the garbage collector finds it.
        async with self._call(request, context, "Generate"):
            call = self._generation_call(request, context, RequestOutputKind.DELTA)
            with self._admitted(call.request_id):
                await context.send_initial_metadata((("x-request-id", call.request_id),))
                responses = convert.GenerationResponses(call, self._engine.config.model.served_model_name)
                last: RequestOutput | None = None
                failure: Exception | None = None
                async with aclosing(self._outputs(call)) as outputs:
                    async for output in outputs:
                        if responses.wants_prompt_text:
                            await self._fill_prompt_text(output)
                        for message in responses.deltas(output):
                            await context.write(message)
                        failure = failure or _failure_of(output)
                        last = output
                _finished(last, failure)

    async def Complete(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Complete"):
            call = self._generation_call(request, context, RequestOutputKind.FINAL_ONLY)
            with self._admitted(call.request_id):
                await context.send_initial_metadata((("x-request-id", call.request_id),))
                last: RequestOutput | None = None
                async with aclosing(self._outputs(call)) as outputs:
                    async for output in outputs:
                        last = output
                last = _finished(last, None if last is None else _failure_of(last))
                responses = convert.GenerationResponses(call, self._engine.config.model.served_model_name)
                if responses.wants_prompt_text:
                    await self._fill_prompt_text(last)
                return responses.complete(last)

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Abort", while_draining=True):
            return convert.abort_response(await self._engine.abort(convert.abort_id(request)))

    async def GetModelInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "GetModelInfo"):
            engine = self._engine
            return convert.model_info(
                engine.config,
                has_tokenizer=engine.has_tokenizer,
                has_chat_template=engine.has_chat_template,
                version=self._version,
            )

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Tokenize"):
            convert.check_model(request, self._engine.config.model.served_model_name)
            prompt = convert.prompt(request, trust_chat_template=self._trust_chat_template)
            return convert.tokenize_response(await self._engine.tokenize(prompt))

    async def Detokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Detokenize"):
            convert.check_model(request, self._engine.config.model.served_model_name)
            return convert.detokenize_response(await self._engine.detokenize(list(request.token_ids)))

    # What they share

    @asynccontextmanager
    async def _call(
        self, request: Any, context: grpc.aio.ServicerContext, method: str, *, while_draining: bool = False
    ) -> AsyncIterator[None]:
        async with errors_as_status(context, method):
            if self.state is not State.SERVING and not (while_draining and self.state is State.DRAINING):
                raise UnavailableError(self.state.value)
            if isinstance(request, InvalidRequestError):
                raise request
            try:
                yield
            except (InvalidRequestError, UnsupportedError) as error:
                raise convert.in_api_terms(error) from error
            except RequestCancelledError as error:
                if self.state is State.STOPPED:
                    raise UnavailableError(State.STOPPED.value) from error
                raise
            except EngineDeadError as error:
                self._on_engine_dead(error)
                raise

    def _generation_call(
        self, request: Any, context: grpc.aio.ServicerContext, kind: RequestOutputKind
    ) -> convert.GenerationCall:
        convert.check_model(request, self._engine.config.model.served_model_name)
        metadata = context.invocation_metadata() or ()
        return convert.generation_call(request, metadata, kind, trust_chat_template=self._trust_chat_template)

    @contextmanager
    def _admitted(self, request_id: str) -> Iterator[None]:
        """Counts the request as in flight.

        Raises:
            OverloadedError: there are max_concurrent_requests already.
            InvalidRequestError: a request of that id is in flight.
        """
        if len(self._active) >= self._max_concurrent_requests:
            raise OverloadedError(f"{len(self._active)} requests are in flight, as many as this server takes")
        if request_id in self._active:
            raise InvalidRequestError("request_id", f"{request_id!r} is in flight already")
        self._active.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._active.discard(request_id)
            if not self._active:
                self._idle.set()

    def _outputs(self, call: convert.GenerationCall) -> Any:
        return self._engine.generate(
            call.prompt,
            call.params,
            call.request_id,
            priority=call.priority,
            cache_salt=call.cache_salt,
            tenant=call.tenant,
        )

    async def _fill_prompt_text(self, output: RequestOutput) -> None:
        """For `echo` of a prompt that came as token ids."""
        if output.prompt is None and self._engine.has_tokenizer:
            output.prompt = await self._engine.detokenize(output.prompt_token_ids)


def _finished(last: RequestOutput | None, failure: Exception | None) -> RequestOutput:
    """The call's last output, unless it did not end well: that is raised."""
    if failure is not None:
        raise failure
    if last is None or not last.finished:
        raise RuntimeError("the engine's outputs ended before the request did")
    return last


def _failure_of(output: RequestOutput) -> Exception | None:
    """The error that the call ends with, if a choice was aborted or failed."""
    for choice in output.outputs:
        if choice.finish_reason == "abort":
            return RequestCancelledError("the request was aborted")
        if choice.finish_reason == "error":
            return PyEngineError(output.error or f"choice {choice.index} failed in the engine")
    return None


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Register the service, with parsers that blame the client for bytes that are no message."""
    handlers = {}
    for method in convert.SERVICE.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=convert.parser(method.name),
            response_serializer=convert.serialise,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
