"""What a request may say in headers (gRPC metadata) where its own fields leave it unsaid: id, priority, cache salt, tenant."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from pyengine.errors import InvalidRequestError

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_INT32 = (-(2**31), 2**31 - 1)


def request_id(field: str | None, headers: Mapping[str, str]) -> str:
    """The request's id; a new one where the client gives none.

    Raises:
        InvalidRequestError: naming the field or the header.
    """
    name, value = ("request_id", field) if field is not None else ("x-request-id", headers.get("x-request-id"))
    if value is None:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidRequestError(name, "must be 1 to 128 printable ASCII characters without spaces")
    return value


def priority(field: int | None, headers: Mapping[str, str]) -> int:
    """The request's priority, 0 by default.

    Raises:
        InvalidRequestError: naming the header.
    """
    if field is not None:
        return field
    value = headers.get("x-priority")
    if value is None:
        return 0
    try:
        number = int(value)
    except ValueError:
        raise InvalidRequestError("x-priority", f"must be an integer, got {value!r}") from None
    if not _INT32[0] <= number <= _INT32[1]:
        raise InvalidRequestError("x-priority", f"must be in [{_INT32[0]}, {_INT32[1]}], got {number}")
    return number


def cache_salt(field: str | None, headers: Mapping[str, str]) -> str | None:
    """The request's cache salt, none by default.

    Raises:
        InvalidRequestError: naming the field or the header.
    """
    name, value = ("cache_salt", field) if field is not None else ("x-cache-salt", headers.get("x-cache-salt"))
    if value == "":
        raise InvalidRequestError(name, "must not be empty")
    return value


def trace_context(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The trace that the request is part of, as W3C's headers say."""
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def tenant(headers: Mapping[str, str]) -> str | None:
    """Whom the request claims to be accounted to; only a trusted key is believed."""
    return headers.get("x-tenant") or None
