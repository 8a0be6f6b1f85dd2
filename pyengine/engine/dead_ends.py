"""Parameters that can leave a sequence without any token to sample, which would fail it half way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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

    What a bad word of several tokens forbids depends on the tokens before. After any of these, what is forbidden is what words
    forbid whose beginnings the output ends with; so it is most after the longest of those, and only words' beginnings need be
    tried.

    Args:
        allowed_token_ids: None: the whole vocabulary.
        bad_words_token_ids: each bad word's tokens.
        min_tokens: output tokens before any of `stop_token_ids` may come.
        stop_token_ids: end-of-sequence and stop ids.
        vocab_size: of the model.

    Raises:
        InvalidRequestError: naming allowed_token_ids, where the first step has nothing left, or bad_words.
    """
    words = [tuple(word) for word in bad_words_token_ids if word]
    num_allowed = vocab_size if allowed_token_ids is None else len(set(allowed_token_ids))
    if len({word[-1] for word in words}) + len(stop_token_ids) < num_allowed:
        return
    allowed = set(range(vocab_size) if allowed_token_ids is None else allowed_token_ids)
    lasts: dict[tuple[int, ...], set[int]] = {}  # by a word's beginning: the tokens that must not follow it
    for word in words:
        lasts.setdefault(word[:-1], set()).add(word[-1])

    def left_after(output: tuple[int, ...]) -> set[int]:
        left = allowed.difference(*(lasts.get(output[i:], ()) for i in range(len(output) + 1)))
        return left.difference(stop_token_ids) if len(output) < min_tokens else left

    if not left_after(()):
        field = "bad_words" if allowed_token_ids is None else "allowed_token_ids"
        raise InvalidRequestError(field, "bad_words and min_tokens leave none of them to sample")
    for output in lasts:
        # What goes on holds no stop token: each is masked, or ends it.
        is_reachable = all(output[i] in left_after(output[:i]).difference(stop_token_ids) for i in range(len(output)))
        if is_reachable and not left_after(output):
            raise InvalidRequestError("bad_words", f"leave no token to sample after the tokens {list(output)[:20]}")
