"""`python serve_fake.py MODE [server flags]`: the server's own `main`, over a fake engine that MODE describes.

ok: nothing special; slow: 50 ms a token; dies: the first request kills the engine; broken: the model does not load;
loading: it loads for ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

from fake_engine import FakeEngine, FakeRequest, count_up

from pyengine.config import EngineArgs
from pyengine.errors import EngineDeadError, ModelLoadError
from pyengine.outputs import RequestOutput
from pyengine.server import __main__ as server


def dies(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    return count_up(request) if request.request_id == "warm-up" else iter([EngineDeadError("a step failed: out of luck")])


def factory(mode: str) -> Callable[[EngineArgs], Callable[[], FakeEngine]]:
    def make() -> FakeEngine:
        if mode == "broken":
            raise ModelLoadError("model.safetensors: tensor lm_head.weight is missing")
        if mode == "loading":
            threading.Event().wait()
        engine = FakeEngine(dies if mode == "dies" else count_up)
        engine.delay = 0.05 if mode == "slow" else 0.0
        return engine

    return lambda args: make


if __name__ == "__main__":
    server._engine_factory = factory(sys.argv[1])  # type: ignore[assignment]
    sys.exit(server.main(sys.argv[2:]))
