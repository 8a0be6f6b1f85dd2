"""The service `pyengine.v1.Inference` over a `Frontend`."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import grpc

from pyengine.sampling_params import RequestOutputKind
from pyengine.server import convert
from pyengine.server.frontend import Frontend, GenerationCall
from pyengine.server.grpc_service import CallFrame, add_service

SERVICE_NAME: str = convert.SERVICE.full_name


class InferenceServicer:
    """Handlers of `pyengine.v1.Inference`. All run on the server's event loop."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._call = CallFrame(frontend, convert.API_FIELDS)

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        # Written with context.write, not as an async generator: a cancellation must surface inside this coroutine, so that
        # the engine's generator is closed there and then, and not when the garbage collector finds it.
        async with self._call(request, context, "Generate"):
            call = self._generation_call(request, context, RequestOutputKind.DELTA)
            with self._frontend.admitted([call]):
                await context.send_initial_metadata((("x-request-id", call.request_id),))
                responses = convert.GenerationResponses(call, self._frontend.model_name)
                async with aclosing(self._frontend.outputs(call)) as outputs:
                    async for output in outputs:
                        if responses.wants_prompt_text:
                            await self._frontend.fill_prompt_text(output)
                        for message in responses.deltas(output):
                            await context.write(message)

    async def Complete(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Complete"):
            call = self._generation_call(request, context, RequestOutputKind.FINAL_ONLY)
            with self._frontend.admitted([call]):
                await context.send_initial_metadata((("x-request-id", call.request_id),))
                output = await self._frontend.final_output(call)
                responses = convert.GenerationResponses(call, self._frontend.model_name)
                if responses.wants_prompt_text:
                    await self._frontend.fill_prompt_text(output)
                # gRPC sends what is returned, and slowly if the client reads slowly: a server that stops waits for it.
                context.add_done_callback(self._frontend.sending())
                return responses.complete(output)

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Abort", while_draining=True):
            return convert.abort_response(await self._frontend.abort(convert.abort_id(request)))

    async def GetModelInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "GetModelInfo"):
            engine = self._frontend.engine
            return convert.model_info(
                engine.config,
                has_tokenizer=engine.has_tokenizer,
                has_chat_template=engine.has_chat_template,
                version=self._frontend.version,
            )

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Tokenize"):
            self._frontend.check_model(convert.model_of(request))
            prompt = convert.prompt(request, trust_chat_template=self._frontend.trust_chat_template)
            with self._frontend.tokenizing(convert.claimed_tenant(context.invocation_metadata() or ())):
                return convert.tokenize_response(await self._frontend.engine.tokenize(prompt))

    async def Detokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._call(request, context, "Detokenize"):
            self._frontend.check_model(convert.model_of(request))
            with self._frontend.tokenizing(convert.claimed_tenant(context.invocation_metadata() or ())):
                return convert.detokenize_response(await self._frontend.engine.detokenize(list(request.token_ids)))

    # What they share

    def _generation_call(self, request: Any, context: grpc.aio.ServicerContext, kind: RequestOutputKind) -> GenerationCall:
        self._frontend.check_model(convert.model_of(request))
        metadata = context.invocation_metadata() or ()
        return convert.generation_call(request, metadata, kind, trust_chat_template=self._frontend.trust_chat_template)


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Register the service."""
    add_service(convert.SERVICE, servicer, server)
