"""Requests that must be refused, with the field that the error must name; and how to check that."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from hypothesis import event
from hypothesis import strategies as st

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

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
    *[("repetition_penalty", value) for value in (NAN, INF, -1.0, 0.0, 5e-324, 1e7)],
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


def user_says(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", **fields)]))


UNSUPPORTED: list[tuple[str, pb.GenerateRequest]] = [
    ("best_of", pb.GenerateRequest(text="a", sampling=pb.SamplingParams(best_of=2))),
    ("beam_search", pb.GenerateRequest(text="a", sampling=pb.SamplingParams(beam_search=pb.BeamSearch(width=2)))),
    ("structured_output", pb.GenerateRequest(text="a", structured_output=pb.StructuredOutput(regex="a+"))),
    ("lora_name", pb.GenerateRequest(text="a", lora_name="adapter")),
    ("media", pb.GenerateRequest(text="a", media=[pb.Media(url="https://localhost/x.png")])),
    ("chat.messages[0].parts[0].image", user_says(parts=[pb.ContentPart(image=pb.Media(data=b"x"))])),
    ("chat.messages[0].parts[1].audio", user_says(parts=[pb.ContentPart(text="a"), pb.ContentPart(audio=pb.Media(data=b"x"))])),
    ("chat.messages[0].tool_calls", user_says(tool_calls=[pb.ToolCall(name="f")])),
    ("chat.messages[0].tool_call_id", user_says(tool_call_id="1")),
    (
        "chat.tools",
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(name="f")])),
    ),
]


def expect_error(stub: rpc.InferenceStub, request: pb.GenerateRequest, code: grpc.StatusCode, **options: Any) -> grpc.RpcError:
    """Both methods refuse the request; returns Generate's error."""
    with pytest.raises(grpc.RpcError) as streamed:
        list(stub.Generate(request, timeout=60, **options))
    with pytest.raises(grpc.RpcError) as unary:
        stub.Complete(request, timeout=60, **options)
    assert (streamed.value.code(), unary.value.code()) == (code, code)
    return streamed.value


def expect_field(error: grpc.RpcError, field: str) -> None:
    assert dict(error.trailing_metadata())["field"] == field
    assert error.details().startswith(f"{field}: ")


_floats = st.floats()
_int32 = st.integers(INT_MIN, INT_MAX)
_ids = st.one_of(_int32, st.integers(-2, 520))
_WILD: dict[str, st.SearchStrategy[Any]] = {
    "n": st.one_of(st.integers(-2, 5), st.integers(16385, INT_MAX)),  # what is legal between takes long
    "logit_bias": st.dictionaries(_ids, _floats, max_size=3),
    "stop_token_ids": st.lists(_ids, max_size=3),
    "allowed_token_ids": st.builds(pb.TokenIds, ids=st.lists(_ids, max_size=3)),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "best_of": _int32,
    "beam_search": st.builds(pb.BeamSearch, width=_int32),
}
_vocabulary = st.integers(0, 511)
_penalties = st.floats(-2, 2)
_SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 4),
    "temperature": st.floats(0.5, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 600),
    "min_p": st.floats(0, 1),
    "presence_penalty": _penalties,
    "frequency_penalty": _penalties,
    "repetition_penalty": st.floats(1e-6, 10),
    "seed": st.integers(0, 2**63 - 1),
    "max_tokens": st.integers(8, 20),
    "min_tokens": st.integers(0, 8),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(_vocabulary, max_size=3),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(_vocabulary, _floats.filter(lambda value: value == value), max_size=3),
    "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "allowed_token_ids": st.builds(pb.TokenIds, ids=st.lists(_vocabulary, min_size=1, max_size=9)),
} | {field.name: st.booleans() for field in pb.SamplingParams.DESCRIPTOR.fields if field.type == field.TYPE_BOOL}


def _wild(name: str) -> st.SearchStrategy[Any]:
    field = pb.SamplingParams.DESCRIPTOR.fields_by_name[name]
    by_type = {
        field.TYPE_DOUBLE: _floats,
        field.TYPE_INT32: _int32,
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_STRING: st.lists(st.text(max_size=3), max_size=3),
    }
    return _WILD[name] if name in _WILD else by_type[field.type]


def any_sampling_params() -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of the fields of SamplingParams with sensible values, but for up to two fields that hold anything."""
    names = sorted(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    wild = st.lists(st.sampled_from(names), max_size=2, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: _wild(name) for name in chosen})
    )
    return st.builds(lambda sensible, any_: sensible | any_, st.fixed_dictionaries({}, optional=_SENSIBLE), wild)


def expect_answer_or_field(stub: rpc.InferenceStub, values: dict[str, Any]) -> None:
    """Whatever SamplingParams holds, the answer is a completion or names a field that was sent."""
    call = stub.Complete.future(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**values)), timeout=60)
    event(call.code().name)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED), call.details()
    if call.code() is not grpc.StatusCode.OK:
        assert dict(call.trailing_metadata())["field"] in values, call.details()
