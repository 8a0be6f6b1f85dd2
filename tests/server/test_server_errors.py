"""A wrong request fails alone, with the right status and the field named, and the next one is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from bad_requests import (
    BAD_REQUESTS,
    BAD_SAMPLING,
    INF,
    INT_MAX,
    INT_MIN,
    NAN,
    UNSUPPORTED,
    any_sampling_params,
    expect_answer_or_field,
    expect_error,
    expect_field,
    user_says,
)
from fake_engine import FakeEngine, FakeRequest, count_up, output
from hypothesis import HealthCheck, given, settings
from running_server import RunningServer, wait_until

from pyengine.errors import (
    ALL_ERRORS,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    PyEngineError,
    UnsupportedError,
)
from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.server.proto import inference_pb2 as pb


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_rule_11_bad_sampling_field(shared_server: RunningServer, field: str, value: Any) -> None:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**{field: value}))
    expect_field(expect_error(shared_server.stub, request, grpc.StatusCode.INVALID_ARGUMENT), field)
    assert shared_server.works()


def test_rule_11_covers_every_sampling_field() -> None:
    switches = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.type == field.TYPE_BOOL}
    supported = set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - switches - {"best_of", "beam_search"}
    assert {field for field, _ in BAD_SAMPLING} == supported


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS)
def test_rule_11_bad_request(shared_server: RunningServer, field: str, request_: pb.GenerateRequest) -> None:
    expect_field(expect_error(shared_server.stub, request_, grpc.StatusCode.INVALID_ARGUMENT), field)
    assert shared_server.works()


@pytest.mark.parametrize("value", [NAN, INF])
def test_rule_11_template_variables_are_finite(shared_server: RunningServer, value: float) -> None:
    request = user_says(content="a")
    request.chat.chat_template_kwargs.update({"deep": [{"x": value}]})
    expect_field(expect_error(shared_server.stub, request, grpc.StatusCode.INVALID_ARGUMENT), "chat.chat_template_kwargs")


@pytest.mark.parametrize(
    ("field", "headers"),
    [
        ("x-priority", (("x-priority", "high"),)),
        ("x-priority", (("x-priority", str(2**31)),)),
        ("x-request-id", (("x-request-id", "two words"),)),
    ],
)
def test_rule_11_bad_header(shared_server: RunningServer, field: str, headers: Any) -> None:
    request = pb.GenerateRequest(text="a")
    expect_field(expect_error(shared_server.stub, request, grpc.StatusCode.INVALID_ARGUMENT, metadata=headers), field)


@pytest.mark.parametrize("token_id", [-1, 512, INT_MAX, INT_MIN])
def test_rule_11_detokenize_checks_ids(shared_server: RunningServer, token_id: int) -> None:
    call = shared_server.stub.Detokenize.future(pb.DetokenizeRequest(token_ids=[1, token_id]), timeout=60)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    expect_field(call, "token_ids")


@pytest.mark.parametrize("request_", [pb.TokenizeRequest(), pb.TokenizeRequest(chat=pb.ChatInput())])
def test_rule_11_tokenize_checks_its_input(shared_server: RunningServer, request_: pb.TokenizeRequest) -> None:
    call = shared_server.stub.Tokenize.future(request_, timeout=60)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    expect_field(call, "chat.messages" if request_.HasField("chat") else "input")


@pytest.mark.parametrize("method", ["Generate", "Complete", "Abort", "Tokenize", "Detokenize"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"], ids=["garbage", "not UTF-8"])
def test_rule_11_bytes_that_are_no_message(shared_server: RunningServer, method: str, data: bytes) -> None:
    path = f"/pyengine.v1.Inference/{method}"
    call: Any = shared_server.channel.unary_stream(path) if method == "Generate" else shared_server.channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as error:
        list(call(data, timeout=60))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert shared_server.works()


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_sampling_params())
def test_rule_11_any_sampling_params(shared_server: RunningServer, values: dict[str, Any]) -> None:
    expect_answer_or_field(shared_server.stub, values)


def test_rule_13_too_long_fails_alone_saying_both_numbers(server: RunningServer) -> None:
    server.engine.hold = 2
    other = server.stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=3)), timeout=60)
    assert list(next(other).token_ids) == [10]
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1000))
    error = expect_error(server.stub, request, grpc.StatusCode.INVALID_ARGUMENT)
    expect_field(error, "max_tokens")
    assert "1002" in error.details()
    assert "256" in error.details()
    assert list(next(other).token_ids) == [11]
    other.cancel()
    assert server.works()


def test_rule_19_no_chat_template_still_completes(server: RunningServer) -> None:
    server.engine.has_chat_template = False
    expect_field(expect_error(server.stub, user_says(content="hi"), grpc.StatusCode.INVALID_ARGUMENT), "chat.messages")
    assert not server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).supports_chat
    assert server.works()


@pytest.mark.parametrize(("field", "request_"), UNSUPPORTED)
def test_fields_honoured_later_are_named(shared_server: RunningServer, field: str, request_: pb.GenerateRequest) -> None:
    expect_field(expect_error(shared_server.stub, request_, grpc.StatusCode.UNIMPLEMENTED), field)


def _make(error_type: type[PyEngineError]) -> PyEngineError:
    if error_type in (InvalidRequestError, UnsupportedError, ConfigError):
        return error_type("some_field", "is wrong")
    return error_type("it is wrong")


@pytest.mark.parametrize("error_type", [e for e in ALL_ERRORS if e not in (ConfigError, ModelLoadError, EngineDeadError)])
@pytest.mark.parametrize("after", [0, 2], ids=["at once", "mid-stream"])
def test_engine_errors_become_their_status(server: RunningServer, error_type: type[PyEngineError], after: int) -> None:
    def script(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
        for _, item in zip(range(after), count_up(request), strict=False):
            yield item
        yield _make(error_type)

    server.engine.script = script
    error = expect_error(server.stub, pb.GenerateRequest(text="a"), grpc.StatusCode[error_type.grpc_status])
    trailers = dict(error.trailing_metadata())
    assert trailers.get("field") == ("some_field" if error_type in (InvalidRequestError, UnsupportedError) else None)
    assert trailers.get("grpc-retry-pushback-ms") == ("1000" if error_type is OverloadedError else None)


def test_a_defect_is_internal_and_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.script = lambda request: iter([KeyError("secret of the server")])
    with caplog.at_level(logging.ERROR, logger="pyengine.server"):
        error = expect_error(server.stub, pb.GenerateRequest(text="a"), grpc.StatusCode.INTERNAL)
    assert "secret" not in error.details()
    assert "KeyError: 'secret of the server'" in caplog.text
    assert "Traceback" in caplog.text
    server.engine.script = count_up
    assert server.works()


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_choice_that_did_not_end_well_fails_the_call(server: RunningServer, reason: Any) -> None:
    def script(request: FakeRequest) -> Iterator[RequestOutput]:
        yield output(request, [CompletionOutput(0, "x", [9])], finished=False)
        yield output(request, [CompletionOutput(0, "", [], finish_reason=reason)], finished=True, error="no luck")

    server.engine.script = script
    call = server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60)
    messages = [next(call), next(call)]
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    expected = {"abort": grpc.StatusCode.CANCELLED, "error": grpc.StatusCode.INTERNAL}[reason]
    assert error.value.code() is expected
    assert ("no luck" in error.value.details()) == (reason == "error")
    assert messages[-1].finish.reason == pb.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
    assert messages[-1].finish.usage.completion_tokens == 1
    expect_error(server.stub, pb.GenerateRequest(text="a"), expected)


def test_outputs_that_end_too_early_are_a_defect(server: RunningServer) -> None:
    server.engine.script = lambda request: iter([output(request, [CompletionOutput(0, "x", [9])], finished=False)])
    expect_error(server.stub, pb.GenerateRequest(text="a"), grpc.StatusCode.INTERNAL)
    server.engine.script = lambda request: iter([])
    expect_error(server.stub, pb.GenerateRequest(text="a"), grpc.StatusCode.INTERNAL)


def test_long_error_messages_fit_into_headers(server: RunningServer) -> None:
    server.engine.script = lambda request: iter([InvalidRequestError("stop", "ü" * 100_000)])
    error = expect_error(server.stub, pb.GenerateRequest(text="a"), grpc.StatusCode.INVALID_ARGUMENT)
    assert len(error.details()) == 500
    assert error.details().endswith("...")


def test_a_request_id_is_unique_while_in_flight(server: RunningServer) -> None:
    server.engine.hold = 1
    request = pb.GenerateRequest(text="a", request_id="same")
    first = server.stub.Generate(request, timeout=60)
    next(first)
    expect_field(expect_error(server.stub, request, grpc.StatusCode.INVALID_ARGUMENT), "request_id")
    first.cancel()
    wait_until(lambda: not server.engine.running)
    server.engine.hold = None
    assert server.stub.Complete(request, timeout=60).request_id == "same"


def test_more_requests_than_allowed_are_told_when_to_retry(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_concurrent_requests=2)
    server.engine.hold = 1
    calls = [server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60) for _ in range(2)]
    for call in calls:
        next(call)
    error = expect_error(server.stub, pb.GenerateRequest(text="a"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    assert server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).model == "fake"
    calls[0].cancel()
    wait_until(lambda: len(server.engine.running) == 1)
    assert server.works()


def test_requests_above_the_limit_are_refused(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_message_bytes=4096)
    error = expect_error(server.stub, pb.GenerateRequest(text="a" * 5000), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "4096" in error.details()
    assert server.works()


def test_answers_may_be_larger_than_requests(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_message_bytes=4096)
    server.engine.script = lambda request: iter(
        [output(request, [CompletionOutput(0, "x" * 5000, [9], finish_reason="stop")], finished=True)]
    )
    request = pb.GenerateRequest(text="a")
    assert len(server.stub.Complete(request, timeout=60).choices[0].text) == 5000
    assert [len(message.text) for message in server.stub.Generate(request, timeout=60)] == [5000]


def test_client_templates_only_where_trusted(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(FakeEngine(), trust_request_chat_template=True)
    request = user_says(content="a")
    request.chat.chat_template = "{{ messages }}"
    server.stub.Complete(request, timeout=60)
    assert server.engine.requests[0].prompt.chat_template == "{{ messages }}"
