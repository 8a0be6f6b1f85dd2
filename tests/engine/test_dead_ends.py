"""No accepted request comes to a step with nothing to sample: checked against trying every output."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from fake_executor import counting, fake_engine
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sample_tokenizers import byte_level

from pyengine.engine.dead_ends import check_no_dead_end
from pyengine.errors import InvalidRequestError
from pyengine.inputs import TokensPrompt
from pyengine.sampling.logits_processor import create_logits_processors
from pyengine.sampling_params import SamplingParams

VOCAB = 4
STOP = frozenset({3})


def can_be_stuck(allowed: list[int] | None, words: list[list[int]], min_tokens: int, length: int) -> bool:
    """By the sampler's own masks, over every output that they let come about."""
    params = SamplingParams(allowed_token_ids=allowed, min_tokens=min_tokens, max_tokens=16)
    alive = {()}
    for _ in range(length):
        following = set()
        for output in alive:
            logits = np.zeros(VOCAB, np.float32)
            for processor in create_logits_processors(
                params,
                prompt_token_ids=[0],
                output_token_ids=output,
                stop_token_ids=STOP,
                bad_words_token_ids=words,
                vocab_size=VOCAB,
            ):
                if processor.is_active():
                    processor.apply(logits)
            left = np.flatnonzero(logits > -np.inf).tolist()
            if not left:
                return True
            following |= {(*output, token_id) for token_id in left if token_id not in STOP}  # which end it
        alive = following
    return False


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    allowed=st.one_of(st.none(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB, unique=True)),
    words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=9),
    min_tokens=st.integers(0, 3),
)
def test_refused_if_and_only_if_it_can_get_stuck(allowed: list[int] | None, words: list[list[int]], min_tokens: int) -> None:
    stuck = can_be_stuck(allowed, words, min_tokens, 4)
    event(f"stuck {stuck}")
    with pytest.raises(InvalidRequestError, match=r"^(allowed_token_ids|bad_words): ") if stuck else nullcontext():
        check_no_dead_end(
            allowed_token_ids=allowed,
            bad_words_token_ids=words,
            min_tokens=min_tokens,
            stop_token_ids=STOP,
            vocab_size=VOCAB,
        )


def test_many_long_words_are_checked_fast() -> None:
    words = [list(word) for word in product(range(8), repeat=5)]
    with pytest.raises(InvalidRequestError, match="bad_words"):
        check_no_dead_end(
            allowed_token_ids=list(range(8)), bad_words_token_ids=words, min_tokens=0, stop_token_ids=STOP, vocab_size=8
        )


def test_the_engine_refuses_it_and_serves_the_next_request() -> None:
    tokenizer = byte_level()
    engine, _ = fake_engine(counting, tokenizer, vocab_size=len(tokenizer))
    first, second = tokenizer("ab", add_special_tokens=False).input_ids
    params = SamplingParams(max_tokens=4, allowed_token_ids=[first, second], bad_words=["aa", "ab"])
    with pytest.raises(InvalidRequestError, match=r"^bad_words: leave no token to sample after"):
        engine.add_request("stuck", TokensPrompt([first]), params)
    engine.add_request("fine", TokensPrompt([first]), params.replace(bad_words=["aa"]))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats()["num_free_blocks"] == engine.stats()["num_blocks"]
