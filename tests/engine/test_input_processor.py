"""Prompts and parameters against the model: rules 11, 13 and 19 of the behaviour list."""

from __future__ import annotations

from typing import Any

import pytest
import sample_tokenizers
from fake_executor import fake_config
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pyengine.engine.detokenizer import BYTE_LEVEL_ALPHABET
from pyengine.engine.input_processor import MAX_BAD_WORDS, MAX_STOP_CHARS, InputProcessor
from pyengine.engine.prompt_bound import prompt_bound
from pyengine.errors import InvalidRequestError, UnsupportedError
from pyengine.inputs import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from pyengine.sampling_params import SamplingParams

TOKENIZER = sample_tokenizers.byte_level()
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('roles must be good') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}{{ extra }}"
)


def processor(tokenizer: Any = TOKENIZER, **args: Any) -> InputProcessor:
    return InputProcessor(fake_config(vocab_size=len(TOKENIZER), skip_tokenizer_init=tokenizer is None, **args), tokenizer)


def refuse(prompt: Any, field: str, made: InputProcessor | None = None, params: Any = None, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        (made or processor()).process("r", prompt, params or SamplingParams(), **options)
    assert caught.value.field == field
    return caught.value.message


def test_text_token_ids_and_defaults() -> None:
    source = processor().process("r", TextPrompt("the cat"), SamplingParams(seed=3, max_tokens=9))
    ids = TOKENIZER("the cat").input_ids
    assert (source.prompt, source.prompt_token_ids, source.max_total_tokens) == ("the cat", ids, len(ids) + 9)
    assert source.stop_token_ids == {1, TOKENIZER.eos_token_id}
    assert (source.seed, source.stops, source.bad_words_token_ids) == (3, None, [])
    source = processor().process("r", TokensPrompt((5, 6)), SamplingParams(stop=["a"], stop_token_ids=[8], ignore_eos=True))
    assert (source.prompt, source.prompt_token_ids, source.stop_token_ids) == (None, [5, 6], {8})
    assert source.stops is not None
    with pytest.raises(AttributeError):
        source.seed = 4  # type: ignore[misc]


def test_seed_minus_one_is_none() -> None:
    """As with vLLM, whose clients send it for "any": two such requests draw different tokens."""
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2


def seeds_of(made: InputProcessor, *params: SamplingParams) -> list[int]:
    return [made.process("r", TokensPrompt([5]), p).seed for p in params]


def test_unseeded_requests_draw_their_seeds_from_the_engines_by_order_of_arrival() -> None:
    unseeded, seeded = SamplingParams(), SamplingParams(seed=7)
    first, second = processor(seed=42), processor(seed=42)
    a = seeds_of(first, unseeded, unseeded, unseeded)
    refuse(TokensPrompt([5] * 300), "prompt_token_ids", second)
    refuse(TokensPrompt([5]), "max_tokens", second, SamplingParams(max_tokens=300))
    b, seven, *rest = seeds_of(second, unseeded, seeded, unseeded, unseeded)
    assert ([b, *rest], seven) == (a, 7), "neither those with a seed of their own nor refused ones take one"
    assert len({*a, *seeds_of(processor(seed=43), unseeded, unseeded)}) == 5
    assert all(0 <= seed < 2**63 for seed in a)
    assert len({*seeds_of(processor(), unseeded, unseeded), *seeds_of(processor(), unseeded)}) == 3


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "prompt"),
        (TokensPrompt([]), "prompt_token_ids"),
        (TokensPrompt([5, -1]), "prompt_token_ids"),
        (TokensPrompt([5, 10**6]), "prompt_token_ids"),
        (TokensPrompt([2**80]), "prompt_token_ids"),
        (TokensPrompt([1.5]), "prompt_token_ids"),  # type: ignore[list-item]
        (TokensPrompt([5, True]), "prompt_token_ids"),
        (TokensPrompt("text"), "prompt_token_ids"),  # type: ignore[arg-type]
        (TokensPrompt(5), "prompt_token_ids"),  # type: ignore[arg-type]
        (TextPrompt(5), "prompt"),  # type: ignore[arg-type]
        (TextPrompt("a\ud800"), "prompt"),
        (5, "prompt"),
        (None, "prompt"),
    ],
)
def test_bad_prompts_name_the_field(prompt: Any, field: str) -> None:
    """Rule 11."""
    refuse(prompt, field)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=[3, 10**6]), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
        (SamplingParams(stop=["a\ud800"]), "stop"),
        (SamplingParams(stop=["a" * (MAX_STOP_CHARS + 1)]), "stop"),
        (SamplingParams(bad_words=["\udfff"]), "bad_words"),
        ({"temperature": 1}, "sampling_params"),
    ],
)
def test_ids_out_of_the_vocabulary_and_bad_text_name_the_field(params: Any, field: str) -> None:
    """Rule 11."""
    refuse(TextPrompt("the"), field, params=params)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": 2**40}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 4}, "cache_salt"),
        ({"tenant": ""}, "tenant"),
    ],
)
def test_bad_options_name_the_field(options: dict[str, Any], field: str) -> None:
    """Rule 11."""
    refuse(TextPrompt("the"), field, **options)


@pytest.mark.parametrize("edge", [-(2**31), 2**31 - 1])
def test_priorities_of_32_bits_are_taken_and_the_next_one_is_refused_with_the_bounds(edge: int) -> None:
    assert processor().process("r", TextPrompt("the"), SamplingParams(), priority=edge).priority == edge
    message = refuse(TextPrompt("the"), "priority", priority=edge + (1 if edge > 0 else -1))
    assert "[-2147483648, 2147483647]" in message


def test_too_long_for_the_model_is_refused_with_both_numbers() -> None:
    """Rule 13, and never clamped."""
    made = processor(num_kv_blocks=100)
    message = refuse(TokensPrompt([5] * 100), "max_tokens", made, SamplingParams(max_tokens=157))
    assert "100 tokens" in message
    assert "157, together 257; max_model_len is 256" in message
    message = refuse(TokensPrompt([5] * 256), "prompt_token_ids", made, SamplingParams(max_tokens=None))
    assert "256 tokens; max_model_len is 256" in message
    refuse(TextPrompt("a" * 300), "prompt", made)
    assert made.process("r", TokensPrompt([5] * 100), SamplingParams(max_tokens=156)).max_total_tokens == 256
    assert made.process("r", TokensPrompt([5] * 255), SamplingParams(max_tokens=None)).max_total_tokens == 256


@pytest.mark.parametrize(("num_blocks", "room"), [(100, 256), (3, 48)])
def test_a_cap_of_the_output_refuses_nothing_and_ends_what_has_no_limit(num_blocks: int, room: int) -> None:
    made, endless = processor(num_kv_blocks=num_blocks), SamplingParams(max_tokens=None)

    def end(num_prompt_tokens: int, params: SamplingParams = endless) -> int:
        return made.process("r", TokensPrompt([5] * num_prompt_tokens), params, max_output_tokens=20).max_total_tokens

    assert [end(4), end(room - 20), end(room - 19), end(room - 1)] == [24, room, room, room]
    assert end(4, SamplingParams(max_tokens=30)) == 34, "who sets a limit has been checked already"
    message = refuse(TokensPrompt([5] * room), "prompt_token_ids", made, endless, max_output_tokens=20)
    assert f"the prompt has {room} tokens; " in message


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    made = processor(num_kv_blocks=100)
    longest = max(map(len, TOKENIZER.get_vocab()))
    text = "a" * 256 * longest
    monkeypatch.setattr(made, "_encode", lambda *_: pytest.fail("it was tokenised"))
    message = refuse(TextPrompt(text), "prompt", made)
    assert message == f"the prompt has {len(text)} characters, 256 tokens or more; max_model_len is 256"
    monkeypatch.undo()
    assert len(made.tokenize(TextPrompt(text))[1]) == len(text)  # whoever only asks for tokens gets them


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str) -> None:
    tokenizer = getattr(sample_tokenizers, name)()
    bound = prompt_bound(tokenizer)
    assert bound is not None
    longest = max(tokenizer.get_vocab(), key=len)
    for text in (longest * 50, sample_tokenizers.TEXT * 20, " " * 99, "\n\n  " * 40, "\x04\x06" * 99):
        assert 1 <= bound.min_tokens(text) <= len(tokenizer(text, add_special_tokens=False).input_ids)


def test_the_bound_does_not_count_what_the_tokenizer_leaves_out() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(BYTE_LEVEL_ALPHABET) if c != "Ą"}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bound = prompt_bound(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert bound is not None
    assert tokenizer.encode("a\x04b\x04").tokens == ["a", "b"]
    assert (bound.max_chars, bound.min_tokens("a\x04b\x04")) == (1, 2)
    tokenizer.add_tokens([AddedToken("<x>", rstrip=True)])  # takes any number of spaces
    assert prompt_bound(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None
    assert prompt_bound(sample_tokenizers.metaspace()) is None  # fuses what it does not know


def test_too_many_bad_words_are_refused() -> None:
    words = [f"w{i}" for i in range(MAX_BAD_WORDS)]
    assert len(processor().process("r", TextPrompt("the"), SamplingParams(bad_words=words)).bad_words_token_ids) > len(words)
    assert "at most 1024 words, got 1025" in refuse(
        TextPrompt("the"), "bad_words", params=SamplingParams(bad_words=[*words, "x"])
    )
    assert "65536 characters" in refuse(TextPrompt("the"), "bad_words", params=SamplingParams(bad_words=["a" * 65537]))


def test_too_long_for_the_pool_is_refused_with_both_numbers() -> None:
    """Rule 13."""
    made = processor(num_kv_blocks=4)
    message = refuse(TokensPrompt([5] * 40), "max_tokens", made, SamplingParams(max_tokens=25))
    assert "together 65; the KV pool holds 64 tokens" in message
    assert made.process("r", TokensPrompt([5] * 40), SamplingParams(max_tokens=24)).max_total_tokens == 64
    assert made.process("r", TokensPrompt([5] * 40), SamplingParams(max_tokens=None)).max_total_tokens == 64


def test_bad_words_are_tokenised_at_the_start_and_after_a_space() -> None:
    source = processor().process("r", TextPrompt("the"), SamplingParams(bad_words=["the", " the", "cat"]))
    texts = [TOKENIZER.decode(ids) for ids in source.bad_words_token_ids]
    assert texts == ["the", " the", "cat", " cat"]


def test_without_a_tokenizer() -> None:
    made = processor(None)
    for prompt, field in ((TextPrompt("a"), "prompt"), (ChatPrompt([{"role": "user", "content": "a"}]), "messages")):
        assert "skip_tokenizer_init" in refuse(prompt, field, made)
    assert "skip_tokenizer_init" in refuse(TokensPrompt([5]), "stop", made, SamplingParams(stop="a"))
    assert "skip_tokenizer_init" in refuse(TokensPrompt([5]), "bad_words", made, SamplingParams(bad_words=["a"]))
    source = made.process("r", TokensPrompt([5]), SamplingParams())
    assert source.params.detokenize is False
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        made.detokenize([5])


@pytest.fixture
def chat_tokenizer() -> Any:
    tokenizer = sample_tokenizers.byte_level.__wrapped__()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat(made: InputProcessor, messages: Any, **options: Any) -> str:
    text, token_ids = made.tokenize(ChatPrompt(messages, **options))
    assert text is not None
    assert TOKENIZER.decode(token_ids) == text
    return text


def test_chat(chat_tokenizer: Any) -> None:
    made = processor(chat_tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat(made, messages) == "<user>a<assistant>b<go>"
    assert chat(made, messages, add_generation_prompt=False) == "<user>a<assistant>b"
    assert chat(made, messages, add_generation_prompt=False, continue_final_message=True) == "<user>a<assistant>b"
    assert chat(made, messages, chat_template_kwargs={"extra": "!"}) == "<user>a<assistant>b<go>!"
    assert chat(made, messages, chat_template="{{ messages|length }}") == "2"
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert chat(made, [{"role": "user", "content": parts}]) == "<user>x\ny<go>"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([], {}, "messages"),
        ("text", {}, "messages"),
        ({"role": "user", "content": "a"}, {}, "messages"),
        (["text"], {}, "messages"),
        ([{"content": "a"}], {}, "messages"),
        ([{"role": "", "content": "a"}], {}, "messages"),
        ([{"role": "user"}], {}, "messages"),
        ([{"role": "user", "content": 5}], {}, "messages"),
        ([{"role": "user", "content": None}], {}, "messages"),
        ([{"role": "user", "content": ["a"]}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages"),
        ([{"role": "bad", "content": "a"}], {}, "messages"),
        ([{"role": "user", "content": "a\ud800"}], {}, "messages"),
        ([{"role": "user", "content": "a"}], {"chat_template": "{{ 1 / 0 }}"}, "chat_template"),
        ([{"role": "user", "content": "a"}], {"chat_template": "{% if %}"}, "chat_template"),
        ([{"role": "user", "content": "a"}], {"chat_template": "{{ missing.name }}"}, "chat_template"),
        ([{"role": "user", "content": "a"}], {"continue_final_message": True}, "continue_final_message"),
        ([{"role": "user", "content": "a"}], {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_malformed_chats_name_the_field(chat_tokenizer: Any, messages: Any, options: dict[str, Any], field: str) -> None:
    """Rule 11."""
    refuse(ChatPrompt(messages, **options), field, processor(chat_tokenizer))


def test_a_null_content_is_refused_in_plain_words(chat_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": None}]
    assert refuse(ChatPrompt(messages), "messages", processor(chat_tokenizer)).endswith("message 1: content must not be null")


#: As models that call tools have it.
TOOL_TEMPLATE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% for t in m.tool_calls %}"
    "<call>{{ t.id }} {{ t.function.name }} {{ t.function.arguments | tojson }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_tool_calls_are_as_if_unsaid(chat_tokenizer: Any, nothing: Any) -> None:
    """Clients send an assistant's answer back with all its nulls."""
    made = processor(chat_tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": nothing}]
    assert chat(made, messages, chat_template=TOOL_TEMPLATE) == "<user>a<assistant>b"
    assert "tool_calls" in messages[1], "the client's own is left alone"
    refuse(ChatPrompt([{"role": "assistant", "tool_calls": nothing}]), "messages", made)
    refuse(ChatPrompt([{"role": "assistant", "content": None, "tool_calls": nothing}]), "messages", made)


def tool_call(**function: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f"} | function}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({"arguments": '{"city": "Köln", "days": [1, 2]}'}, '{"city": "Köln", "days": [1, 2]}'),
        ({"arguments": {"city": "Köln"}}, '{"city": "Köln"}'),
        ({"arguments": ""}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
    ],
)
def test_templates_get_the_arguments_of_tools_as_objects(chat_tokenizer: Any, function: Any, expected: str) -> None:
    """OpenAI's clients send their text, which a template would put into quotes once more."""
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [{"role": "assistant", "tool_calls": [tool_call(**function)], **content}]
        text = chat(processor(chat_tokenizer), messages, chat_template=TOOL_TEMPLATE)
        assert text == f"<call>c1 f {expected}"
        assert messages[0]["tool_calls"] == [tool_call(**function)], "the client's own is left alone"


@pytest.mark.parametrize(
    ("calls", "where"),
    [
        *[
            ([tool_call(), tool_call(arguments=bad)], "[1].function.arguments")
            for bad in ("{", "[1]", "5", "null", '"{}"', "{}{}", "[" * 100_000, '{"a": ' + "1" * 5000 + "}", 5, [1], True)
        ],
        ([{"id": "c1"}], "[0]"),
        ([{"function": "f"}], "[0]"),
        (["f"], "[0]"),
        ("f", ""),
        ({"function": {"name": "f"}}, ""),
        (5, ""),
    ],
)
def test_malformed_tool_calls_name_the_field(chat_tokenizer: Any, calls: Any, where: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    refuse(ChatPrompt(messages), f"messages[1].tool_calls{where}", processor(chat_tokenizer))


def test_text_that_is_no_unicode_once_it_is_rendered(chat_tokenizer: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": [tool_call(arguments='{"a": "\\ud800"}')]}]
    message = refuse(ChatPrompt(messages, chat_template=TOOL_TEMPLATE), "messages", processor(chat_tokenizer))
    assert "lone surrogate" in message


def test_a_template_says_why_it_refuses(chat_tokenizer: Any) -> None:
    message = refuse(ChatPrompt([{"role": "bad", "content": "a"}]), "messages", processor(chat_tokenizer))
    assert "roles must be good" in message


def test_images_are_not_supported(chat_tokenizer: Any) -> None:
    prompt: Prompt = ChatPrompt([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])
    with pytest.raises(UnsupportedError, match="image_url"):
        processor(chat_tokenizer).tokenize(prompt)


def test_no_chat_template() -> None:
    """Rule 19: chat is refused with a clear message, completions work."""
    message = refuse(ChatPrompt([{"role": "user", "content": "a"}]), "messages")
    assert "no chat template" in message
    assert processor().tokenize(TextPrompt("a"))[1]


def test_detokenize() -> None:
    made = processor()
    assert made.detokenize(TOKENIZER("日本<|end|>").input_ids) == "日本<|end|>"
    with pytest.raises(InvalidRequestError, match="token_ids"):
        made.detokenize([10**6])
