"""From a prompt and its parameters to token ids that fit the model, or to one clear error. Touches no engine state."""

from __future__ import annotations

import operator
import random
import reprlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyengine.config import EngineConfig
from pyengine.engine.chat import render_chat
from pyengine.engine.dead_ends import check_no_dead_end
from pyengine.engine.prompt_bound import PromptBound, prompt_bound
from pyengine.engine.stop_strings import StopAutomaton
from pyengine.errors import InvalidRequestError
from pyengine.inputs import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from pyengine.sampling_params import SamplingParams

#: Characters of all stop strings of a request; the automaton has a state for each.
MAX_STOP_CHARS = 65536
#: Bad words of a request, which each step compares the output with, and their characters.
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 65536
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A request that the engine can run: checked, tokenised, with every default resolved."""

    request_id: str
    prompt: str | None  # the text, where the client gave text or messages
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # of choice 0; choice i has seed + i
    stops: StopAutomaton | None
    stop_token_ids: frozenset[int]  # end-of-sequence ids, unless ignored, and the client's stop ids
    bad_words_token_ids: list[list[int]]
    max_total_tokens: int  # prompt and output
    arrival_time: float  # seconds of time.monotonic
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None

    def sequence_ids(self) -> list[str]:
        """Ids of the request's sequences, one a choice."""
        if self.params.n == 1:
            return [self.request_id]
        return [f"{index}_{self.request_id}" for index in range(self.params.n)]

    def sequence_seed(self, index: int) -> int:
        """Seed of choice `index`, wrapped to 64 bits."""
        return (self.seed + index + 2**63) % 2**64 - 2**63


def prompt_field(prompt: Prompt) -> str:
    """What a client calls this form of prompt."""
    return {TextPrompt: "prompt", TokensPrompt: "prompt_token_ids", ChatPrompt: "messages"}[type(prompt)]


class InputProcessor:
    """Tokenises and validates. Safe to call from any one thread at a time.

    Args:
        config: the resolved configuration.
        tokenizer: None with skip_tokenizer_init.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = config.model.arch.vocab_size
        self._max_model_len = config.model.max_model_len
        self._pool_tokens = config.cache.num_blocks * config.cache.block_size
        # Of requests without a seed of their own.
        self._seeds = secrets.SystemRandom() if config.model.seed is None else random.Random(config.model.seed)
        self._eos_token_ids = frozenset(config.model.arch.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self._eos_token_ids |= {tokenizer.eos_token_id}

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        max_output_tokens: int | None = None,
        arrival_time: float | None = None,
    ) -> ProcessedInput:
        """Check a request and tokenise its prompt.

        Args:
            request_id: any text; unique among live requests, which the engine checks.
            prompt: text, token ids or messages.
            params: checked already but for what needs the model.
            priority: with the policy "priority", lower runs first.
            cache_salt: only requests of the same salt share cached prefixes.
            tenant: whom to account the request to.
            max_output_tokens: where a choice without max_tokens ends, if the model or the pool does not end it before.
            arrival_time: seconds of `time.monotonic`; now by default.

        Raises:
            InvalidRequestError: naming the field.
            UnsupportedError: for message parts that are not text.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        _check_text("request_id", request_id)
        for name, value in (("cache_salt", cache_salt), ("tenant", tenant)):
            if value is not None:
                _check_text(name, value)
        if isinstance(priority, bool) or not isinstance(priority, int) or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequestError(
                "priority", f"must be an integer in [{MIN_PRIORITY}, {MAX_PRIORITY}], got {reprlib.repr(priority)}"
            )
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
        self._check_params(params)
        if self._tokenizer is None and params.detokenize:
            params = params.replace(detokenize=False)
        text, token_ids = self.tokenize(prompt, must_fit=True)
        stop_token_ids, bad_words_token_ids = self._stop_token_ids(params), self._bad_words(params.bad_words)
        check_no_dead_end(
            allowed_token_ids=params.allowed_token_ids,
            bad_words_token_ids=bad_words_token_ids,
            min_tokens=params.min_tokens,
            stop_token_ids=stop_token_ids,
            vocab_size=self._vocab_size,
        )
        max_total_tokens = self._max_total_tokens(prompt_field(prompt), len(token_ids), params.max_tokens, max_output_tokens)
        # All checks are done: what is refused takes no seed from the requests that come after it.
        return ProcessedInput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            stops=StopAutomaton(params.stop) if params.stop else None,
            stop_token_ids=stop_token_ids,
            bad_words_token_ids=bad_words_token_ids,
            max_total_tokens=max_total_tokens,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def tokenize(self, prompt: Prompt, *, must_fit: bool = False) -> tuple[str | None, list[int]]:
        """A prompt's text (None for token ids) and its token ids, at least one.

        Args:
            prompt: in any form.
            must_fit: refuse text that cannot fit the model by its length alone, without the time to tokenise it.

        Raises:
            InvalidRequestError: naming the field.
            UnsupportedError: for message parts that are not text.
        """
        text: str | None = None
        if isinstance(prompt, TokensPrompt):
            token_ids = self._check_token_ids("prompt_token_ids", prompt.token_ids)
        elif isinstance(prompt, TextPrompt):
            text = _check_text("prompt", prompt.text, empty=True)
            self._check_length("prompt", text, must_fit)
            token_ids = self._encode(text, prompt.add_special_tokens)
        elif isinstance(prompt, ChatPrompt):
            # Checked when it is rendered, for JSON in a message may spell what the message itself could not hold.
            text = _check_text("messages", render_chat(self._need_tokenizer("messages"), prompt), empty=True)
            self._check_length("messages", text, must_fit)
            token_ids = self._encode(text, False)  # the template writes the special tokens itself
        else:
            raise InvalidRequestError("prompt", f"must be text, token ids or messages, got {type(prompt).__name__}")
        if not token_ids:
            raise InvalidRequestError(prompt_field(prompt), "must not be empty")
        # A tokenizer may know more tokens than the model has rows for.
        return text, token_ids if text is None else self._check_token_ids(prompt_field(prompt), token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            InvalidRequestError: naming the field.
        """
        tokenizer = self._need_tokenizer("token_ids")
        ids = self._check_token_ids("token_ids", token_ids)
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _need_tokenizer(self, field: str) -> Any:
        if self._tokenizer is None:
            raise InvalidRequestError(field, "needs a tokenizer, and the engine runs with skip_tokenizer_init")
        return self._tokenizer

    def _check_length(self, field: str, text: str, must_fit: bool) -> None:
        if not must_fit or len(text) < self._max_model_len or self._prompt_bound is None:
            return
        num_tokens = self._prompt_bound.min_tokens(text)
        if num_tokens >= self._max_model_len:
            have = f"the prompt has {len(text)} characters, {num_tokens} tokens or more"
            raise InvalidRequestError(field, f"{have}; max_model_len is {self._max_model_len}")

    @cached_property
    def _prompt_bound(self) -> PromptBound | None:
        return None if self._tokenizer is None else prompt_bound(self._tokenizer)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer("prompt")
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def _check_token_ids(self, field: str, token_ids: Sequence[int]) -> list[int]:
        if isinstance(token_ids, str | bytes | Mapping):
            raise InvalidRequestError(field, "must be a list of token ids")
        try:
            given = list(token_ids)
            if bool in set(map(type, given)):  # an int to Python, and a mistake here
                raise TypeError
            ids = list(map(operator.index, given))
        except TypeError:
            raise InvalidRequestError(field, "must be a list of integers") from None
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(field, f"token id {token_id} is not in the vocabulary of {self._vocab_size}")
        return ids

    def _check_params(self, params: SamplingParams) -> None:
        """What of the parameters needs the model or the tokenizer."""
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", list(params.logit_bias))
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop:
            self._need_tokenizer("stop")
        if params.bad_words:
            self._need_tokenizer("bad_words")
        if len(params.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError("bad_words", f"must hold at most {MAX_BAD_WORDS} words, got {len(params.bad_words)}")
        for field, most in (("stop", MAX_STOP_CHARS), ("bad_words", MAX_BAD_WORDS_CHARS)):
            if sum(map(len, getattr(params, field))) > most:
                raise InvalidRequestError(field, f"must hold at most {most} characters in all")
        for field, words in (("stop", params.stop), ("bad_words", params.bad_words)):
            for word in words:
                _check_text(field, word)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_token_ids

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word's tokens at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}  # in order
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, " " + bare):
                ids = self._encode(text, False)
                if ids:
                    found.setdefault(tuple(self._check_token_ids("bad_words", ids)))
        return list(map(list, found))

    def _max_total_tokens(
        self, field: str, num_prompt_tokens: int, max_tokens: int | None, max_output_tokens: int | None
    ) -> int:
        """Longest that the sequence may become. What a client asks for and fits neither the model nor the pool is refused and
        never clamped; `max_output_tokens`, which no client asked for, only ends the output of one that set no limit."""
        wanted = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
        have = f"the prompt has {num_prompt_tokens} tokens"
        if max_tokens is not None:
            have += f" and max_tokens is {max_tokens}, together {wanted}"
            field = field if num_prompt_tokens >= self._max_model_len else "max_tokens"
        if wanted > self._max_model_len:
            raise InvalidRequestError(field, f"{have}; max_model_len is {self._max_model_len}")
        if wanted > self._pool_tokens:
            raise InvalidRequestError(field, f"{have}; the KV pool holds {self._pool_tokens} tokens")
        if max_tokens is not None:
            return wanted
        room = min(self._max_model_len, self._pool_tokens)
        return room if max_output_tokens is None else min(room, num_prompt_tokens + max_output_tokens)


def _check_text(field: str, value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"must be text, got {type(value).__name__}")
    if not value and not empty:
        raise InvalidRequestError(field, "must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(field, "must be valid Unicode; it holds a lone surrogate") from None
    return value
