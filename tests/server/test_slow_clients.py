"""Clients that do not read, or slowly, and what they cost the server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest
from fake_engine import FakeEngine, FakeRequest, count_up
from running_server import RunningServer, wait_until

from pyengine.outputs import RequestOutput
from pyengine.server import address
from pyengine.server.proto import inference_pb2 as pb


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
