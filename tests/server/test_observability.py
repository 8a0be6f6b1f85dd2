"""Spans and log lines: one a request, of the right trace, and without prompts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeRequest, count_up
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from running_server import RunningServer, wait_until
from server_process import FAKE, ServerProcess

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.errors import ConfigError, PyEngineError
from pyengine.outputs import RequestOutput
from pyengine.server.flags import ServerArgs
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.tracing import make_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector on the loopback interface."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def test_one_span_a_request_with_its_phases(tiny_llama: Path, collector: Collector) -> None:
    args = EngineArgs(model=str(tiny_llama), device="cpu", num_kv_blocks=32, block_size=8)
    server = RunningServer(AsyncLLMEngine(LLMEngine(args)), http_port=0, otlp_endpoint=f"http://{collector.endpoint}")
    try:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5] * 20), sampling=pb.SamplingParams(max_tokens=6, ignore_eos=True)
        )
        list(server.stub.Generate(request, metadata=[("traceparent", TRACEPARENT), ("x-request-id", "streamed")], timeout=120))
        server.stub.Complete(request, metadata=[("x-request-id", "whole")], timeout=120)
        body = json.dumps({"prompt": [5] * 20, "max_tokens": 3, "ignore_eos": True, "n": 2}).encode()
        headers = {"traceparent": TRACEPARENT, "x-request-id": "http", "content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{server.base_url}/v1/completions", body, headers), timeout=120).close()
    finally:
        server.close()  # sends what is left
    spans = {values(span.attributes)["gen_ai.request.id"]: span for span in collector.spans}
    assert set(spans) == {"streamed", "whole", "http"}, "one a request, and none of the warm-up"
    assert collector.services == {"pyengine"}
    for name, generated in (("streamed", 6), ("whole", 6), ("http", 6)):
        span, found = spans[name], values(spans[name].attributes)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (
            (TRACE, PARENT) if name != "whole" else (span.trace_id.hex(), "")
        )
        assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (20, generated)
        assert found["pyengine.cached_tokens"] == (0 if name == "streamed" else 16)
        assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
        times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano]
        assert times == sorted(times)
        seconds = [values(event.attributes)["seconds"] for event in span.events]
        assert sum(seconds) * 1e9 == pytest.approx(times[-2] - times[0], abs=20e6)


def test_spans_of_requests_that_fail_or_are_cancelled(start_server: Callable[..., RunningServer], collector: Collector) -> None:
    def fails(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
        if request.request_id in ("warm-up", "cancelled"):
            return count_up(request)
        return iter([PyEngineError("out of luck")])

    server = start_server(FakeEngine(fails), otlp_endpoint=collector.endpoint)
    with pytest.raises(grpc.RpcError):
        list(server.stub.Generate(pb.GenerateRequest(text="a", request_id="failed"), timeout=60))
    server.engine.hold = 1
    call = server.stub.Generate(pb.GenerateRequest(text="a", request_id="cancelled"), timeout=60)
    next(call)
    call.cancel()
    wait_until(lambda: server.server.frontend.num_active == 0)
    server.run(server.server.close())
    found = {values(span.attributes)["gen_ai.request.id"]: span for span in collector.spans}
    assert values(found["failed"].attributes)["pyengine.outcome"] == "PyEngineError"
    assert values(found["cancelled"].attributes)["pyengine.outcome"] == "cancelled"
    assert (found["failed"].status.code, found["cancelled"].status.code) == (2, 0)
    assert "out of luck" not in str(found["failed"].attributes), "messages may hold what clients sent"


def test_a_collector_that_is_away_disturbs_nobody(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(FakeEngine(), otlp_endpoint="127.0.0.1:9")
    assert server.works()


@pytest.mark.parametrize("endpoint", ["", "collector", "ftp://a:4317", "http://:4317", "http://a:port"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: must be http://HOST:PORT"):
        make_tracer(endpoint, "1")


def test_without_the_library_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from pyengine.server.__main__ import main\n"
        "sys.exit(main(['--port', '0', '--otlp-endpoint', 'http://127.0.0.1:4317']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: --otlp-endpoint: needs OpenTelemetry: pip install 'pyengine[tracing]'"
    )
    assert "Traceback" not in done.stderr


# Logs


def test_json_lines_with_request_ids_and_no_prompts() -> None:
    """A line a request if asked for, an object each; the prompt is in none."""
    flags = ["--port", "0", "--log-format", "json", "--enable-log-requests", "--log-level", "debug"]
    flags += ["--http-port", "0", "--metrics-port", "0"]
    with ServerProcess(*FAKE, "ok", *flags) as process:
        target = process.wait_for(r'"serving on ([^"]+)"').group(1)
        with grpc.insecure_channel(target) as channel:
            from pyengine.server.proto import inference_pb2_grpc as rpc

            request = pb.GenerateRequest(text="a secret prompt", sampling=pb.SamplingParams(max_tokens=3), request_id="mine")
            rpc.InferenceStub(channel).Complete(request, timeout=60)
        process.wait_for("request mine is over")
        process.process.terminate()
        assert process.exit_code() == 0
    lines = [json.loads(line) for line in process.lines]
    (line,) = (line for line in lines if "mine is over" in line["message"])
    for each in lines:
        assert {"timestamp", "level", "logger", "message", "request_id"} <= set(each), each
    addresses = [each for each in lines if each["message"].startswith("serving ")]
    assert len(addresses) == 3
    assert {(each["level"], each["logger"]) for each in addresses} == {("INFO", "pyengine.server")}
    assert (line["request_id"], line["outcome"], line["generation_tokens"]) == ("mine", "length", 3)
    assert "secret prompt" not in process.log


def test_text_lines_say_which_request_they_are_about(start_server: Callable[..., RunningServer], caplog: Any) -> None:
    def fails(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
        return count_up(request) if request.request_id == "warm-up" else iter([ValueError("a defect")])

    from pyengine.server.logs import _WithRequestId

    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage() + vars(record)["suffix"])

    handler = Handler()
    handler.addFilter(_WithRequestId())
    logging.getLogger("pyengine").addHandler(handler)
    try:
        server = start_server(FakeEngine(fails), enable_log_requests=True, max_log_len=5)
        logging.getLogger("pyengine").setLevel(logging.INFO)
        with pytest.raises(grpc.RpcError):
            server.stub.Complete(pb.GenerateRequest(text="abcdefgh", request_id="r1"), timeout=60)
    finally:
        logging.getLogger("pyengine").removeHandler(handler)
        logging.getLogger("pyengine").setLevel(logging.NOTSET)
    assert any(line.startswith("Complete failed") and line.endswith("[r1]") for line in seen), seen
    (line,) = (line for line in seen if "is over" in line)
    assert line.startswith("request r1 is over: outcome=ValueError")
    assert line.endswith("prompt=abcde")


def test_wrong_flags() -> None:
    with pytest.raises(ConfigError, match="max_log_len"):
        ServerArgs(max_log_len=-1)
