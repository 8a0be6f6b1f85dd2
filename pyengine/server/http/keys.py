"""API keys on the HTTP port."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.errors import UnauthenticatedError
from pyengine.server.auth import CALLER, ApiKeys
from pyengine.server.http.errors import error_response
from pyengine.server.http.page import FILES as PAGE_FILES

#: Probes and Prometheus have no keys, and learn nothing about anybody's requests. The page asks its user for one.
_OPEN = ("/health", "/ready", "/metrics", *PAGE_FILES)


class ApiKeyMiddleware:
    """Ends requests without an accepted key before their body is read; notes whose key the others have."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            try:
                CALLER.set(self._keys.check(Headers(scope=scope).get("authorization")))
            except UnauthenticatedError as error:
                await error_response(error, {})(scope, receive, send)
                return
        await self._app(scope, receive, send)
