"""API keys on the gRPC port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pyengine.errors import UnauthenticatedError
from pyengine.server.auth import CALLER, ApiKeys
from pyengine.server.status import status_of

#: Probes and load balancers have no keys.
_OPEN = "/grpc.health.v1.Health/"


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without an accepted key in their metadata before their request is read; notes whose key the others have."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if not handler_call_details.method.startswith(_OPEN):
            values = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
            try:
                CALLER.set(self._keys.check(values[0] if values else None))
            except UnauthenticatedError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: UnauthenticatedError) -> Any:
    code, details, trailers = status_of(error)

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, details, trailers)

    return grpc.unary_unary_rpc_method_handler(refuse)
