"""Rule 11 by the schemas: what fits (or nearly fits) them is answered or refused by name, on both ports, with a real engine.

Nothing is INTERNAL or a 5xx (501 says that a legal request asks for what this engine cannot do), the next request is served,
and no block is lost. Lengths that are legal and would only take long are cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import schemathesis
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer
from schemathesis import GenerationMode

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.server.proto import inference_pb2 as pb

MAX_N, MAX_TOKENS = 3, 4  # what longer legal requests are cut to
CLIENT_ERRORS = (400, 401, 404, 405, 408, 413, 415, 422, 429, 499, 501)
FINE = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    args = EngineArgs(
        model=str(tiny_llama),
        served_model_name="tiny",
        device="cpu",
        num_kv_blocks=64,
        block_size=8,
        scheduling_policy="priority",
    )
    running = RunningServer(AsyncLLMEngine(LLMEngine(args)), http_port=0)
    yield running
    running.close()


def fuzzing(max_examples: int) -> Any:
    checks = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=checks, derandomize=True)


def check_unharmed(server: RunningServer) -> None:
    """The next request is served, and afterwards nothing is held."""
    request = pb.GenerateRequest(text="next", sampling=pb.SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(server.stub.Complete(request, timeout=60).choices[0].token_ids) == 2
    stats = server.engine.stats()
    assert (stats["num_requests"], stats["num_free_blocks"]) == (0, stats["num_blocks"])
    assert not server.engine.errored
    assert server.server.frontend.num_active == 0


# HTTP, from the served /openapi.json


def cut_body(body: Any) -> Any:
    if isinstance(body, dict):
        if isinstance(body.get("n"), int) and MAX_N < body["n"] <= 16384:
            body["n"] = MAX_N
        for name in ("max_tokens", "max_completion_tokens"):
            value = body.get(name)
            if name in body and (
                value is None or (isinstance(value, int) and not isinstance(value, bool) and value > MAX_TOKENS)
            ):
                body[name] = MAX_TOKENS
        body.setdefault("max_tokens", MAX_TOKENS)
        if isinstance(body.get("min_tokens"), int) and body["min_tokens"] > MAX_TOKENS:
            body["min_tokens"] = MAX_TOKENS
    return body


def check_http(real: RunningServer, data: st.DataObject, operations: list[Any]) -> None:
    operation = data.draw(st.sampled_from(operations))
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.body else (GenerationMode.POSITIVE,)
    case = data.draw(operation.as_strategy(generation_mode=data.draw(st.sampled_from(modes))))
    case.body = cut_body(case.body)
    response = case.call(timeout=60)
    status = response.status_code
    assert status < 300 or status in CLIENT_ERRORS, (status, response.content[:500])
    if status >= 300 and "json" in response.headers["content-type"][0]:
        error = json.loads(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert status != 501 or error["param"]
    if status == 200 and isinstance(case.body, dict) and case.body.get("stream") is True:
        events = response.content.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        failures = [event for event in events[:-1] if "error" in json.loads(event.removeprefix("data: "))]
        assert not failures, failures


@pytest.fixture(scope="module")
def operations(real: RunningServer) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{real.base_url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= {operation.path for operation in found}
    return found


@pytest.mark.filterwarnings("ignore")  # Schemathesis' own
def test_any_body_of_the_http_schema(real: RunningServer, operations: list[Any]) -> None:
    fuzzing(150)(given(st.data())(lambda data: check_http(real, data, operations)))()
    check_unharmed(real)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_thousands_of_bodies_of_the_http_schema(real: RunningServer, operations: list[Any]) -> None:
    fuzzing(3000)(given(st.data())(lambda data: check_http(real, data, operations)))()
    check_unharmed(real)


# gRPC, from the messages' descriptors

_INTS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}


def field_values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type in _INTS:
        low, high = _INTS[field.type]
        return st.one_of(st.integers(-2, 5), st.integers(low, high))
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.one_of(st.floats(0, 2), st.floats(), st.sampled_from([math.nan, math.inf, 5e-324]))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.one_of(st.sampled_from(["tiny", "user", "a b", ""]), st.text(st.characters(codec="utf-8"), max_size=12))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values])
    assert field.type == FieldDescriptor.TYPE_MESSAGE
    return messages(field.message_type, depth + 1)


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Any message of a type, most fields unset."""

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message: Any = GetMessageClass(descriptor)()
        fields = [field for field in descriptor.fields if depth < 4 or field.type != FieldDescriptor.TYPE_MESSAGE]
        if not fields:
            return message  # type: ignore[no-any-return]
        for field in draw(st.lists(st.sampled_from(fields), unique_by=lambda field: field.name, max_size=4)):
            entries = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
            if entries is not None and entries.GetOptions().map_entry:
                key, value = entries.fields_by_name["key"], entries.fields_by_name["value"]
                for k, v in draw(st.dictionaries(field_values(key, depth), field_values(value, depth), max_size=3)).items():
                    if value.type == FieldDescriptor.TYPE_MESSAGE:
                        getattr(message, field.name)[k].CopyFrom(v)
                    else:
                        getattr(message, field.name)[k] = v
            elif field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(field_values(field, depth), max_size=3)))
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                getattr(message, field.name).CopyFrom(draw(field_values(field, depth)))
            else:
                setattr(message, field.name, draw(field_values(field, depth)))
        return message  # type: ignore[no-any-return]

    return build()


def cut_message(message: Any) -> None:
    sampling = message.sampling
    if MAX_N < sampling.n <= 16384:
        sampling.n = MAX_N
    if sampling.max_tokens == -1 or sampling.max_tokens > MAX_TOKENS or not sampling.HasField("max_tokens"):
        sampling.max_tokens = MAX_TOKENS


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Message]:
    """A method, and a request of its: an input that works most of the time, and any values in some fields."""
    method = draw(
        st.sampled_from(["Generate", "Complete", "Generate", "Complete", "Tokenize", "Detokenize", "Abort", "GetModelInfo"])
    )
    descriptor = pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name[method].input_type
    message: Any = draw(messages(descriptor))
    if method in ("Generate", "Complete"):
        if draw(st.booleans()):
            message.sampling.CopyFrom(draw(messages(pb.SamplingParams.DESCRIPTOR)))
        if draw(st.integers(0, 3)):
            message.text = "a text"
        for name in ("model", "lora_name", "structured_output", "media"):
            if draw(st.integers(0, 3)):
                message.ClearField(name)
        cut_message(message)
    return method, message


def outcome(call: Any, data: Any) -> tuple[grpc.StatusCode, str | None, str]:
    """Status, the field that the trailer names, and details."""
    if hasattr(call, "future"):  # one answer
        running = call.future(data, timeout=60)
        running.exception()
    else:
        running = call(data, timeout=60)
        with suppress(grpc.RpcError):
            list(running)
    return running.code(), dict(running.trailing_metadata() or ()).get("field"), running.details()


def check_grpc(real: RunningServer, method: str, message: Message) -> None:
    code, field, details = outcome(getattr(real.stub, method), message)
    assert code in FINE, (code, details, message)
    assert field or code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND), (details, message)


def test_any_message(real: RunningServer) -> None:
    fuzzing(300)(given(requests())(lambda request: check_grpc(real, *request)))()
    check_unharmed(real)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_messages(real: RunningServer) -> None:
    fuzzing(5000)(given(requests())(lambda request: check_grpc(real, *request)))()
    check_unharmed(real)


@pytest.mark.parametrize("method", sorted(pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name))
def test_bytes_that_may_be_no_message(real: RunningServer, method: str) -> None:
    streams = pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name[method].server_streaming
    make = real.channel.unary_stream if streams else real.channel.unary_unary
    call = make(f"/pyengine.v1.Inference/{method}")

    def check(data: bytes) -> None:
        code, _, details = outcome(call, data)
        assert code in FINE, (code, details)

    fuzzing(25)(given(st.binary(max_size=40))(check))()
    check_unharmed(real)
