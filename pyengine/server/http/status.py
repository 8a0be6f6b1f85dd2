"""Health, readiness and metrics: what probes and Prometheus ask for. On the HTTP port, and on --metrics-port by themselves."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pyengine.errors import UnavailableError
from pyengine.server.frontend import Frontend, State
from pyengine.server.metrics import Metrics


def status_routes(frontend: Frontend) -> list[Route]:
    """/health, /ready and /metrics."""
    metrics = Metrics(frontend)

    async def health(request: Request) -> Response:
        """200 while the engine lives, also while it drains; a client may wait for it to learn that the model is loaded."""
        return _answer(frontend, frontend.state in (State.SERVING, State.DRAINING))

    async def ready(request: Request) -> Response:
        """200 while new requests are taken."""
        return _answer(frontend, frontend.state is State.SERVING)

    async def scrape(request: Request) -> Response:
        try:
            content, content_type = metrics.scrape(request.headers.get("accept", ""))
        except UnavailableError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return Response(content, headers={"content-type": content_type})

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", scrape)]


def _answer(frontend: Frontend, is_well: bool) -> Response:
    if is_well and frontend.is_stalled:
        return PlainTextResponse("no step is made, though requests wait\n", 503)
    return PlainTextResponse(f"{frontend.state.value}\n", 200 if is_well else 503)


def status_app(frontend: Frontend) -> Starlette:
    """For a port that serves nothing else."""
    return Starlette(routes=status_routes(frontend))
