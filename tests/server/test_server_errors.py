"""A wrong request fails alone, with the right status and the field named, and the next one is served."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeRequest, count_up, output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
NAN, INF = math.nan, math.inf

BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, INT_MIN, INT_MAX)],
    *[("temperature", value) for value in (NAN, INF, -INF, -0.1, 2.1, 1e308)],
    *[("top_p", value) for value in (NAN, INF, -0.1, 0.0, 1.1, 1e308)],
    *[("top_k", value) for value in (-2, INT_MIN)],
    *[("min_p", value) for value in (NAN, INF, -0.1, 1.1)],
    *[("presence_penalty", value) for value in (NAN, INF, -2.1, 2.1)],
    *[("frequency_penalty", value) for value in (NAN, INF, -2.1, 2.1)],
    *[("repetition_penalty", value) for value in (NAN, INF, -1.0, 0.0, 1e7)],
    ("seed", -(2**63)),
    *[("max_tokens", value) for value in (0, -2, INT_MIN, INT_MAX)],
    *[("min_tokens", value) for value in (-1, 17, INT_MAX, INT_MIN)],
    *[("stop", value) for value in ([""], ["a", ""])],
    *[("stop_token_ids", value) for value in ([-1], [5, INT_MIN])],
    *[("logprobs", value) for value in (-1, 21, INT_MAX)],
    *[("prompt_logprobs", value) for value in (-1, 21, INT_MAX)],
    *[("logit_bias", value) for value in ({5: NAN}, {-1: 1.0})],
    ("bad_words", [""]),
    *[("allowed_token_ids", value) for value in (pb.TokenIds(), pb.TokenIds(ids=[-1]))],
]

BAD_REQUESTS: list[tuple[str, pb.GenerateRequest]] = [
    ("input", pb.GenerateRequest()),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1]))),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[512]))),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[INT_MAX]))),
    ("add_special_tokens", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), add_special_tokens=False)),
    ("request_id", pb.GenerateRequest(text="a", request_id="")),
    ("request_id", pb.GenerateRequest(text="a", request_id="two words")),
    ("request_id", pb.GenerateRequest(text="a", request_id="ü")),
    ("request_id", pb.GenerateRequest(text="a", request_id="x" * 129)),
    ("cache_salt", pb.GenerateRequest(text="a", cache_salt="")),
    ("chat.messages", pb.GenerateRequest(chat=pb.ChatInput())),
    ("chat.messages[0].role", pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(content="a")]))),
    (
        "chat.messages[1].parts",
        pb.GenerateRequest(
            chat=pb.ChatInput(
                messages=[
                    pb.ChatMessage(role="user", content="a"),
                    pb.ChatMessage(role="user", content="a", parts=[pb.ContentPart(text="b")]),
                ]
            )
        ),
    ),
    (
        "chat.messages[0].parts[0]",
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart()])])),
    ),
    (
        "chat.continue_final_message",
        pb.GenerateRequest(
            chat=pb.ChatInput(
                messages=[pb.ChatMessage(role="user", content="a")], continue_final_message=True, add_generation_prompt=True
            )
        ),
    ),
    (
        "chat.chat_template",
        pb.GenerateRequest(
            chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a")], chat_template="{{ messages }}")
        ),
    ),
]


def _user(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", **fields)]))


UNSUPPORTED: list[tuple[str, pb.GenerateRequest]] = [
    ("best_of", pb.GenerateRequest(text="a", sampling=pb.SamplingParams(best_of=2))),
    ("beam_search", pb.GenerateRequest(text="a", sampling=pb.SamplingParams(beam_search=pb.BeamSearch(width=2)))),
    ("structured_output", pb.GenerateRequest(text="a", structured_output=pb.StructuredOutput(regex="a+"))),
    ("lora_name", pb.GenerateRequest(text="a", lora_name="adapter")),
    ("media", pb.GenerateRequest(text="a", media=[pb.Media(url="https://localhost/x.png")])),
    ("chat.messages[0].parts[0].image", _user(parts=[pb.ContentPart(image=pb.Media(data=b"x"))])),
    ("chat.messages[0].parts[1].audio", _user(parts=[pb.ContentPart(text="a"), pb.ContentPart(audio=pb.Media(data=b"x"))])),
    ("chat.messages[0].tool_calls", _user(tool_calls=[pb.ToolCall(name="f")])),
    ("chat.messages[0].tool_call_id", _user(tool_call_id="1")),
    (
        "chat.tools",
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(name="f")])),
    ),
]


def expect_error(server: RunningServer, request: pb.GenerateRequest, code: grpc.StatusCode, **options: Any) -> grpc.RpcError:
    """Both methods refuse the request; returns Generate's error."""
    with pytest.raises(grpc.RpcError) as streamed:
        list(server.stub.Generate(request, timeout=60, **options))
    with pytest.raises(grpc.RpcError) as unary:
        server.stub.Complete(request, timeout=60, **options)
    assert (streamed.value.code(), unary.value.code()) == (code, code)
    return streamed.value


def expect_field(error: grpc.RpcError, field: str) -> None:
    assert dict(error.trailing_metadata())["field"] == field
    assert error.details().startswith(f"{field}: ")


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_rule_11_bad_sampling_field(shared_server: RunningServer, field: str, value: Any) -> None:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**{field: value}))
    expect_field(expect_error(shared_server, request, grpc.StatusCode.INVALID_ARGUMENT), field)
    assert shared_server.works()


def test_rule_11_covers_every_sampling_field() -> None:
    switches = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.type == field.TYPE_BOOL}
    supported = set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - switches - {"best_of", "beam_search"}
    assert {field for field, _ in BAD_SAMPLING} == supported


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS)
def test_rule_11_bad_request(shared_server: RunningServer, field: str, request_: pb.GenerateRequest) -> None:
    expect_field(expect_error(shared_server, request_, grpc.StatusCode.INVALID_ARGUMENT), field)
    assert shared_server.works()


@pytest.mark.parametrize("value", [NAN, INF])
def test_rule_11_template_variables_are_finite(shared_server: RunningServer, value: float) -> None:
    request = _user(content="a")
    request.chat.chat_template_kwargs.update({"deep": [{"x": value}]})
    expect_field(expect_error(shared_server, request, grpc.StatusCode.INVALID_ARGUMENT), "chat.chat_template_kwargs")


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
    expect_field(expect_error(shared_server, request, grpc.StatusCode.INVALID_ARGUMENT, metadata=headers), field)


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


_floats = st.one_of(st.floats(), st.floats(-2, 2))
_ids = st.one_of(st.integers(INT_MIN, INT_MAX), st.integers(-2, 520))
_FIELD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": _ids,
    "logit_bias": st.dictionaries(_ids, _floats, max_size=3),
    "allowed_token_ids": st.builds(pb.TokenIds, ids=st.lists(_ids, max_size=3)),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "best_of": _ids,
    "beam_search": st.builds(pb.BeamSearch, width=_ids),
}
_BY_TYPE = {"DOUBLE": _floats, "INT32": _ids, "BOOL": st.booleans(), "STRING": st.text(max_size=3)}


def _strategy(field: Any) -> st.SearchStrategy[Any]:
    if field.name in _FIELD_VALUES:
        return _FIELD_VALUES[field.name]
    kind = _BY_TYPE[{1: "DOUBLE", 5: "INT32", 8: "BOOL", 9: "STRING"}[field.type]]
    return st.lists(kind, max_size=3) if field.is_repeated else kind


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({}, optional={f.name: _strategy(f) for f in pb.SamplingParams.DESCRIPTOR.fields}))
def test_rule_11_any_sampling_params(shared_server: RunningServer, values: dict[str, Any]) -> None:
    """Whatever the fields hold, the answer is a completion or names a field that was sent."""
    if values.get("n", 1) > 8:
        values["max_tokens"] = 1  # 16384 choices are legal; keep them short
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**values))
    call = shared_server.stub.Complete.future(request, timeout=60)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED), call.details()
    if call.code() is not grpc.StatusCode.OK:
        assert dict(call.trailing_metadata())["field"] in values


def test_rule_13_too_long_fails_alone_saying_both_numbers(server: RunningServer) -> None:
    server.engine.hold = 2
    other = server.stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=3)), timeout=60)
    assert list(next(other).token_ids) == [10]
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1000))
    error = expect_error(server, request, grpc.StatusCode.INVALID_ARGUMENT)
    expect_field(error, "max_tokens")
    assert "1002" in error.details()
    assert "256" in error.details()
    assert list(next(other).token_ids) == [11]
    other.cancel()
    assert server.works()


def test_rule_19_no_chat_template_still_completes(server: RunningServer) -> None:
    server.engine.has_chat_template = False
    expect_field(expect_error(server, _user(content="hi"), grpc.StatusCode.INVALID_ARGUMENT), "chat.messages")
    assert not server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).supports_chat
    assert server.works()


@pytest.mark.parametrize(("field", "request_"), UNSUPPORTED)
def test_fields_honoured_later_are_named(shared_server: RunningServer, field: str, request_: pb.GenerateRequest) -> None:
    expect_field(expect_error(shared_server, request_, grpc.StatusCode.UNIMPLEMENTED), field)


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
    error = expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode[error_type.grpc_status])
    trailers = dict(error.trailing_metadata())
    assert trailers.get("field") == ("some_field" if error_type in (InvalidRequestError, UnsupportedError) else None)
    assert trailers.get("grpc-retry-pushback-ms") == ("1000" if error_type is OverloadedError else None)


def test_a_defect_is_internal_and_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.script = lambda request: iter([KeyError("secret of the server")])
    with caplog.at_level(logging.ERROR, logger="pyengine.server"):
        error = expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode.INTERNAL)
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
    expect_error(server, pb.GenerateRequest(text="a"), expected)


def test_outputs_that_end_too_early_are_a_defect(server: RunningServer) -> None:
    server.engine.script = lambda request: iter([output(request, [CompletionOutput(0, "x", [9])], finished=False)])
    expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode.INTERNAL)
    server.engine.script = lambda request: iter([])
    expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode.INTERNAL)


def test_long_error_messages_fit_into_headers(server: RunningServer) -> None:
    server.engine.script = lambda request: iter([InvalidRequestError("stop", "ü" * 100_000)])
    error = expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode.INVALID_ARGUMENT)
    assert len(error.details()) == 500
    assert error.details().endswith("...")


def test_a_request_id_is_unique_while_in_flight(server: RunningServer) -> None:
    server.engine.hold = 1
    request = pb.GenerateRequest(text="a", request_id="same")
    first = server.stub.Generate(request, timeout=60)
    next(first)
    expect_field(expect_error(server, request, grpc.StatusCode.INVALID_ARGUMENT), "request_id")
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
    error = expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    assert server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).model == "fake"
    calls[0].cancel()
    wait_until(lambda: len(server.engine.running) == 1)
    assert server.works()


def test_messages_above_the_limit_are_refused(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_message_bytes=4096)
    error = expect_error(server, pb.GenerateRequest(text="a" * 5000), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "4096" in error.details()
    server.engine.script = lambda request: iter(
        [output(request, [CompletionOutput(0, "x" * 5000, [9], finish_reason="stop")], finished=True)]
    )
    expect_error(server, pb.GenerateRequest(text="a"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    server.engine.script = count_up
    assert server.works()


def test_client_templates_only_where_trusted(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(FakeEngine(), trust_request_chat_template=True)
    request = _user(content="a")
    request.chat.chat_template = "{{ messages }}"
    server.stub.Complete(request, timeout=60)
    assert server.engine.requests[0].prompt.chat_template == "{{ messages }}"
