"""From bind to exit: readiness, health, reflection, draining, and errors at start."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable

import grpc
import pytest
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from running_server import RunningServer, wait_until
from server_process import FAKE, REAL, ServerProcess

from pyengine.errors import EngineDeadError, UnavailableError
from pyengine.server import lifecycle
from pyengine.server.flags import ServerArgs
from pyengine.server.lifecycle import InferenceServer
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = [
    *("", "pyengine.v1.Inference", "vllm.grpc.engine.VllmEngine"),
    *("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
]


def health_of(channel: grpc.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status


def test_rule_16_ready_only_after_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """While the model loads and until its first step is done, health says NOT_SERVING and calls get UNAVAILABLE."""
    engine, may_load = FakeEngine(), threading.Event()
    engine.hold_warm_up = True

    def make_engine() -> FakeEngine:
        may_load.wait()
        return engine

    async def scenario() -> None:
        server = InferenceServer(ServerArgs(port=0), make_engine, version="1")
        await server.bind()
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def statuses() -> list[int]:
                return [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in SERVICES]

            async def is_refused() -> bool:
                call = rpc.InferenceStub(channel).Complete(pb.GenerateRequest(text="a"))
                return await call.code() is grpc.StatusCode.UNAVAILABLE and "loading" in await call.details()

            assert await statuses() == [NOT_SERVING] * len(SERVICES)
            assert await is_refused()
            loading = asyncio.create_task(server.load())
            may_load.set()
            while not engine.running:  # the warm-up's step
                await asyncio.sleep(0.01)
            warm_up = engine.running["warm-up"]
            assert await statuses() == [NOT_SERVING] * len(SERVICES)
            assert await is_refused()
            engine.release()
            await loading
            assert warm_up.num_pulled == 1
            assert await statuses() == [SERVING] * len(SERVICES)
        await server.close()

    with caplog.at_level(logging.INFO, logger="pyengine.server"):
        asyncio.run(scenario())
    for phase in (r"start-up: model loaded, in all, \d", r"start-up: warm-up step run, \d", r"ready with model fake in \d"):
        assert re.search(phase, caplog.text), phase


def test_health_of_each_service(shared_server: RunningServer) -> None:
    assert [health_of(shared_server.channel, service) for service in SERVICES] == [SERVING] * len(SERVICES)
    with pytest.raises(grpc.RpcError) as error:
        health_of(shared_server.channel, "nobody.Knows")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_unknown_services_and_methods(shared_server: RunningServer) -> None:
    for path in ("/sglang.grpc.scheduler.SglangScheduler/HealthCheck", "/pyengine.v1.Inference/Embed"):
        with pytest.raises(grpc.RpcError) as error:
            shared_server.channel.unary_unary(path)(b"", timeout=60)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_describes_the_service(shared_server: RunningServer) -> None:
    database = ProtoReflectionDescriptorDatabase(shared_server.channel)
    assert set(database.get_services()) == set(SERVICES[1:])
    file = database.FindFileContainingSymbol("pyengine.v1.Inference")
    assert [method.name for method in file.service[0].method] == [
        "Generate",
        "Complete",
        "Abort",
        "GetModelInfo",
        "Tokenize",
        "Detokenize",
    ]


def test_keepalive_pings_are_no_offence(shared_server: RunningServer) -> None:
    """Fifty HTTP/2 pings in a row on a connection without calls: by gRPC's own limits the server would close it."""
    ping, goaway, ack = 6, 7, 1

    def frame(kind: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload

    host, port = shared_server.target.split(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as answers:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4))
        answered = 0
        for i in range(50):
            connection.sendall(frame(ping, i.to_bytes(8, "big")))
            while answered <= i:
                header = answers.read(9)
                payload = answers.read(int.from_bytes(header[:3], "big"))
                assert header[3] != goaway, payload
                answered += header[3] == ping and header[4] == ack and payload == i.to_bytes(8, "big")
        assert answered == 50


def test_rule_20_drain(start_server: Callable[..., RunningServer]) -> None:
    """Health flips, new calls are refused, the running ones finish."""
    server = start_server()
    server.engine.hold = 1
    stream = server.stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=3)), timeout=60)
    unary = server.stub.Complete.future(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=3)), timeout=60)
    next(stream)
    wait_until(lambda: server.server.frontend.num_active == 2)
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
    wait_until(lambda: health_of(server.channel) == NOT_SERVING)
    for call in (
        server.stub.Complete.future(pb.GenerateRequest(text="a"), timeout=60),
        server.stub.Tokenize.future(pb.TokenizeRequest(text="a"), timeout=60),
        server.stub.GetModelInfo.future(pb.GetModelInfoRequest(), timeout=60),
    ):
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in call.details()
    assert not server.stub.Abort(pb.AbortRequest(request_id="nobody"), timeout=60).aborted  # still answered
    assert not draining.done()
    server.loop.call_soon_threadsafe(server.engine.release)
    assert [list(message.token_ids) for message in stream] == [[11], [12]]
    assert list(unary.result().choices[0].token_ids) == [10, 11, 12]
    draining.result(timeout=60)
    assert server.engine.num_aborted == 0


def test_rule_20_drain_ends_with_the_timeout(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(shutdown_timeout=0.2)
    server.engine.hold = 0
    calls = [
        server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60),
        server.stub.Complete.future(pb.GenerateRequest(text="a"), timeout=60),
    ]
    wait_until(lambda: len(server.engine.running) == 2)
    server.run(server.server.drain())
    for call in calls:
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopped before the request finished" in call.details()
    assert not server.engine.running


def test_rule_6_a_stalled_engine_is_not_serving(
    start_server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "ENGINE_POLL_SECONDS", 0.01)
    server = start_server(watchdog_timeout=10.0)
    with caplog.at_level(logging.INFO, logger="pyengine.server"):
        server.engine.stalled = 11.0
        wait_until(lambda: health_of(server.channel, SERVICES[1]) == NOT_SERVING)
        server.engine.stalled = 0.0
        wait_until(lambda: health_of(server.channel, SERVICES[1]) == SERVING)
    assert any("no step for 11 s" in message and "in the fake step" in message for message in caplog.messages)


def test_a_dead_engine_is_noticed_without_requests(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "ENGINE_POLL_SECONDS", 0.01)
    server = start_server()
    server.engine.errored = True
    wait_until(server.server.failed.is_set)


def test_a_dead_engine_fails_the_server(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    server.engine.script = lambda request: iter([EngineDeadError("a step failed: out of luck")])
    call = server.stub.Complete.future(pb.GenerateRequest(text="a"), timeout=60)
    assert call.code() is grpc.StatusCode.INTERNAL
    assert "out of luck" in call.details()
    wait_until(server.server.failed.is_set)
    server.run(server.server.fail())
    assert health_of(server.channel) == NOT_SERVING
    call = server.stub.Complete.future(pb.GenerateRequest(text="a"), timeout=60)
    assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def bind() -> None:
            server = InferenceServer(ServerArgs(port=port), FakeEngine, version="1")
            try:
                await server.bind()
            finally:
                await server.close()

        with pytest.raises(UnavailableError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            asyncio.run(bind())


def test_two_servers_cannot_share_a_port(server: RunningServer) -> None:
    async def bind() -> None:
        second = InferenceServer(ServerArgs(port=server.server.port), FakeEngine, version="1")
        try:
            await second.bind()
        finally:
            await second.close()

    with pytest.raises(UnavailableError, match="Address already in use"):
        asyncio.run(bind())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rule_20_signal_drains_and_exits_0(number: signal.Signals) -> None:
    with ServerProcess(*FAKE, "slow", "--port", "0") as server:
        target = server.wait_ready()
        with grpc.insecure_channel(target) as channel:
            call = rpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=20)), timeout=60
            )
            next(call)
            server.process.send_signal(number)
            server.wait_for("draining: 1 requests in flight")
            late = rpc.InferenceStub(channel).Complete.future(pb.GenerateRequest(text="a"), timeout=60)
            assert late.code() is grpc.StatusCode.UNAVAILABLE
            assert sum(len(message.token_ids) for message in call) == 19
        assert server.exit_code() == 0
        assert " num_blocks=8 num_free_blocks=8 " in server.wait_for("last stats: ").string
        assert "Traceback" not in server.log


def test_second_signal_stops_at_once() -> None:
    with ServerProcess(*FAKE, "slow", "--port", "0", "--shutdown-timeout", "600") as server:
        target = server.wait_ready()
        with grpc.insecure_channel(target) as channel:
            call = rpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=-1)), timeout=600
            )
            next(call)
            server.process.terminate()
            server.wait_for("draining: 1 requests in flight")
            server.process.terminate()
            assert server.exit_code() == 128 + signal.SIGTERM


def test_a_signal_while_loading_ends_it() -> None:
    with ServerProcess(*FAKE, "loading", "--port", "0") as server:
        server.wait_for("not ready until a step has run")
        server.process.terminate()
        assert server.exit_code() == 0
        assert "Traceback" not in server.log


def test_exit_1_when_the_engine_dies() -> None:
    with ServerProcess(*FAKE, "dies", "--port", "0") as server:
        with grpc.insecure_channel(server.wait_ready()) as channel:
            call = rpc.InferenceStub(channel).Complete.future(pb.GenerateRequest(text="a"), timeout=60)
            assert call.code() is grpc.StatusCode.INTERNAL
        assert server.exit_code() == 1


def test_rule_17_a_broken_model_is_one_line_and_exit_1() -> None:
    with ServerProcess(*FAKE, "broken", "--port", "0", "--log-level", "error") as server:
        assert server.exit_code() == 1
        assert server.lines == ["error: model.safetensors: tensor lm_head.weight is missing"]


def test_rule_17_wrong_flags_are_one_line() -> None:
    cases = {
        ("--block-size", "12"): (1, "error: --block-size: must be a power of two, 8 or more, got 12"),
        ("--port", "70000"): (1, "error: --port: must be in [0, 65535], got 70000"),
        ("--no-such-flag",): (2, "python -m pyengine.server: error: unrecognized arguments: --no-such-flag"),
    }
    for arguments, expected in cases.items():
        with ServerProcess(*REAL, *arguments) as server:
            assert (server.exit_code(), server.log) == expected


def test_says_that_only_this_machine_can_connect() -> None:
    with ServerProcess(*FAKE, "ok", "--port", "0") as server:
        target = server.wait_ready()
        assert target.startswith("127.0.0.1:")
        assert not target.endswith(":0")
        assert "only this machine can connect" in server.log
