"""The methods of pyengine.v1.Inference: what goes in reaches the engine, what comes out reaches the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fake_engine import FakeRequest, output, token_text
from running_server import RunningServer

from pyengine.inputs import ChatPrompt, TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, Logprob, RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.server.proto import inference_pb2 as pb


def generate(server: RunningServer, **fields: object) -> list[pb.GenerateResponse]:
    return list(server.stub.Generate(pb.GenerateRequest(**fields), timeout=60))


def test_generate_streams_deltas_and_finishes_each_choice_once(server: RunningServer) -> None:
    messages = generate(server, text="abc", sampling=pb.SamplingParams(n=2, max_tokens=4))
    for index in range(2):
        mine = [message for message in messages if message.index == index]
        assert [list(message.token_ids) for message in mine] == [[10], [11], [12], [13]]
        assert "".join(message.text for message in mine) == "t10 t11 t12 t13 "
        assert [message.HasField("finish") for message in mine] == [False, False, False, True]
        finish = mine[-1].finish
        assert finish.reason == pb.FINISH_REASON_LENGTH
        assert finish.WhichOneof("matched_stop") is None
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (4, 4, 2)
        assert not finish.HasField("cumulative_logprob")
    assert len({message.request_id for message in messages}) == 1
    assert not any(message.HasField("prompt") for message in messages)


def test_complete_answers_with_all_choices_and_the_whole_usage(server: RunningServer) -> None:
    request = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(n=3, max_tokens=4), request_id="mine")
    response = server.stub.Complete(request, timeout=60)
    assert (response.request_id, response.model) == ("mine", "fake")
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert all(choice.text == "t10 t11 t12 t13 " for choice in response.choices)
    assert all(choice.finish.usage.completion_tokens == 4 for choice in response.choices)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.cached_tokens) == (4, 12, 2)
    assert server.engine.requests[0].params.output_kind is RequestOutputKind.FINAL_ONLY


def test_unset_sampling_fields_mean_the_documented_defaults(server: RunningServer) -> None:
    generate(server, text="a")
    assert server.engine.requests[0].params == SamplingParams(output_kind=RequestOutputKind.DELTA)


def test_every_sampling_field_reaches_the_engine(server: RunningServer) -> None:
    values = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "seed": -(2**63 - 1),
        "max_tokens": 7,
        "min_tokens": 3,
        "stop": ["x", "yy"],
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "detokenize": True,
        "logprobs": 2,
        "prompt_logprobs": 0,
        "logit_bias": {3: -100.0, 4: 2.5},
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2, 3],
    }
    message = pb.SamplingParams(**values | {"allowed_token_ids": pb.TokenIds(ids=[1, 2, 3])})
    generate(server, text="a", sampling=message)
    expected = SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
    assert server.engine.requests[0].params == expected
    # Nothing that the engine knows is missing from the API, and nothing that the API offers from this test.
    engine_fields = set(SamplingParams.__dataclass_fields__) - {"output_kind"}
    api_fields = set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - {"best_of", "beam_search"}
    assert set(values) == engine_fields == api_fields


def test_max_tokens_minus_one_means_up_to_the_limit(server: RunningServer) -> None:
    generate(server, text="a", sampling=pb.SamplingParams(max_tokens=-1))
    assert server.engine.requests[0].params.max_tokens is None


def test_the_three_inputs(server: RunningServer) -> None:
    chat = pb.ChatInput(
        messages=[
            pb.ChatMessage(role="system", content="be brief"),
            pb.ChatMessage(role="user", name="Ada", parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")]),
        ]
    )
    chat.chat_template_kwargs.update({"depth": 3, "ratio": 0.5, "on": True, "list": [1, None, {"k": "v"}]})
    generate(server, text="abc", add_special_tokens=False)
    generate(server, token_ids=pb.TokenIds(ids=[5, 6, 7]))
    generate(server, chat=chat)
    text, tokens, messages = (request.prompt for request in server.engine.requests)
    assert text == TextPrompt("abc", add_special_tokens=False)
    assert tokens == TokensPrompt([5, 6, 7])
    assert messages == ChatPrompt(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab", "name": "Ada"}],
        chat_template_kwargs={"depth": 3, "ratio": 0.5, "on": True, "list": [1, None, {"k": "v"}]},
    )
    assert isinstance(messages.chat_template_kwargs["depth"], int)


def test_continuing_the_last_message_adds_no_generation_prompt(server: RunningServer) -> None:
    generate(
        server, chat=pb.ChatInput(messages=[pb.ChatMessage(role="assistant", content="Sure")], continue_final_message=True)
    )
    prompt = server.engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_fields_win_over_headers(server: RunningServer) -> None:
    headers = (("x-priority", "-3"), ("x-tenant", "acme"), ("x-cache-salt", "pepper"), ("x-request-id", "from-header"))
    call = server.stub.Generate(pb.GenerateRequest(text="a"), metadata=headers, timeout=60)
    assert ("x-request-id", "from-header") in call.initial_metadata()
    assert {message.request_id for message in call} == {"from-header"}
    request = pb.GenerateRequest(text="a", request_id="from-field", priority=2, cache_salt="salt")
    list(server.stub.Generate(request, metadata=headers, timeout=60))
    first, second = server.engine.requests
    assert (first.request_id, first.priority, first.cache_salt, first.tenant) == ("from-header", -3, "pepper", None)
    assert (second.request_id, second.priority, second.cache_salt, second.tenant) == ("from-field", 2, "salt", None)


def test_request_id_is_known_before_the_first_token(server: RunningServer) -> None:
    server.engine.hold = 0
    call = server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60)
    request_id = dict(call.initial_metadata())["x-request-id"]
    assert server.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=60).aborted
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    assert error.value.code() is grpc.StatusCode.CANCELLED


def test_echo_returns_the_prompt_once(server: RunningServer) -> None:
    first, *rest = generate(server, text="abc", echo=True, sampling=pb.SamplingParams(n=2, max_tokens=2))
    assert first.prompt.text == "abc"
    assert list(first.prompt.token_ids) == [0, 97, 98, 99]
    assert not any(message.HasField("prompt") for message in rest)
    from_ids = server.stub.Complete(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), echo=True), timeout=60)
    assert from_ids.prompt.text == token_text(5) + token_text(6)
    assert list(from_ids.prompt.token_ids) == [5, 6]


def test_logprobs_hold_the_token_and_the_asked_for_alternatives(server: RunningServer) -> None:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2, logprobs=2))
    streamed = list(server.stub.Generate(request, timeout=60))
    (choice,) = server.stub.Complete(request, timeout=60).choices
    assert [position for message in streamed for position in message.logprobs] == list(choice.logprobs)
    position = choice.logprobs[0]
    assert (position.token.token_id, position.token.rank, position.token.logprob) == (10, 3, -1.5)
    assert (position.token.text, position.token.token_bytes) == ("t10 ", b"t10 ")
    assert [(other.token_id, other.rank, other.logprob) for other in position.top] == [(0, 1, -0.25), (1, 2, -0.5)]
    assert choice.finish.cumulative_logprob == -3.0
    only_token = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2, logprobs=0))
    (choice,) = server.stub.Complete(only_token, timeout=60).choices
    assert [(position.token.token_id, len(position.top)) for position in choice.logprobs] == [(10, 0), (11, 0)]


def test_prompt_logprobs_leave_the_first_position_empty(server: RunningServer) -> None:
    def script(request: FakeRequest) -> Iterator[RequestOutput]:
        positions = [None, {98: Logprob(-0.5, 2), 4: Logprob(-0.1, 1)}]
        choice = CompletionOutput(0, "x", [9], finish_reason="length")
        yield output(request, [choice], finished=True, prompt_logprobs=positions)

    server.engine.script = script
    request = pb.GenerateRequest(text="b", sampling=pb.SamplingParams(max_tokens=1, prompt_logprobs=1), add_special_tokens=True)
    for info in (server.stub.Complete(request, timeout=60).prompt, next(server.stub.Generate(request, timeout=60)).prompt):
        assert not info.token_ids  # without echo
        assert not info.logprobs[0].HasField("token")
        assert info.logprobs[1].token.token_id == 98
        assert [other.token_id for other in info.logprobs[1].top] == [4]


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [("stop", None, None), ("stop", "END", "stop_text"), ("stop", 7, "stop_token_id"), ("length", None, None)],
)
def test_rule_8_finish_says_what_matched(
    server: RunningServer, reason: Any, stop_reason: int | str | None, expected: str | None
) -> None:
    def script(request: FakeRequest) -> Iterator[RequestOutput]:
        choice = CompletionOutput(0, "x", [9], finish_reason=reason, stop_reason=stop_reason)
        yield output(request, [choice], finished=True)

    server.engine.script = script
    finish = generate(server, text="a")[-1].finish
    assert finish == server.stub.Complete(pb.GenerateRequest(text="a"), timeout=60).choices[0].finish
    assert finish.reason == {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}[reason]
    assert finish.WhichOneof("matched_stop") == expected
    assert expected is None or getattr(finish, expected) == stop_reason


def test_rule_8_no_empty_messages(server: RunningServer) -> None:
    """A choice with nothing new, its text held back or its sibling's turn, sends nothing."""

    def script(request: FakeRequest) -> Iterator[RequestOutput]:
        yield output(request, [CompletionOutput(0, "", []), CompletionOutput(1, "b", [2])], finished=False)
        yield output(request, [CompletionOutput(0, "", [], finish_reason="stop")], finished=False)
        yield output(request, [CompletionOutput(1, "", [], finish_reason="stop")], finished=True)

    server.engine.script = script
    messages = generate(server, text="a", sampling=pb.SamplingParams(n=2))
    assert [(message.index, message.text, message.HasField("finish")) for message in messages] == [
        (1, "b", False),
        (0, "", True),
        (1, "", True),
    ]


def test_token_ids_only(server: RunningServer) -> None:
    messages = generate(server, token_ids=pb.TokenIds(ids=[4]), sampling=pb.SamplingParams(detokenize=False, max_tokens=2))
    assert [(message.text, list(message.token_ids)) for message in messages] == [("", [10]), ("", [11])]


def test_model_info(shared_server: RunningServer) -> None:
    info = shared_server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert info == pb.GetModelInfoResponse(
        model="fake",
        architecture="LlamaForCausalLM",
        max_model_len=256,
        vocab_size=512,
        bos_token_id=0,
        eos_token_ids=[1, 3],
        dtype="float32",
        supports_text=True,
        supports_chat=True,
        max_logprobs=20,
        server_version="1.2.3",
    )


def test_tokenize_and_detokenize(shared_server: RunningServer) -> None:
    stub = shared_server.stub
    assert list(stub.Tokenize(pb.TokenizeRequest(text="ab"), timeout=60).token_ids) == [0, 97, 98]
    assert list(stub.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False), timeout=60).token_ids) == [97, 98]
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="c")])
    assert list(stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=60).token_ids) == [99]
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 2]), timeout=60).text == "t1 t2 "


def test_only_the_served_model_is_served(shared_server: RunningServer) -> None:
    stub = shared_server.stub
    assert stub.Complete(pb.GenerateRequest(text="a", model="fake"), timeout=60).model == "fake"
    calls = [
        (stub.Complete, pb.GenerateRequest(text="a", model="other")),
        (stub.Tokenize, pb.TokenizeRequest(text="a", model="other")),
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=[1], model="other")),
    ]
    for method, request in calls:
        with pytest.raises(grpc.RpcError) as error:
            method(request, timeout=60)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'other'" in error.value.details()
