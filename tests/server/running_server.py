"""A server on a real socket, with its event loop in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pyengine.server.auth import ApiKeys
from pyengine.server.flags import ServerArgs
from pyengine.server.lifecycle import NO_KEYS, InferenceServer
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc
from pyengine.tenants import Tenant


class RunningServer:
    """A served engine. `run` runs a coroutine on the server's loop."""

    def __init__(self, engine: Any, keys: ApiKeys = NO_KEYS, tenants: Sequence[Tenant] = (), **args: Any) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.run(self._start(ServerArgs(port=0, **args), keys, tenants))
        self.target = self.server.address
        self.channel = grpc.insecure_channel(self.target)
        self.stub = rpc.InferenceStub(self.channel)

    @property
    def base_url(self) -> str:
        """Of the HTTP port."""
        return self.server.http_ports["http"].url

    async def _start(self, args: ServerArgs, keys: ApiKeys, tenants: Sequence[Tenant]) -> InferenceServer:
        server = InferenceServer(args, lambda: self.engine, "1.2.3", keys, tenants)
        await server.bind()
        await server.load()
        return server

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=60)

    def close(self) -> None:
        self.channel.close()
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=60)
        self.loop.close()

    def works(self) -> bool:
        """Whether the next ordinary request is served by a FakeEngine."""
        self.engine.hold = None
        request = pb.GenerateRequest(text="next", sampling=pb.SamplingParams(max_tokens=3))
        return self.stub.Complete(request, timeout=60).choices[0].token_ids == [10, 11, 12]


def post(
    server: RunningServer, headers: dict[str, str], path: str = "/v1/completions", **body: Any
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, object and headers of a completion of "a", or of another body."""
    data = json.dumps(({"prompt": "a", "max_tokens": 2} if path == "/v1/completions" else {}) | body).encode()
    request = urllib.request.Request(server.base_url + path, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response), dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds; the test's own timeout is the limit."""
    while not condition():
        time.sleep(0.005)
