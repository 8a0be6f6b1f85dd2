"""Errors as OpenAI's error objects. Statuses are those of `pyengine.errors`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from pyengine.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PyEngineError,
    UnauthenticatedError,
    UnsupportedError,
)
from pyengine.server.http.encoding import json_bytes

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    501: "unsupported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
MAX_MESSAGE = 1000


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 3] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception, names: Mapping[str, str]) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, error object and headers.

    What is no PyEngineError is a defect: its traceback is logged, and the client is told no more than that.

    Args:
        error: what went wrong.
        names: the engine's names of what the request calls otherwise.
    """
    if not isinstance(error, PyEngineError):
        logger.error("a request failed", exc_info=error)
        return 500, error_object(500, "internal error; the server's log has the details"), {}
    status, headers, code = error.http_status, {}, None
    param, message = None, str(error)
    if isinstance(error, InvalidRequestError | UnsupportedError):
        param = names.get(error.field, error.field)
        message = f"{param}: {error.message}"
    if isinstance(error, NotFoundError):
        param, code = "model", "model_not_found"
    if isinstance(error, OverloadedError):
        code = "rate_limit_exceeded"
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if isinstance(error, UnauthenticatedError):
        code = "invalid_api_key"
        headers["www-authenticate"] = "Bearer"
    if status in (501, 504):
        # OpenAI's clients would try again after any 5xx; here they would meet the same limit.
        headers["x-should-retry"] = "false"
    if status == 500:
        logger.error("a request failed: %s", error)
    return status, error_object(status, message, param, code), headers


def error_response(error: Exception, names: Mapping[str, str]) -> Response:
    """The answer to a request that failed."""
    status, body, headers = describe(error, names)
    return Response(json_bytes(body), status, headers, "application/json")


def in_request_terms(error: ValidationError) -> InvalidRequestError:
    """What Pydantic has against a body, as one error about one field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        return InvalidRequestError("body", first["msg"])
    field = str(first["loc"][0])
    same = [e["msg"] for e in error.errors(include_url=False, include_input=False) if e["loc"] and e["loc"][0] == field]
    return InvalidRequestError(field, "; ".join(dict.fromkeys(same)))
