"""The HTTP API's routes."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pyengine.errors import InvalidRequestError, PyEngineError, RequestCancelledError
from pyengine.inputs import Prompt, TextPrompt
from pyengine.server import headers
from pyengine.server.auth import ApiKeys
from pyengine.server.frontend import Frontend
from pyengine.server.http.answers import Answer
from pyengine.server.http.chat import chat_completion, chat_prompt
from pyengine.server.http.completions import completion
from pyengine.server.http.encoding import json_bytes
from pyengine.server.http.errors import error_object, error_response, in_request_terms
from pyengine.server.http.keys import ApiKeyMiddleware
from pyengine.server.http.page import page_routes
from pyengine.server.http.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StrictModel,
    TokenizeRequest,
)
from pyengine.server.http.status import status_routes

Body = TypeVar("Body", bound=StrictModel)

BODY_SECONDS = 60.0  # that a client has to send its body


def create_app(frontend: Frontend, *, max_body_bytes: int, keys: ApiKeys) -> FastAPI:
    """OpenAI's API and vLLM's additions over a frontend.

    Args:
        frontend: shared with the gRPC port.
        max_body_bytes: larger bodies are refused.
        keys: that clients must have.
    """
    app = FastAPI(title="pyengine", version=frontend.version, docs_url=None, redoc_url=None)
    app.router.routes.extend([*status_routes(frontend), *page_routes()])
    app.add_middleware(ApiKeyMiddleware, keys=keys)
    started = int(time.time())

    @app.exception_handler(PyEngineError)
    async def on_error(request: Request, error: PyEngineError) -> Response:
        return error_response(error, {})

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        body = error_object(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return Response(json_bytes(body), error.status_code, error.headers, "application/json")

    def model_card() -> dict[str, Any]:
        config = frontend.engine.config.model
        own = {"id": config.served_model_name, "object": "model", "created": started, "owned_by": "pyengine"}
        return own | {"root": config.model, "parent": None, "max_model_len": config.max_model_len, "permission": []}

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        with frontend.call():
            body = await _read(request, CompletionRequest, max_body_bytes)
            return Answer(frontend, completion(body, request.headers, frontend), stream=bool(body.stream))

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        with frontend.call():
            body = await _read(request, ChatCompletionRequest, max_body_bytes)
            return Answer(frontend, chat_completion(body, request.headers, frontend), stream=bool(body.stream))

    @app.get("/v1/models")
    async def models() -> Response:
        with frontend.call():
            return _json({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        with frontend.call():
            frontend.check_model(name)
            return _json(model_card())

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        with frontend.call():
            body = await _read(request, TokenizeRequest, max_body_bytes)
            frontend.check_model(body.model)
            body.check_supported()
            with frontend.tokenizing(headers.tenant(request.headers)):
                tokens = await frontend.engine.tokenize(_prompt_of(body, frontend))
            limit = frontend.engine.config.model.max_model_len
            return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        with frontend.call():
            body = await _read(request, DetokenizeRequest, max_body_bytes)
            frontend.check_model(body.model)
            with frontend.tokenizing(headers.tenant(request.headers)):
                try:
                    return _json({"prompt": await frontend.engine.detokenize(body.tokens)})
                except InvalidRequestError as error:
                    raise InvalidRequestError("tokens", error.message) from error

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": frontend.version})

    return app


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")


def _body_schema(model: type[StrictModel]) -> dict[str, Any]:
    """For /openapi.json: bodies are parsed here and not by FastAPI, whose errors are not OpenAI's."""
    schema = model.model_json_schema()
    schema.pop("additionalProperties", None)  # true is what its absence says
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, model: type[Body], limit: int) -> Body:
    """The body.

    Raises:
        HTTPException: it is not said to be JSON, or it is too large or too slow in coming, and was not read to its end.
        RequestCancelledError: the client went away while it sent it.
        InvalidRequestError: naming the field.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A web page may send text/plain to any server that its visitor reaches, keyless ones on this machine included.
        raise HTTPException(415, f"the body must be sent with Content-Type: application/json, got {media_type[:100] or 'none'}")
    try:
        data = await asyncio.wait_for(_received(request, limit), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise RequestCancelledError("the client went away") from None
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise in_request_terms(error) from None


async def _received(request: Request, limit: int) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise HTTPException(413, f"the body must be at most {limit} bytes")
    return bytes(data)


def _prompt_of(body: TokenizeRequest, frontend: Frontend) -> Prompt:
    if body.prompt is not None and body.messages is None:
        return TextPrompt(body.prompt, body.add_special_tokens)
    if body.messages is None or body.prompt is not None:
        raise InvalidRequestError("prompt", "exactly one of prompt and messages must be set")
    return chat_prompt(body.messages, body, trust_chat_template=frontend.trust_chat_template)
