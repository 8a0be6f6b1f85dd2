"""What a request does to its logits before a token is chosen, in vLLM's order.

allowed_token_ids, bad_words, min_tokens, logit_bias, then the penalties. Every change but the first touches a few tokens of
the row only, and what a change needs to know of the past is kept up to date token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.errors import InvalidRequestError
from pyengine.sampling.row import Row
from pyengine.sampling_params import SamplingParams

MAX_LOGIT_BIAS = 100.0

Ids = npt.NDArray[np.intp]


class LogitsProcessor(Protocol):
    """One kind of change to one request's logits."""

    def is_active(self) -> bool:
        """Whether `apply` would do anything at this position."""

    def apply(self, logits: Row) -> None:
        """Change the row in place."""

    def append(self, token_id: int) -> None:
        """Take note of a generated token."""


class AllowedTokenIds:
    """Excludes every token that is not on the list."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._token_ids = _ids("allowed_token_ids", token_ids, vocab_size)

    def is_active(self) -> bool:
        return True

    def apply(self, logits: Row) -> None:
        allowed = logits[self._token_ids]
        logits.fill(-np.inf)
        logits[self._token_ids] = allowed

    def append(self, token_id: int) -> None:
        pass


class BadWords:
    """Excludes a word's last token where the generated tokens end with all the others."""

    def __init__(self, words: Sequence[Sequence[int]], output_token_ids: Sequence[int], vocab_size: int) -> None:
        self._single: list[int] = []
        self._by_prefix: list[tuple[list[int], int]] = []
        for word in words:
            _ids("bad_words", word, vocab_size)
            if len(word) == 1:
                self._single.append(word[0])
            elif word:
                self._by_prefix.append((list(word[:-1]), word[-1]))
        self._longest = max((len(prefix) for prefix, _ in self._by_prefix), default=0)
        self._tail = list(output_token_ids[-self._longest :]) if self._longest else []

    def is_active(self) -> bool:
        return bool(self._single or self._by_prefix)

    def apply(self, logits: Row) -> None:
        logits[self._single] = -np.inf
        for prefix, last in self._by_prefix:
            if self._tail[-len(prefix) :] == prefix:
                logits[last] = -np.inf

    def append(self, token_id: int) -> None:
        if self._longest:
            self._tail.append(token_id)
            del self._tail[: -self._longest]


class MinTokens:
    """Excludes end-of-sequence and stop ids until `min_tokens` tokens are generated."""

    def __init__(self, min_tokens: int, stop_token_ids: Iterable[int], num_output_tokens: int, vocab_size: int) -> None:
        # A stop id beyond the vocabulary is legal (a tokenizer may have more ids than the model), and never sampled.
        self._stop_token_ids = np.array([i for i in sorted(stop_token_ids) if 0 <= i < vocab_size], dtype=np.intp)
        self._missing = min_tokens - num_output_tokens

    def is_active(self) -> bool:
        return self._missing > 0 and len(self._stop_token_ids) > 0

    def apply(self, logits: Row) -> None:
        logits[self._stop_token_ids] = -np.inf

    def append(self, token_id: int) -> None:
        self._missing -= 1


class LogitBias:
    """Adds to logits, at most 100 either way."""

    def __init__(self, logit_bias: Mapping[int, float], vocab_size: int) -> None:
        self._token_ids = _ids("logit_bias", logit_bias, vocab_size)
        bias = np.array([logit_bias[int(i)] for i in self._token_ids], dtype=np.float64)
        self._bias = np.clip(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).astype(np.float32)

    def is_active(self) -> bool:
        return True

    def apply(self, logits: Row) -> None:
        logits[self._token_ids] += self._bias

    def append(self, token_id: int) -> None:
        pass


class Penalties:
    """Repetition penalty on prompt and generated tokens; frequency and presence penalty on generated ones.

    The tokens seen so far and their counts are arrays that grow by doubling.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        seen = (
            _ids("prompt_token_ids", prompt_token_ids, vocab_size) if params.repetition_penalty != 1 else np.empty(0, np.intp)
        )
        self._num_seen = len(seen)
        self._token_ids = seen
        self._counts = np.zeros(len(seen), dtype=np.int32)  # in the output; 0 for a token of the prompt only
        self._index = {token_id: i for i, token_id in enumerate(seen.tolist())}
        for token_id in output_token_ids:
            self.append(token_id)

    def is_active(self) -> bool:
        return self._num_seen > 0

    def apply(self, logits: Row) -> None:
        token_ids, counts = self._token_ids[: self._num_seen], self._counts[: self._num_seen]
        values = logits[token_ids]
        if self._repetition != 1:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts.astype(np.float32)
        values -= self._presence * (counts > 0)
        logits[token_ids] = values

    def append(self, token_id: int) -> None:
        index = self._index.get(token_id)
        if index is None:
            index = self._num_seen
            if index == len(self._token_ids):
                room = max(16, index)
                self._token_ids = np.concatenate([self._token_ids, np.zeros(room, dtype=np.intp)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
            self._token_ids[index] = token_id
            self._index[token_id] = index
            self._num_seen += 1
        self._counts[index] += 1


def create_logits_processors(
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    stop_token_ids: Iterable[int],
    bad_words_token_ids: Sequence[Sequence[int]],
    vocab_size: int,
) -> list[LogitsProcessor]:
    """The changes that a request asks for, in the order in which they apply; an empty list for most requests.

    Raises:
        InvalidRequestError: naming the field that holds an id outside the vocabulary.
    """
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        processors.append(AllowedTokenIds(params.allowed_token_ids, vocab_size))
    if bad_words_token_ids:
        processors.append(BadWords(bad_words_token_ids, output_token_ids, vocab_size))
    if params.min_tokens > len(output_token_ids):
        processors.append(MinTokens(params.min_tokens, stop_token_ids, len(output_token_ids), vocab_size))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias, vocab_size))
    if params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0:
        processors.append(Penalties(params, prompt_token_ids, output_token_ids, vocab_size))
    return processors


def _ids(field: str, token_ids: Iterable[int], vocab_size: int) -> Ids:
    """Distinct ids, ascending."""
    array = np.unique(np.fromiter(token_ids, dtype=np.intp))
    if len(array) and (array[0] < 0 or array[-1] >= vocab_size):
        wrong = array[0] if array[0] < 0 else array[-1]
        raise InvalidRequestError(field, f"token id {wrong} is outside the vocabulary of {vocab_size}")
    return array
