"""Rule 11: any value in any field is either fine or one InvalidRequestError that names the field; the next request runs."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import sample_tokenizers
from fake_executor import counting, fake_engine

from pyengine.engine.llm_engine import LLMEngine
from pyengine.errors import InvalidRequestError
from pyengine.inputs import ChatPrompt, TextPrompt, TokensPrompt
from pyengine.sampling_params import SamplingParams

TOKENIZER = sample_tokenizers.byte_level()

NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    5,
    2**31,
    2**63,
    2**80,
    -(2**80),
    10**400,
    0.5,
    -0.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "\ud800",
    b"x",
    [],
    [None],
    [""],
    ["x"],
    [5],
    [-1],
    [2**40],
    [1.5],
    [math.nan],
    [[5]],
    (5,),
    {5},
    {},
    {5: 1.0},
    {5: math.nan},
    {5: "x"},
    {5: 10**400},
    {"5": 1.0},
    {-1: 1.0},
    {2**40: 1.0},
    object(),
]

#: fields whose value may make another field the wrong one
RELATED = {"max_tokens": {"min_tokens"}, "temperature": {"n"}, "detokenize": {"stop"}}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return fake_engine(counting, TOKENIZER, vocab_size=len(TOKENIZER), num_kv_blocks=512)[0]


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]


def still_serves(engine: LLMEngine) -> None:
    engine.add_request("next", TokensPrompt([5]), SamplingParams(max_tokens=2))
    finish(engine)
    assert not engine.errored


@pytest.mark.parametrize("field", [f.name for f in fields(SamplingParams)])
def test_sampling_parameters(engine: LLMEngine, field: str) -> None:
    refused = 0
    for value in NASTY:
        try:
            params = SamplingParams(**{"max_tokens": 4, field: value})
            engine.add_request("fuzzed", TextPrompt("the"), params)
        except InvalidRequestError as error:
            assert error.field in {field} | RELATED.get(field, set()), (value, str(error))
            assert len(str(error)) < 500
            refused += 1
        finish(engine)
    assert refused > 5
    still_serves(engine)


@pytest.mark.parametrize("form", [TextPrompt, TokensPrompt, ChatPrompt, lambda value: value])
def test_prompts(engine: LLMEngine, form: Any) -> None:
    refused = 0
    for value in NASTY:
        try:
            engine.add_request("fuzzed", form(value), SamplingParams(max_tokens=4))
        except InvalidRequestError as error:
            assert error.field in ("prompt", "prompt_token_ids", "messages")
            refused += 1
        finish(engine)
    assert refused > 20
    still_serves(engine)


@pytest.mark.parametrize("option", ["priority", "cache_salt", "tenant", "request_id"])
def test_options(engine: LLMEngine, option: str) -> None:
    refused = 0
    for value in NASTY:
        request_id = value if option == "request_id" else "fuzzed"
        options = {} if option == "request_id" else {option: value}
        try:
            engine.add_request(request_id, TokensPrompt([5]), SamplingParams(max_tokens=4), **options)
        except InvalidRequestError as error:
            assert error.field == option
            refused += 1
        finish(engine)
    assert refused > 5
    still_serves(engine)
