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


def comes_to_nothing(allowed: set[int], words: list[list[int]], min_tokens: int, stop: set[int]) -> bool:
    """By the definition, over every output: told apart by as many last tokens as words have, and by length up to min_tokens."""
    longest = max(map(len, words), default=1)
    alive: set[tuple[tuple[int, ...], int]] = {((), 0)}
    queue = list(alive)
    while queue:
        output, length = queue.pop()
        forbidden = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == tuple(word[:-1])}
        left = allowed - forbidden - (stop if length < min_tokens else set())
        if not left:
            return True
        for token_id in left - stop:
            longer = ((*output, token_id)[-longest:], min(length + 1, min_tokens))
            if longer not in alive:
                alive.add(longer)
                queue.append(longer)
    return False


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), vocab_size=st.integers(1, 5), min_tokens=st.integers(0, 4))
def test_longer_words_and_other_stop_ids(data: st.DataObject, vocab_size: int, min_tokens: int) -> None:
    tokens = st.integers(0, vocab_size - 1)
    allowed = data.draw(st.none() | st.lists(tokens, min_size=1, unique=True), label="allowed")
    stop = data.draw(st.sets(tokens, max_size=vocab_size), label="stop")
    words = data.draw(st.lists(st.lists(tokens, min_size=1, max_size=5), max_size=12), label="words")
    stuck = comes_to_nothing(set(range(vocab_size) if allowed is None else allowed), words, min_tokens, stop)
    event(f"stuck {stuck}")
    with pytest.raises(InvalidRequestError) if stuck else nullcontext():
        check_no_dead_end(
            allowed_token_ids=allowed,
            bad_words_token_ids=words,
            min_tokens=min_tokens,
            stop_token_ids=stop,
            vocab_size=vocab_size,
        )


class CountedToken(int):
    """A token id that counts how often a token was looked up or put into a set."""

    num_hashes = 0

    def __hash__(self) -> int:
        CountedToken.num_hashes += 1
        return super().__hash__()


@pytest.mark.parametrize(
    ("num_words", "word_length", "vocab_size"), [(200, 20, 2000), (1, 400, 50)], ids=["large vocabulary", "long word"]
)
def test_the_work_grows_with_the_words_plus_the_vocabulary(num_words: int, word_length: int, vocab_size: int) -> None:
    """Not with their product, nor with the square of a word's length: one client's request would hold up all others'."""
    rng = np.random.default_rng(0)
    # Words go on with tokens that do not stop, and each of those ends one: every beginning is tried.
    words = [[*map(CountedToken, rng.integers(0, 10, word_length)), CountedToken(i % 10)] for i in range(num_words)]
    words += [[*words[0][:-1], CountedToken(i)] for i in range(10)]
    CountedToken.num_hashes = 0
    check_no_dead_end(
        allowed_token_ids=list(map(CountedToken, range(vocab_size))),
        bad_words_token_ids=words,
        min_tokens=0,
        stop_token_ids=list(map(CountedToken, range(10, vocab_size))),
        vocab_size=vocab_size,
    )
    assert 0 < CountedToken.num_hashes < 10 * (sum(map(len, words)) + vocab_size)


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
