"""Errors to gRPC statuses: the one place where a call ends with anything but OK."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pyengine.errors import OverloadedError, PyEngineError

logger = logging.getLogger(__name__)

#: Details travel in a header, and peers refuse headers above 8 KiB; a character may become 12 there.
MAX_DETAILS = 500
MAX_FIELD = 120


def status_of(error: PyEngineError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """The status code, the details and the trailing metadata that an error of the engine becomes."""
    details = str(error)
    if len(details) > MAX_DETAILS:
        details = details[: MAX_DETAILS - 3] + "..."
    trailers: list[tuple[str, str]] = []
    field = getattr(error, "field", None)
    if field is not None:
        trailers.append(("field", field.encode("ascii", "backslashreplace").decode()[:MAX_FIELD]))
    if isinstance(error, OverloadedError):
        trailers.append(("grpc-retry-pushback-ms", str(int(error.retry_after * 1000))))
    return grpc.StatusCode[error.grpc_status], details, tuple(trailers)


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext, method: str) -> AsyncIterator[None]:
    """Ends the call with the right status if the body raises.

    Cancellation passes through. What is no PyEngineError is a defect: its traceback is logged, and the client is told no more
    than that.
    """
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except grpc.aio.InternalError as error:
        # The call is over for gRPC already: the client went away.
        logger.warning("%s: the response could not be sent: %s", method, error)
        raise
    except PyEngineError as error:
        code, details, trailers = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            logger.error("%s failed: %s", method, error)
        await context.abort(code, details, trailers)
    except Exception:
        logger.exception("%s failed", method)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
