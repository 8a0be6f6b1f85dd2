"""An ASGI application on a port of its own, in the server's event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pyengine.server.address import join_address, listen


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are this program's own to handle: gRPC drains with HTTP."""
        yield


class HttpPort:
    """`bind`, then `close`.

    Args:
        app: what answers.
        host: address to listen on.
        port: 0 for a free one.
        tls: arguments of uvicorn.Config; none: plain text.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, tls: Mapping[str, Any]) -> None:
        self.port = port  # the real one after bind
        self._host = host
        self._scheme = "https" if tls else "http"
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                **tls,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return join_address(self._host, self.port)

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.address}"

    async def bind(self) -> None:
        """Listen, and answer from now on.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        listener = listen(self._host, self.port)
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        while not self._uvicorn.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)

    async def close(self, grace: float) -> None:
        """Let go of the port, and of each connection when it has its answer or `grace` seconds are over. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            self._uvicorn.config.timeout_graceful_shutdown = math.ceil(grace)
            self._uvicorn.should_exit = True
            await task
