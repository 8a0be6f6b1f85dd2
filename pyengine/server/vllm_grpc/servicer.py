"""The service `vllm.grpc.engine.VllmEngine` over a `Frontend`, for gateways that route between vLLM's workers.

Token ids (or text) in, token ids out; the gateway has the tokenizer. What the protocol has no field for comes as metadata:
x-priority, x-cache-salt, x-tenant, and x-request-id where the request has no id.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from pyengine.errors import InvalidRequestError, RequestCancelledError, UnsupportedError
from pyengine.server.frontend import Frontend, State
from pyengine.server.grpc_service import CallFrame, add_service
from pyengine.server.vllm_grpc import convert, tokenizer_archive
from pyengine.server.vllm_grpc.kv_events import KVEventMessages
from pyengine.server.vllm_grpc.loads import LoadReporter

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
#: What the gateway takes for vLLM's gRPC server.
SERVER_TYPE = "vllm-grpc"
MAX_FLUSH_SECONDS = 3600.0


class VllmEngineServicer:
    """Handlers of `vllm.grpc.engine.VllmEngine`. All run on the server's event loop."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._call = CallFrame(frontend, convert.API_FIELDS)
        self._started = time.monotonic()
        self._last_receive = 0.0  # seconds since the epoch; 0: nothing yet
        self._loads = LoadReporter(frontend.version)
        self._archive: asyncio.Task[bytes] | None = None

    # Requests

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        # With context.write, for the reason that pyengine.v1's Generate has.
        async with self._call(request, context, "Generate"):
            self._last_receive = time.time()
            call = convert.generation_call(request, context.invocation_metadata() or ())
            with self._frontend.admitted([call]):
                await context.send_initial_metadata((("x-request-id", call.request_id),))
                responses = convert.GenerationResponses(call)
                is_aborted = False
                try:
                    async with aclosing(self._frontend.outputs(call)) as outputs:
                        async for output in outputs:
                            for message in responses.messages(output):
                                is_aborted |= message.complete.finish_reason == "abort"
                                await context.write(message)
                except RequestCancelledError:
                    # By Abort: this protocol says so in the last message. A server that stops has its own status for it.
                    if not is_aborted or self._frontend.state is State.STOPPED:
                        raise

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Idempotent: ids that are unknown or done are nobody's mistake."""
        async with self._call(request, context, "Abort", while_draining=True):
            for request_id in request.request_ids:
                await self._frontend.abort(request_id)
            return pb.AbortResponse()

    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse(request, context, "Embed", "this engine generates and does not embed")

    # The worker

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        """Whether to route requests here; answered in every state."""
        state = self._frontend.state
        if state is State.SERVING and self._frontend.is_stalled:
            return pb.HealthCheckResponse(healthy=False, message="no step is made, though requests wait")
        return pb.HealthCheckResponse(healthy=state is State.SERVING, message=state.value)

    async def GetModelInfo(self, request: Any, context: grpc.aio.ServicerContext) -> pb.GetModelInfoResponse:
        async with self._call(request, context, "GetModelInfo"):
            config = self._frontend.engine.config
            model, arch = config.model, config.model.arch
            return pb.GetModelInfoResponse(
                model_path=model.model,
                is_generation=True,
                max_context_length=model.max_model_len,
                vocab_size=arch.vocab_size,
                supports_vision=False,
                served_model_name=model.served_model_name,
                tokenizer_path=model.tokenizer or model.model,
                model_type=tokenizer_archive.model_type(config),
                architectures=[arch.architecture],
                eos_token_ids=arch.eos_token_ids,
                bos_token_id=arch.bos_token_id or 0,
                max_req_input_len=model.max_model_len - 1,  # there is to be room for a token
            )

    async def GetServerInfo(self, request: Any, context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        async with self._call(request, context, "GetServerInfo"):
            config = self._frontend.engine.config
            return pb.GetServerInfoResponse(
                active_requests=self._frontend.num_active,
                is_paused=False,
                last_receive_timestamp=self._last_receive,
                uptime_seconds=time.monotonic() - self._started,
                server_type=SERVER_TYPE,
                data_parallel_size=1,
                kv_cache_dtype=config.cache.kv_cache_dtype,
                block_size=config.cache.block_size,
                model_dtype=config.model.dtype,
                max_num_seqs=config.scheduler.max_num_seqs,
            )

    async def GetLoads(self, request: Any, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        async with self._call(request, context, "GetLoads", while_draining=True):
            return self._loads.loads(self._frontend.engine, request.dp_rank if request.HasField("dp_rank") else None)

    async def GetTokenizer(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        async with self._call(request, context, "GetTokenizer"):
            if not self._frontend.engine.has_tokenizer:
                raise UnsupportedError("GetTokenizer", "this server runs without a tokenizer")
            if self._archive is None or (self._archive.done() and self._archive.exception() is not None):
                self._archive = asyncio.create_task(tokenizer_archive.tokenizer_archive(self._frontend.engine))
            # Shielded: one caller that goes away must not take the archive from the others.
            for chunk in tokenizer_archive.chunks(await asyncio.shield(self._archive)):
                await context.write(chunk)

    # The prefix cache

    async def FlushCache(self, request: Any, context: grpc.aio.ServicerContext) -> common_pb2.FlushCacheResponse:
        async with self._call(request, context, "FlushCache"):
            self._frontend.tenancy.require_trust("FlushCache")
            timeout = request.timeout_s
            if not 0 <= timeout <= MAX_FLUSH_SECONDS or math.isnan(timeout):
                raise InvalidRequestError("timeout_s", f"must be in [0, {MAX_FLUSH_SECONDS:g}], got {timeout:g}")
            await self._frontend.wait_idle(timeout)
            if await self._frontend.engine.reset_prefix_cache():
                return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")
            message = f"not flushed: {self._frontend.num_active} requests are in flight"
            return common_pb2.FlushCacheResponse(success=False, message=message)

    async def SubscribeKvEvents(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        async with self._call(request, context, "SubscribeKvEvents"):
            self._frontend.tenancy.require_trust("SubscribeKvEvents")  # events hold the tokens of everybody's prompts
            messages = KVEventMessages()
            async with self._frontend.engine.kv_events(request.start_sequence_number) as batches:
                # Not before the subscription stands: a gateway begins anew if it is told OUT_OF_RANGE in place of metadata.
                await context.send_initial_metadata(())
                async for batch in batches:
                    await context.write(messages.batch(batch))

    # Profiling

    async def StartProfile(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse(request, context, "StartProfile", "this server has no profiler")

    async def StopProfile(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse(request, context, "StopProfile", "this server has no profiler")

    # What they share

    async def _refuse(self, request: Any, context: grpc.aio.ServicerContext, method: str, message: str) -> NoReturn:
        async with self._call(request, context, method):
            raise UnsupportedError(method, message)
        raise AssertionError("unreachable: the call has been aborted")


def add_to_server(servicer: VllmEngineServicer, server: grpc.aio.Server) -> None:
    """Register the service."""
    add_service(SERVICE, servicer, server)
