"""OpenAI's own Python client against the HTTP port, over a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import openai
import pytest
from fake_engine import VOCAB_SIZE, FakeEngine, FakeRequest, output
from running_server import RunningServer

from pyengine.inputs import ChatPrompt, TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
COUNTED = "t10 t11 t12 "


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(shared_http_server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(shared_http_server) as client:
        yield client


def last_request(server: RunningServer) -> Any:
    return server.engine.requests[-1]


def test_completion(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=3)
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (COUNTED, 0, "length", None)
    assert (answer.object, answer.model) == ("text_completion", "fake")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    request = last_request(shared_http_server)
    assert answer.id == f"cmpl-{request.request_id}"
    assert request.prompt == TextPrompt("ab")
    assert request.params == SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)


def test_defaults_are_openais(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    client.completions.create(model="fake", prompt="a")
    assert last_request(shared_http_server).params.max_tokens == 16
    client.chat.completions.create(model="fake", messages=MESSAGES)
    assert last_request(shared_http_server).params.max_tokens is None


def test_every_sampling_field_arrives(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    openais: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": -7, "stop": ["x", "y"], "max_tokens": 4},
        **{"presence_penalty": 0.25, "frequency_penalty": -0.5, "logit_bias": {"5": 1.5, "7": -100}},
    }
    vllms: dict[str, Any] = {
        **{"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [9]},
        **{"include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        **{"bad_words": ["z"], "allowed_token_ids": [5, 6, 10], "prompt_logprobs": 1},
    }
    routing = {"priority": -3, "cache_salt": "salt", "request_id": "mine"}
    expected: dict[str, Any] = {**openais, **vllms, "logit_bias": {5: 1.5, 7: -100}}
    for logprobs, create in (
        ({"logprobs": 2}, lambda **kw: client.completions.create(model="fake", prompt="a", **kw)),
        (
            {"logprobs": True, "top_logprobs": 2},
            lambda **kw: client.chat.completions.create(model="fake", messages=MESSAGES, **kw),
        ),
    ):
        answer = create(**openais, **logprobs, extra_body={**vllms, **routing})
        request = last_request(shared_http_server)
        assert request.params == SamplingParams(**expected, logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY)
        assert (request.priority, request.cache_salt, request.request_id) == (-3, "salt", "mine")
        assert [choice.index for choice in answer.choices] == [0, 1]


def test_headers_say_what_the_body_leaves_unsaid(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    headers = {"x-request-id": "theirs", "x-priority": "4", "x-cache-salt": "pepper", "x-tenant": "acme"}
    answer = client.completions.create(model="fake", prompt="a", extra_headers=headers)
    request = last_request(shared_http_server)
    assert (request.request_id, request.priority, request.cache_salt, request.tenant) == ("theirs", 4, "pepper", None)
    assert answer._request_id == "theirs"


def test_prompts_of_every_form(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    for prompt, expected in (
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([5, 6], [TokensPrompt([5, 6])]),
        ([[5, 6], [7]], [TokensPrompt([5, 6]), TokensPrompt([7])]),
    ):
        before = len(shared_http_server.engine.requests)
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, n=2)  # type: ignore[arg-type]
        requests = shared_http_server.engine.requests[before:]
        assert sorted((r.prompt for r in requests), key=repr) == sorted(expected, key=repr)
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4 * len(expected)
        assert answer.usage.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests)


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="fake", prompt="ab", max_tokens=2, logprobs=1, echo=True).choices[0]
    assert choice.text == "abt10 t11 "
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["t10 ", "t11 "]
    assert choice.logprobs.token_logprobs == [-1.5, -1.5]
    assert choice.logprobs.top_logprobs == [{"t10 ": -1.5, "t0 ": -0.25}, {"t11 ": -1.5, "t0 ": -0.25}]
    assert choice.logprobs.text_offset == [0, 4]
    choice = client.completions.create(model="fake", prompt=[5, 6], max_tokens=0, echo=True).choices[0]
    assert (choice.text, choice.finish_reason) == ("t5 t6 ", "length")


def _scores_its_prompt(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    """As an engine whose tokenizer puts token 0 before a text; its tokens' texts are those of their characters."""
    prompt: list[PositionLogprobs | None] = [None]
    prompt += [{token_id: Logprob(-1.0, 1, chr(token_id))} for token_id in request.prompt_token_ids[1:]]
    positions: list[PositionLogprobs] = [{10: Logprob(-0.5, 1, "t10 ")}]
    choice = CompletionOutput(0, "t10 ", [10], -0.5, positions, "length")
    yield output(request, [choice], finished=True, prompt_logprobs=prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_logprobs_begin_with_the_first_tokens_text(start_server: Any, stream: bool) -> None:
    server = start_server(FakeEngine(_scores_its_prompt), http_port=0)
    with client_of(server) as client:
        for prompt, tokens, offsets in (
            ("ab", ["t0 ", "a", "b", "t10 "], [0, 0, 1, 2]),  # the text has no token 0
            ([120, 98], ["t120 ", "b", "t10 "], [0, 5, 6]),  # ids are echoed as they are, so that it begins the text
        ):
            answer: Any = client.completions.create(model="fake", prompt=prompt, logprobs=0, echo=True, stream=stream)
            (choice,) = (choice for part in (answer if stream else [answer]) for choice in part.choices)
            assert choice.logprobs.tokens == tokens
            assert choice.logprobs.text_offset == offsets
            assert choice.logprobs.token_logprobs == [None, *[-1.0] * (len(tokens) - 2), -0.5]
            assert choice.logprobs.top_logprobs[0] is None


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3, echo=True, stream=True, logprobs=0))
    assert all(chunk.object == "text_completion" and chunk.usage is None for chunk in chunks)
    for index, prompt in enumerate("ab"):
        pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(piece.text for piece in pieces) == prompt + COUNTED
        assert [piece.finish_reason for piece in pieces] == [None, None, "length"]
        assert [offset for piece in pieces for offset in piece.logprobs.text_offset] == [0, 4, 8]  # type: ignore[union-attr]


def test_chat(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=3, logprobs=True, top_logprobs=2, n=2, user="u", store=False
    )
    assert (answer.object, answer.id) == ("chat.completion", f"chatcmpl-{last_request(shared_http_server).request_id}")
    assert last_request(shared_http_server).prompt == ChatPrompt(MESSAGES)
    for index, choice in enumerate(answer.choices):
        assert (choice.index, choice.finish_reason) == (index, "length")
        assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", COUNTED, None)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == COUNTED
        assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == COUNTED
        assert [top.logprob for top in choice.logprobs.content[0].top_logprobs] == [-0.25, -0.5]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 6)


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    *chunks, last = list(stream)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    for index in range(2):
        pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [piece.delta.role for piece in pieces] == ["assistant", None, None, None]
        assert "".join(piece.delta.content or "" for piece in pieces) == COUNTED
        assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
        logprobs = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content or []]
        assert [entry.token for entry in logprobs] == ["t10 ", "t11 ", "t12 "]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (11, 6, 17)


def test_usage_so_far_in_every_chunk(client: openai.OpenAI) -> None:
    """As vLLM's clients and benchmarks ask for it."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="fake", prompt="ab", max_tokens=3, stream=True, stream_options=options))
    assert [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks if chunk.usage] == [
        (3, 1),
        (3, 2),
        (3, 3),
        (3, 3),
    ]
    with pytest.raises(openai.BadRequestError, match="needs include_usage"):
        client.completions.create(
            model="fake",
            prompt="a",
            stream=True,
            stream_options={"continuous_usage_stats": True},  # type: ignore[call-overload]
        )


def test_chat_template_options(client: openai.OpenAI, shared_http_server: RunningServer) -> None:
    options = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=options)
    prompt = last_request(shared_http_server).prompt
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    assert prompt.chat_template_kwargs == {"enable_thinking": False}


def test_token_ids_where_asked_for(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    choice: Any = client.completions.create(model="fake", prompt="a", max_tokens=2, extra_body=extra).choices[0]
    assert (choice.prompt_token_ids, choice.token_ids) == ([0, 97], [10, 11])
    answer: Any = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, extra_body=extra)
    assert (len(answer.prompt_token_ids), answer.choices[0].token_ids) == (11, [10, 11])
    stream = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, n=2, stream=True, extra_body=extra)
    chunks: list[Any] = [chunk.to_dict() for chunk in stream]
    with_role = [chunk for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert [chunk.get("prompt_token_ids") for chunk in with_role] == [answer.prompt_token_ids] * 2
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 2
    plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, stream=True)
    assert not any("prompt_token_ids" in chunk.to_dict() for chunk in plain)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("fake").id == "fake"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("error", "param", "change"),
    [
        (openai.NotFoundError, "model", {"model": "other"}),
        (openai.BadRequestError, "temperature", {"temperature": 3}),
        (openai.BadRequestError, "temperature", {"temperature": "1"}),
        (openai.BadRequestError, "n", {"n": 0}),
        (openai.BadRequestError, "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        (openai.BadRequestError, "top_logprobs", {"top_logprobs": 2}),
        (openai.BadRequestError, "top_logprobs: must be in [0, 20]", {"top_logprobs": 21}),
        (openai.BadRequestError, "top_logprobs: must be in [0, 20]", {"top_logprobs": -1}),
        (openai.BadRequestError, "max_completion_tokens", {"max_completion_tokens": 0}),
        (openai.BadRequestError, "max_completion_tokens", {"max_completion_tokens": 10_000}),
        (openai.BadRequestError, "max_tokens", {"max_tokens": 10_000}),
        (openai.BadRequestError, "messages", {"messages": "hello"}),
        (openai.BadRequestError, "stop", {"stop": [""]}),
        (openai.BadRequestError, "seed", {"seed": 2**64}),
        (openai.BadRequestError, "logit_bias", {"logit_bias": {"five": 1}}),
        (openai.BadRequestError, "chat_template", {"extra_body": {"chat_template": "{{ messages }}"}}),
        (openai.BadRequestError, "cache_salt", {"extra_body": {"cache_salt": ""}}),
        (openai.BadRequestError, "x-cache-salt", {"extra_headers": {"x-cache-salt": ""}}),
        (openai.BadRequestError, "x-priority", {"extra_headers": {"x-priority": "high"}}),
        (openai.InternalServerError, "response_format", {"response_format": {"type": "json_object"}}),
        (openai.InternalServerError, "tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_clients_own_types(
    client: openai.OpenAI, error: type[openai.APIStatusError], param: str, change: Any, stream: bool
) -> None:
    """Also in streaming calls, where whatever shows by the first output is a status and not an event."""
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, "stream": stream} | change)
    assert caught.value.param == param.split(":")[0]
    assert param in caught.value.message
    assert caught.value.status_code == {openai.NotFoundError: 404, openai.BadRequestError: 400}.get(error, 501)
    assert caught.value.code == ("model_not_found" if param == "model" else None)


def test_stream_options_are_for_streams(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


def test_what_clients_send_and_this_server_has_no_use_for_is_let_pass(client: openai.OpenAI) -> None:
    extra = {"metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low", "response_format": {"type": "text"}}
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "tools", "logprobs"))
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=extra | nothing)
    assert answer.choices[0].finish_reason == "length"


UNSUPPORTED = {
    **{"length_penalty": 1.5, "early_stopping": True, "detokenize": False, "watermarking": True, "logits_processors": ["x"]},
    **{"logprob_token_ids": [1], "return_tokens_as_token_ids": True, "return_token_offsets": True, "stream_interval": 2},
    **{"kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "thinking_token_budget": 5, "repetition_detection": {}},
}
CHAT_UNSUPPORTED = {"documents": [{"text": "a"}], "mm_processor_kwargs": {"a": 1}, "add_special_tokens": True}


@pytest.mark.parametrize(("name", "value"), (UNSUPPORTED | CHAT_UNSUPPORTED).items())
def test_vllms_fields_that_cannot_be_honoured_are_refused(client: openai.OpenAI, name: str, value: Any) -> None:
    calls: list[Callable[..., Any]] = [partial(client.chat.completions.create, messages=MESSAGES)]
    if name in UNSUPPORTED:
        calls.append(partial(client.completions.create, prompt="a"))
    for call in calls:
        with pytest.raises(openai.InternalServerError) as caught:
            call(model="fake", extra_body={name: value})
        assert (caught.value.status_code, caught.value.param) == (501, name)
        assert call(model="fake", max_tokens=2, extra_body={name: None}).choices


def test_vllms_fields_at_their_defaults_are_let_pass(client: openai.OpenAI) -> None:
    defaults = {"length_penalty": 1.0, "detokenize": True, "stream_interval": 1, "vllm_xargs": {}, "add_special_tokens": False}
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=defaults | {"nobodys_field": 1})
    assert answer.choices[0].finish_reason == "length"


def test_a_prompt_outside_the_vocabulary(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt=[VOCAB_SIZE])
    assert caught.value.param == "prompt"
