"""Clients that do not read, or slowly, and what they cost the server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest
from fake_engine import FakeEngine, FakeRequest, count_up
from running_server import RunningServer, wait_until

from pyengine.outputs import RequestOutput
from pyengine.server import address
from pyengine.server.lifecycle import STOP_GRACE_SECONDS
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc


def large(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    """64 KiB an output."""
    for output in count_up(request):
        assert isinstance(output, RequestOutput)
        output.outputs[0].text = "x" * 2**16
        yield output


@contextmanager
def client_that_does_not_read(server: RunningServer) -> Iterator[socket.socket]:
    """Its stream has begun. Leaving closes its connection."""
    with socket.socket() as client:
        client.settimeout(60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.server.http_ports["http"].address.split(":")
        client.connect((host, int(port)))
        body = json.dumps({"prompt": "a", "max_tokens": 250, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        wait_until(lambda: bool(server.engine.running))
        yield client


def is_idle(server: RunningServer) -> bool:
    return not server.engine.running and server.server.frontend.num_active == 0


def test_slow_readers_hold_their_streams_back(start_server: Callable[..., RunningServer]) -> None:
    """A client that does not read stops its own stream, so that nothing piles up for it; and its end is noticed."""
    server = start_server(FakeEngine(large), http_port=0)
    with client_that_does_not_read(server):
        (request,) = server.engine.running.values()
        seen = -1
        while seen != request.num_pulled:  # until it stands still
            seen = request.num_pulled
            server.run(asyncio.sleep(0.3))
        assert 0 < seen < 250
    wait_until(lambda: is_idle(server))


def test_request_timeout_of_clients_that_do_not_read(
    start_server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Their requests end though an output is there that cannot be sent. Should they read after all, they are told so."""
    server = start_server(FakeEngine(large), http_port=0, request_timeout=0.5, enable_log_requests=True)
    with caplog.at_level(logging.INFO, logger="pyengine.server"), client_that_does_not_read(server) as client:
        wait_until(lambda: is_idle(server))
        assert server.engine.num_aborted == 1
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(2**16)
        assert b'"type":"timeout_error"' in received[-1000:]
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=250))
        messages = server.stub.Generate(request, timeout=60)
        wait_until(lambda: server.engine.num_aborted == 2 and is_idle(server))
        with pytest.raises(grpc.RpcError) as error:
            list(messages)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert sum("outcome=DeadlineExceededError" in message for message in caplog.messages) == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the platform's TCP has no such options")
def test_peers_that_vanish_are_noticed_in_80_seconds(shared_http_server: RunningServer) -> None:
    """Whether nothing is sent or something is on its way."""
    http = shared_http_server.server.http_ports["http"]
    host, port = http.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        (connection,) = (c for c in http._uvicorn.server_state.connections if c.client == client.getsockname())
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        options = [accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert options == [60, 10, 2, 80_000]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the platform's TCP has no such options")
def test_clients_that_read_nothing_for_long_are_given_up(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "PEER_IDLE_SECONDS", 1)
    monkeypatch.setattr(address, "PEER_ANSWER_SECONDS", 2)
    server = start_server(FakeEngine(large), http_port=0)
    with client_that_does_not_read(server):
        wait_until(lambda: is_idle(server))


class Gate:
    """A proxy in front of a port, on the server's loop. While it is shut, nothing passes that the server sends."""

    def __init__(self, server: RunningServer, address: str) -> None:
        self._server, self._address = server, address
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._listener = server.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.sockets[0].getsockname())

    def shut(self) -> None:
        self._server.loop.call_soon_threadsafe(self._is_open.clear)

    def open(self) -> None:
        self._server.loop.call_soon_threadsafe(self._is_open.set)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that what the server sends stays with it
        host, port = self._address.split(":")
        connection.connect((host, int(port)))
        connection.setblocking(False)
        from_server, to_server = await asyncio.open_connection(sock=connection, limit=4096)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await source.read(2**16):
                    if source is from_server:
                        await self._is_open.wait()
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pass_on(from_client, to_server), pass_on(from_server, to_client))


def call_behind_a_gate(server: RunningServer, api: str, executor: ThreadPoolExecutor) -> tuple[Gate, Callable[[], str]]:
    """A gate, shut as soon as an answer of 16 MiB has begun to be sent, and what waits for its text."""
    server.engine.hold = 0
    if api == "grpc":
        gate = Gate(server, server.target)
        channel = grpc.insecure_channel(gate.address, [("grpc.max_receive_message_length", -1)])
        call = rpc.InferenceStub(channel).Complete.future(pb.GenerateRequest(text="a"), timeout=60)

        def text() -> str:
            with channel:
                return str(call.result().choices[0].text)
    else:
        gate = Gate(server, server.server.http_ports["http"].address)
        request = urllib.request.Request(
            f"http://{gate.address}/v1/completions", b'{"prompt": "a"}', {"Content-Type": "application/json"}
        )
        answer = executor.submit(lambda: urllib.request.urlopen(request, timeout=60).read())

        def text() -> str:
            return str(json.loads(answer.result())["choices"][0]["text"])

    wait_until(lambda: bool(server.engine.running))
    gate.shut()
    server.loop.call_soon_threadsafe(server.engine.release)
    wait_until(lambda: is_idle(server))
    return gate, text


def huge(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    for output in count_up(request):
        assert isinstance(output, RequestOutput)
        output.outputs[0].text = "x" * 2**24
        yield output


async def stop(server: RunningServer) -> None:
    """What a signal does."""
    await server.server.drain()
    await server.server.close()


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_rule_20_answers_that_are_being_sent_are_sent(start_server: Callable[..., RunningServer], api: str) -> None:
    """Their requests are over by then."""
    server = start_server(FakeEngine(huge), http_port=0)
    with ThreadPoolExecutor() as executor:
        gate, text = call_behind_a_gate(server, api, executor)
        stopping = asyncio.run_coroutine_threadsafe(stop(server), server.loop)
        server.run(asyncio.sleep(STOP_GRACE_SECONDS + 1))
        assert not stopping.done()
        gate.open()
        assert text() == "x" * 2**24
        stopping.result(timeout=60)


def test_rule_20_answers_that_nobody_reads_are_given_up(
    start_server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(FakeEngine(huge), shutdown_timeout=0.2)
    with ThreadPoolExecutor() as executor:
        gate, text = call_behind_a_gate(server, "grpc", executor)
        with caplog.at_level(logging.WARNING, logger="pyengine.server"):
            server.run(stop(server))
        assert any("not all sent after 0.2 s" in message for message in caplog.messages)
        assert server.engine.is_shut_down
        gate.open()
        with pytest.raises(grpc.RpcError):
            text()
