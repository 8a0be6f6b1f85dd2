"""Every error that the engine raises on purpose, and the status each one becomes.

A request that fails, fails alone, with one of these. The two tables at the end are the only place where an error meets a
gRPC or HTTP status; servers look statuses up here and never map an exception themselves.
"""

from __future__ import annotations


class PyEngineError(Exception):
    """Base class. Anything else that reaches a server is a bug and becomes INTERNAL / 500."""

    grpc_status: str = "INTERNAL"
    http_status: int = 500


class InvalidRequestError(PyEngineError, ValueError):
    """The request itself is wrong. `field` names the offending parameter, as the client spelled it."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class UnsupportedError(PyEngineError):
    """A legal request for something that this build or model cannot do. `field` names it."""

    grpc_status = "UNIMPLEMENTED"
    http_status = 501

    def __init__(self, field: str, message: str = "is not supported") -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class UnauthenticatedError(PyEngineError):
    """The call has no API key that the server accepts."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class NotFoundError(PyEngineError):
    """An unknown model or request id."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class DeadlineExceededError(PyEngineError):
    """The request's own deadline passed before it finished."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class OverloadedError(PyEngineError):
    """A bounded queue is full; the client may retry after `retry_after` seconds."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class RequestCancelledError(PyEngineError):
    """The client, or an explicit Abort, cancelled the request."""

    grpc_status = "CANCELLED"
    http_status = 499


class UnavailableError(PyEngineError):
    """The server is starting, draining or stopped."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class OutOfRangeError(PyEngineError):
    """A stream cannot be resumed from where the client asks; it must begin from the current state."""

    grpc_status = "OUT_OF_RANGE"
    http_status = 400


class DataLostError(PyEngineError):
    """The reader of a stream was too slow, and what it has not read is gone; it must begin from the current state."""

    grpc_status = "DATA_LOSS"
    http_status = 500


class EngineDeadError(PyEngineError):
    """A step failed in a way that the engine cannot continue from; every request is told so."""

    grpc_status = "INTERNAL"
    http_status = 500


class ConfigError(PyEngineError, ValueError):
    """A flag or an LLM argument is wrong, or two of them contradict each other. Raised at start only."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class ModelLoadError(PyEngineError):
    """A checkpoint cannot be loaded. The message names the file, and the tensor or scheme where there is one."""


ALL_ERRORS: tuple[type[PyEngineError], ...] = (
    InvalidRequestError,
    UnsupportedError,
    UnauthenticatedError,
    NotFoundError,
    DeadlineExceededError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    OutOfRangeError,
    DataLostError,
    EngineDeadError,
    ConfigError,
    ModelLoadError,
)
