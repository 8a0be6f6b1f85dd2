"""Parameters that can leave a sequence without any token to sample, which would fail it half way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence, Set

from pyengine.errors import InvalidRequestError


def check_no_dead_end(
    *,
    allowed_token_ids: Collection[int] | None,
    bad_words_token_ids: Sequence[Sequence[int]],
    min_tokens: int,
    stop_token_ids: Collection[int],
    vocab_size: int,
) -> None:
    """Refuse parameters that rule out every token at the first step, or at a later one that the sequence can come to.

    Args:
        allowed_token_ids: None: the whole vocabulary.
        bad_words_token_ids: each bad word's tokens.
        min_tokens: output tokens before any of `stop_token_ids` may come.
        stop_token_ids: end-of-sequence and stop ids.
        vocab_size: of the model.

    Raises:
        InvalidRequestError: naming allowed_token_ids, where the first step has nothing left, or bad_words.
    """
    words = [word for word in bad_words_token_ids if word]
    num_allowed = vocab_size if allowed_token_ids is None else len(set(allowed_token_ids))
    if len({word[-1] for word in words}) + len(stop_token_ids) < num_allowed:
        return
    allowed = set(range(vocab_size) if allowed_token_ids is None else allowed_token_ids)
    dead_end = _find_dead_end(words, allowed, allowed.difference(stop_token_ids), min_tokens)
    if dead_end == []:
        field = "bad_words" if allowed_token_ids is None else "allowed_token_ids"
        raise InvalidRequestError(field, "bad_words and min_tokens leave none of them to sample")
    if dead_end is not None:
        raise InvalidRequestError("bad_words", f"leave no token to sample after the tokens {dead_end}")


def _find_dead_end(words: Sequence[Sequence[int]], allowed: Set[int], going_on: Set[int], min_tokens: int) -> list[int] | None:
    """The first tokens, up to 20, of an output after which nothing can be sampled; None if there is no such output.

    What is forbidden after an output is what words forbid whose beginnings it ends with; so it is most after the longest of
    those, and only words' beginnings need be tried. An Aho-Corasick automaton (as `stop_strings.py` has) of the words finds for
    each the shorter ones that it ends with. So the time is linear in the words' tokens, whatever the size of the vocabulary; a
    client chooses both.

    Args:
        words: bad words, none of them empty.
        allowed: tokens that may come at all.
        going_on: those of them that do not stop the output. None of the others is in an output that goes on: each is masked, or
            ends it.
        min_tokens: output tokens before which only `going_on` may come.
    """
    following: list[dict[int, int]] = [{}]  # by state: the state after one more token of a word
    lasts: dict[int, set[int]] = {0: set()}  # by state: the last tokens of the words that lack nothing else
    for word in words:
        state = 0
        for token_id in word[:-1]:
            state = following[state].setdefault(token_id, len(following))
            if state == len(following):
                following.append({})
        lasts.setdefault(state, set()).add(word[-1])
        if following[state].setdefault(word[-1], len(following)) == len(following):
            following.append({})
    shorter = [0] * len(following)  # by state: that of the longest shorter beginning with which it ends
    is_word = [False] * len(following)  # whether a word ends there
    queue: deque[tuple[int, int, list[int]]] = deque([(0, 0, [])])  # a state, its number of tokens, the first 20 of them
    while queue:
        state, length, output = queue.popleft()
        # Where no word ends next that does not after a shorter one, the shorter one was tried.
        if state in lasts and (allowed if length >= min_tokens else going_on) <= _forbidden(state, lasts, shorter):
            return output
        for token_id, longer in following[state].items():
            end = shorter[state]
            while end and token_id not in following[end]:
                end = shorter[end]
            shorter[longer] = following[end].get(token_id, 0) if state else 0
            is_word[longer] = token_id in lasts.get(state, ()) or is_word[shorter[longer]]
            # The ends of an output that goes on are outputs that go on, so `shorter` is known of all that is looked up.
            if token_id in going_on and not is_word[longer]:
                queue.append((longer, length + 1, [*output, token_id][:20]))
    return None


def _forbidden(state: int, lasts: dict[int, set[int]], shorter: Sequence[int]) -> set[int]:
    """The tokens that end some word after the output of a state."""
    found = set(lasts[0])
    while state:
        found.update(lasts.get(state, ()))
        state = shorter[state]
    return found
