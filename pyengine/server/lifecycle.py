"""From bind to exit: the port is taken first, then the model is loaded, then a step is run, and only then is the server ready.

LOADING  --warm-up step-->  SERVING  --signal-->  DRAINING  --idle, or the timeout-->  STOPPED
                               \\--a step fails for good-->  FAILED
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from pyengine.errors import UnavailableError
from pyengine.inputs import TokensPrompt
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.server import vllm_grpc
from pyengine.server.address import LOOPBACK, PEER_ANSWER_SECONDS, PEER_IDLE_SECONDS, check_address, join_address
from pyengine.server.auth import ApiKeys
from pyengine.server.engine_client import EngineClient
from pyengine.server.flags import ServerArgs
from pyengine.server.frontend import Frontend, State
from pyengine.server.http.port import HttpPort
from pyengine.server.http.status import status_app
from pyengine.server.interceptor import ApiKeyInterceptor
from pyengine.server.request_record import RequestLog, RequestRecord
from pyengine.server.servicer import SERVICE_NAME, InferenceServicer, add_to_server
from pyengine.server.tls import TlsFiles
from pyengine.server.tracing import make_tracer
from pyengine.tenants import Tenant

logger = logging.getLogger(__name__)

_VLLM_SERVICES = (vllm_grpc.SERVICE_NAME,) if vllm_grpc.is_available() else ()
SERVICES = (SERVICE_NAME, *_VLLM_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
NO_KEYS = ApiKeys()
LOADER_THREAD = "load-model"
ENGINE_POLL_SECONDS = 1.0
#: For handlers to send their last status once the drain time is over.
STOP_GRACE_SECONDS = 1.0


class InferenceServer:
    """One engine, a gRPC port, and others that are asked for. `load` is to follow `bind`, and `close` everything.

    Args:
        args: what the user set.
        make_engine: loads the model; in a thread.
        version: of this program.
        keys: that calls must have.
        tenants: who shares the engine.

    Raises:
        ConfigError: the TLS files cannot be used, or spans not be sent.
    """

    def __init__(
        self,
        args: ServerArgs,
        make_engine: Callable[[], EngineClient],
        version: str,
        keys: ApiKeys = NO_KEYS,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        self.args = args
        self.port = 0  # set by bind
        self.failed = asyncio.Event()  # the engine is dead
        self._make_engine = make_engine
        self._engine: EngineClient | None = None
        self._stop_by = 0.0  # by time.monotonic, once it drains
        self._started = time.monotonic()
        self._health = health.aio.HealthServicer()
        self.frontend = Frontend(
            version=version,
            max_concurrent_requests=args.max_concurrent_requests,
            request_timeout=args.request_timeout,
            max_output_tokens=args.max_output_tokens,
            trust_chat_template=args.trust_request_chat_template,
            on_engine_dead=lambda error: self.failed.set(),
            tenants=tenants,
            observers=self._observers(args, version),
        )
        self._keys = keys
        self._tls: TlsFiles | None = None
        if args.ssl_certfile is not None and args.ssl_keyfile is not None:
            self._tls = TlsFiles(certificate=args.ssl_certfile, key=args.ssl_keyfile, client_ca=args.ssl_ca_certs)
        self.http_ports: dict[str, HttpPort] = {}  # by what they serve
        if args.http_port is not None:
            from pyengine.server.http.app import create_app  # brings FastAPI

            self._add_http_port(
                "http", create_app(self.frontend, max_body_bytes=args.max_message_bytes, keys=keys), args.http_port
            )
        if args.metrics_port is not None:
            self._add_http_port("metrics", status_app(self.frontend), args.metrics_port)
        interceptors = [ApiKeyInterceptor(keys)] if keys.are_needed else []
        self._server = grpc.aio.server(options=_channel_options(args), interceptors=interceptors)
        self._watcher: asyncio.Task[None] | None = None

    def _observers(self, args: ServerArgs, version: str) -> list[Callable[[RequestRecord], None]]:
        self._tracer = make_tracer(args.otlp_endpoint, version)
        observers: list[Callable[[RequestRecord], None]] = [] if self._tracer is None else [self._tracer]
        if args.enable_log_requests:
            observers.append(RequestLog(args.max_log_len))
        return observers

    def _add_http_port(self, name: str, app: ASGIApp, port: int) -> None:
        tls = {} if self._tls is None else self._tls.uvicorn_options(ask_clients=name != "metrics")
        self.http_ports[name] = HttpPort(app, self.args.host, port, tls)

    async def bind(self) -> None:
        """Take the ports, answer health checks with NOT_SERVING and all else with UNAVAILABLE.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        await self._set_health(serving=False)
        add_to_server(InferenceServicer(self.frontend), self._server)
        if vllm_grpc.is_available():
            from pyengine.server.vllm_grpc import servicer as vllm_servicer

            vllm_servicer.add_to_server(vllm_servicer.VllmEngineServicer(self.frontend), self._server)
        else:
            logger.info("%s is not served: smg-grpc-proto is not installed", vllm_grpc.SERVICE_NAME)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(SERVICES, self._server)
        check_address(self.args.host, self.args.port)
        try:
            address = join_address(self.args.host, self.args.port)
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {join_address(self.args.host, self.args.port)}: {error}") from None
        await self._server.start()
        for http_port in self.http_ports.values():
            await http_port.bind()
        logger.info("bound to %s; not ready until a step has run", self.address)
        for name, http_port in self.http_ports.items():
            logger.info("%s bound to %s", name, http_port.url)
        if self.args.host in LOOPBACK:
            logger.info("only this machine can connect; --host 0.0.0.0 listens on every interface")
        elif not self._keys.are_needed and self.args.ssl_ca_certs is None:
            logger.warning("whoever reaches this address can use the server: it asks for no credentials")

    @property
    def address(self) -> str:
        return join_address(self.args.host, self.port)

    async def load(self) -> None:
        """Build the engine, run one step, become ready.

        Raises:
            ConfigError, ModelLoadError: from the engine.
        """
        async with _phase("model loaded, in all"):
            engine = await _in_thread(self._make_engine)
        self._engine = engine
        engine.start()
        async with _phase("warm-up step run"):
            await self._warm_up(engine)
        self.frontend.serve(engine)
        await self._set_health(serving=True)
        self._watcher = asyncio.create_task(self._watch(engine))
        name = engine.config.model.served_model_name
        logger.info("ready with model %s in %.2f s", name, time.monotonic() - self._started)

    async def drain(self) -> None:
        """Refuse new calls, let those in flight finish for up to `shutdown_timeout` seconds, abort what is left."""
        self._stop_by = time.monotonic() + self.args.shutdown_timeout
        if self.frontend.state is State.SERVING:
            self.frontend.state = State.DRAINING
        await self._health.enter_graceful_shutdown()
        logger.info("draining: %d requests in flight", self.frontend.num_active)
        if not await self.frontend.wait_idle(self.args.shutdown_timeout):
            logger.warning("aborting %d requests after %g s", self.frontend.num_active, self.args.shutdown_timeout)
            await self.frontend.abort_active()
            await self.frontend.wait_idle(STOP_GRACE_SECONDS)
        elif not await self.frontend.wait_sent(max(0.0, self._stop_by - time.monotonic())):
            logger.warning("answers are not all sent after %g s", self.args.shutdown_timeout)

    async def fail(self) -> None:
        """The engine is dead: health flips, calls get INTERNAL from the engine, new ones UNAVAILABLE."""
        self.frontend.state = State.FAILED
        await self._health.enter_graceful_shutdown()
        logger.critical("the engine has failed; shutting down")
        await self.frontend.wait_idle(STOP_GRACE_SECONDS)

    async def close(self) -> None:
        """Close the port and the engine. Idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        # An HTTP answer may be in its connection's buffer still. (gRPC's are waited for by `drain`: its server would also wait
        # for streams that never end, say of health.)
        grace = max(STOP_GRACE_SECONDS, self._stop_by - time.monotonic())
        ports = [http_port.close(grace) for http_port in self.http_ports.values()]
        await asyncio.gather(self._stop_grpc(), *ports)
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)
        engine, self._engine = self._engine, None
        if engine is not None:
            stats = engine.stats()
            await asyncio.to_thread(engine.shutdown)
            logger.info("stopped; last stats: %s", " ".join(f"{key}={value}" for key, value in stats.items()))

    async def _stop_grpc(self) -> None:
        # After its grace gRPC cancels calls, but then waits for each connection's last write, which some client may never read.
        stopping = asyncio.create_task(self._server.stop(STOP_GRACE_SECONDS))
        await asyncio.wait([stopping], timeout=2 * STOP_GRACE_SECONDS)
        if stopping.done():
            stopping.result()
        else:
            logger.warning("clients of the gRPC port take nothing of what is sent to them; their connections are dropped")

    async def _warm_up(self, engine: EngineClient) -> None:
        """A prefill and a decode step, so that readiness means that the model runs."""
        tokens = min(2, engine.config.model.max_model_len - 1)
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        async for _ in engine.generate(TokensPrompt([0]), params, "warm-up"):
            pass
        await engine.reset_metrics()

    async def _watch(self, engine: EngineClient) -> None:
        """Notice a dead engine when no request is there to notice it, and one that has work and makes no step."""
        is_stalled = False
        while not engine.errored:
            if (engine.stalled_for() > self.args.watchdog_timeout) != is_stalled:
                self.frontend.is_stalled = is_stalled = not is_stalled
                if is_stalled:
                    logger.error("no step for %.0f s, though requests wait; at\n%s", engine.stalled_for(), engine.where())
                else:
                    logger.info("steps are made again")
                await self._set_health(serving=not is_stalled)
            await asyncio.sleep(ENGINE_POLL_SECONDS)
        self.failed.set()

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in (health.OVERALL_HEALTH, *SERVICES):
            await self._health.set(service, status)


async def run(server: InferenceServer, announce: Callable[[InferenceServer], None], stop_now: Callable[[int], None]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. A second signal calls `stop_now` with its number.

    Raises:
        PyEngineError: if the server cannot start.
    """
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            stop_now(number)
        logger.info("%s: shutting down; a second signal stops at once", signal.Signals(number).name)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    waiting = [asyncio.create_task(event.wait()) for event in (stopping, server.failed)]
    try:
        await server.bind()
        loading = asyncio.create_task(server.load())
        await asyncio.wait([loading, *waiting], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return 0
        loading.result()
        announce(server)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if server.failed.is_set():
            await server.fail()
            return 1
        await server.drain()
        return 0
    finally:
        for task in waiting:
            task.cancel()
        await server.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _channel_options(args: ServerArgs) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would share its connections at random
        ("grpc.max_receive_message_length", args.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # an answer that has been computed is sent, however large
        # Clients and gateways may ping as often as they like, also between calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # A client that vanished without a word is found out, and its requests stopped, in 80 s; on HTTP see `listen`.
        ("grpc.keepalive_time_ms", PEER_IDLE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", PEER_ANSWER_SECONDS * 1000),
    ]


@asynccontextmanager
async def _phase(name: str) -> AsyncIterator[None]:
    start = time.monotonic()
    yield
    logger.info("start-up: %s, %.2f s", name, time.monotonic() - start)


async def _in_thread(make_engine: Callable[[], EngineClient]) -> EngineClient:
    """Run `make_engine` in a daemon thread: loading cannot be interrupted, and must not hold up an exit.

    An engine that is done when nobody waits for it any more is shut down.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[EngineClient] = loop.create_future()

    def settle(engine: EngineClient | None, error: BaseException | None) -> None:
        if not future.cancelled():
            if engine is not None:
                future.set_result(engine)
            elif error is not None:
                future.set_exception(error)
        elif engine is not None:
            engine.shutdown()

    def call() -> None:
        engine, failure = None, None
        try:
            engine = make_engine()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, engine, failure)
        except RuntimeError:  # the loop is closed: the server has gone
            if engine is not None:
                engine.shutdown()

    threading.Thread(target=call, name=LOADER_THREAD, daemon=True).start()
    return await future
