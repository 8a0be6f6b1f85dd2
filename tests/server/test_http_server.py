"""The HTTP port beside gRPC: disconnects, limits, deadlines, drain, nonsense bodies, curl."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import math
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeRequest, count_up
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer, wait_until
from server_process import FAKE, ServerProcess

from pyengine.errors import EngineDeadError, PyEngineError
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind
from pyengine.server.http import app
from pyengine.server.proto import inference_pb2 as pb

JSON = {"Content-Type": "application/json"}


def connect(server: RunningServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.server.http_ports["http"].address, timeout=60)


def call(server: RunningServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON (or text, where it is none) and headers. A body that is not bytes is sent as JSON."""
    connection = connect(server)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", path, data, JSON | headers)
        response = connection.getresponse()
        text = response.read().decode()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, json.loads(text) if is_json else text, dict(response.headers)
    finally:
        connection.close()


def begin(server: RunningServer, **body: Any) -> http.client.HTTPConnection:
    """A completion that is not waited for."""
    connection = connect(server)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a"} | body), JSON)
    return connection


def is_idle(server: RunningServer) -> bool:
    return not server.engine.running and server.server.frontend.num_active == 0


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"prompt": ["a", "b", "c"], "stream": True}])
def test_rule_5_a_client_that_is_gone_frees_its_request(start_server: Callable[..., RunningServer], body: Any) -> None:
    server = start_server(http_port=0)
    server.engine.hold = 1
    connection = begin(server, **body)
    count = len(body.get("prompt", "a"))
    wait_until(lambda: len(server.engine.running) == count)
    if body["stream"]:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        response.close()
    connection.close()
    wait_until(lambda: is_idle(server))
    assert server.engine.num_aborted == count
    assert server.works()


def test_the_bounded_queue_is_shared_with_grpc(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(http_port=0, max_concurrent_requests=3)
    server.engine.hold = 0
    streams = [server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60), begin(server)]
    wait_until(lambda: len(server.engine.running) == 2)
    status, body, headers = call(server, "/v1/completions", {"prompt": ["a", "b"]})
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
    assert call(server, "/v1/completions", {"prompt": ["a"] * 4})[1]["error"]["param"] == "prompt"
    streams.append(begin(server))
    wait_until(lambda: len(server.engine.running) == 3)
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(pb.GenerateRequest(text="a"), timeout=60)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(server, "/v1/completions", {"prompt": "a"})[0] == 429
    server.run(asyncio.sleep(0))
    server.loop.call_soon_threadsafe(server.engine.release)
    assert len(list(streams[0])) == 16  # type: ignore[call-overload]
    for connection in streams[1:]:
        assert connection.getresponse().status == 200
        connection.close()
    wait_until(lambda: is_idle(server))


def test_choices_are_what_is_bounded(start_server: Callable[..., RunningServer]) -> None:
    """On both ports. What could never be taken is not told to come again."""
    server = start_server(http_port=0, metrics_port=0, max_concurrent_requests=6)
    for prompts, n in ((6, 2), (1, 7), (6, 16384)):
        status, body, headers = call(server, "/v1/completions", {"prompt": [[1]] * prompts, "n": n, "max_tokens": 1})
        assert (status, body["error"]["param"], "retry-after" in headers) == (400, "n", False)
        assert f"{prompts * n} choices in all; this server may have 6 in flight" in body["error"]["message"]
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(n=7)), timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.value.trailing_metadata())["field"] == "n"
    assert not server.engine.requests
    server.engine.hold = 0
    connection = begin(server, prompt=["a", "b"], n=2)
    wait_until(lambda: len(server.engine.running) == 2)
    assert "pyengine:choices_in_flight{" in (text := call(server, "/metrics")[1])
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("pyengine:choices_in_flight")] == ["4.0"]
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 3}
    status, body, headers = call(server, "/v1/chat/completions", chat)
    assert (status, headers["retry-after"]) == (429, "1")
    assert "4 choices are in flight, and 3 more came; this server takes 6" in body["error"]["message"]
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(n=3)), timeout=60)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    server.loop.call_soon_threadsafe(server.engine.release)
    assert len(json.load(connection.getresponse())["choices"]) == 4
    connection.close()
    wait_until(lambda: is_idle(server))
    assert server.server.frontend.num_choices == 0
    assert len(call(server, "/v1/completions", {"prompt": ["a", "b"], "n": 3})[1]["choices"]) == 6


def test_one_id_is_in_flight_once_whatever_the_port(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(http_port=0)
    server.engine.hold = 0
    connection = begin(server, request_id="same")
    wait_until(lambda: bool(server.engine.running))
    assert call(server, "/v1/completions", {"prompt": "a", "request_id": "same"})[1]["error"]["param"] == "request_id"
    assert server.stub.Abort(pb.AbortRequest(request_id="same"), timeout=60).aborted
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["type"]) == (499, "request_cancelled")
    connection.close()


def test_request_timeout_on_both_ports(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(http_port=0, request_timeout=0.2)
    server.engine.hold = 1
    status, body, headers = call(server, "/v1/completions", {"prompt": "a"})
    assert (status, body["error"]["type"], headers["x-should-retry"]) == (504, "timeout_error", "false")
    status, text, _ = call(server, "/v1/completions", {"prompt": "a", "stream": True})
    events = text.removesuffix("\n\n").split("\n\n")
    assert (status, events[-1]) == (200, "data: [DONE]")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(pb.GenerateRequest(text="a"), timeout=60)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: is_idle(server))
    assert server.works()
    assert server.engine.num_aborted == 3


@pytest.mark.parametrize(
    ("failure", "message"), [(PyEngineError("out of luck"), "out of luck"), (ValueError("secret"), "internal error")]
)
def test_failures_in_the_engine(start_server: Callable[..., RunningServer], failure: Exception, message: str) -> None:
    """The client learns no more than the engine says on purpose; a defect's traceback is for the log."""

    def fails(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
        if request.request_id == "warm-up":
            yield from count_up(request)
        else:
            if request.params.output_kind is RequestOutputKind.DELTA:
                yield next(iter(count_up(request)))
            yield failure

    server = start_server(FakeEngine(fails), http_port=0)
    status, body, _ = call(server, "/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert status == 500
    assert message in body["error"]["message"]
    _, text, _ = call(server, "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True})
    assert message in text.split("\n\n")[-3]
    assert "secret" not in text
    assert not server.server.failed.is_set()


def test_a_dead_engine_fails_the_server(start_server: Callable[..., RunningServer]) -> None:
    def dies(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
        return count_up(request) if request.request_id == "warm-up" else iter([EngineDeadError("a step failed")])

    server = start_server(FakeEngine(dies), http_port=0)
    assert call(server, "/v1/completions", {"prompt": "a"})[0] == 500
    wait_until(server.server.failed.is_set)


def test_body_limit(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(http_port=0, max_message_bytes=2000)
    status, body, _ = call(server, "/v1/completions", {"prompt": "a" * 2000})
    assert (status, body["error"]["type"]) == (413, "invalid_request_error")
    assert "2000 bytes" in body["error"]["message"]
    assert call(server, "/v1/completions", {"prompt": "a", "user": "u" * 1900})[0] == 200


def test_bodies_that_do_not_come(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that stops in the middle is told so after a while; one that goes away is nobody's fault."""
    server = start_server(http_port=0)
    host, port = server.server.http_ports["http"].address.split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    half = head + b'{"prompt":'
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(half)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(half)
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")
    assert server.works()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_tokenize_and_the_rest(shared_http_server: RunningServer) -> None:
    server = shared_http_server
    assert call(server, "/tokenize", {"prompt": "ab"})[1] == {"tokens": [0, 97, 98], "count": 3, "max_model_len": 256}
    assert call(server, "/tokenize", {"prompt": "ab", "add_special_tokens": False})[1]["tokens"] == [97, 98]
    assert call(server, "/tokenize", {"messages": [{"role": "user", "content": "ab"}]})[1]["tokens"] == [97, 98]
    assert call(server, "/detokenize", {"tokens": [5, 6]})[1] == {"prompt": "t5 t6 "}
    assert call(server, "/version")[1] == {"version": "1.2.3"}
    assert [call(server, path)[0] for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
    paths = call(server, "/openapi.json")[1]["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/version"} <= set(paths)
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": ["5"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        status, answer, _ = call(server, path, body)
        wanted = {"model": 404, "return_token_strs": 501}.get(param, 400)
        assert (status, answer["error"]["param"]) == (wanted, param)
    for path, method_body, expected in (("/v2/none", None, 404), ("/v1/completions", None, 405), ("/v1/models", {}, 405)):
        status, answer, _ = call(server, path, method_body)
        assert (status, answer["error"]["type"]) == (expected, "invalid_request_error")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "text/plain;application/json", ""])
def test_bodies_that_are_not_said_to_be_json(shared_http_server: RunningServer, media_type: str) -> None:
    """A page may send such a body to a server that is not its own, and need not ask the server first."""
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, answer, _ = call(shared_http_server, path, {"prompt": "a"}, **{"Content-Type": media_type})
        assert (status, answer["error"]["type"]) == (415, "invalid_request_error")
        assert "must be sent with Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_bodies_that_are_said_to_be_json(shared_http_server: RunningServer, media_type: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert call(shared_http_server, "/v1/completions", body, **{"Content-Type": media_type})[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt":"\\ud800"}', b"[" * 10000, b'{"prompt":' + b"1" * 5000 + b"}"]
)
def test_bodies_that_are_no_requests(shared_http_server: RunningServer, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, answer, _ = call(shared_http_server, path, body)
        assert status == 400
        assert answer["error"]["message"]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, 1, -1, 0.5, 2, 20, 21, math.nan, math.inf]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5
)
FIELDS = (
    *("model", "temperature", "top_p", "n", "stream", "stream_options", "stop", "max_tokens", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "response_format", "top_k", "min_p", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "bad_words", "prompt_logprobs"),
    *("allowed_token_ids", "priority", "cache_salt", "request_id", "logprobs", "top_logprobs", "echo", "suffix", "best_of"),
    *("tools", "max_completion_tokens", "prompt", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
)


def check_any_body(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    """An answer, or one error object that names a field of the request."""
    status, answer, _ = call(server, path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert status in (200, 400, 404, 501), answer
    if status != 200:
        assert answer["error"]["param"] in (*FIELDS, "messages", "body")
        assert not server.engine.errored
    assert server.server.frontend.num_active == 0


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), st.booleans())
def test_rule_11_any_value_in_any_field(shared_http_server: RunningServer, values: dict[str, Any], is_chat: bool) -> None:
    given = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    check_any_body(shared_http_server, path, {**given, "max_tokens": 2, **values})


def test_curl(shared_http_server: RunningServer) -> None:
    body = '{"model": "fake", "prompt": "a", "max_tokens": 2, "stream": true}'
    url = f"{shared_http_server.base_url}/v1/completions"
    command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n\n")
    assert [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:2]] == ["t10 ", "t11 "]
    assert lines[2:] == ["data: [DONE]", ""]


def test_rule_20_sigterm_drains_http_too() -> None:
    """Running requests finish, new ones get 503 and health stays, until the last one is done; then the process exits."""
    with ServerProcess(*FAKE, "slow", "--port", "0", "--http-port", "0") as process:
        process.wait_ready()
        address = process.wait_for(r"^serving http on http://(\S+)$").group(1)
        running, new = http.client.HTTPConnection(address, timeout=60), http.client.HTTPConnection(address, timeout=60)
        running.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 40, "stream": True}), JSON)
        response = running.getresponse()
        assert response.status == 200
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("draining: 1 requests in flight")
        statuses = []
        for path in ("/health", "/ready", "/v1/models"):
            new.request("GET", path)
            answer = new.getresponse()
            answer.read()
            statuses.append(answer.status)
        assert statuses == [200, 503, 503]
        events = response.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.exit_code() == 0
        assert "Traceback" not in process.log
        for connection in (running, new):
            connection.close()
