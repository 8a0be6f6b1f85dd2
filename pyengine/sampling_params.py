"""How one request wants its tokens chosen. Names, defaults and ranges are vLLM's."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from pyengine.errors import InvalidRequestError

#: Below this temperature sampling is greedy.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1

_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


class RequestOutputKind(IntEnum):
    """What each `RequestOutput` of a request holds."""

    CUMULATIVE = 0  # all text and tokens so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, at the end


def _require(condition: bool, field_name: str, message: str) -> None:
    if not condition:
        raise InvalidRequestError(field_name, message)


def _shown(value: Any) -> str:
    """A value in an error message, cut to a bearable length."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    _require(_is_number(value), name, f"must be a number, got {_shown(value)}")
    inside = (low < value if open_low else low <= value) and value <= high  # NaN is not
    _require(inside, name, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], got {_shown(value)}")


def _require_int(name: str, value: Any, low: int, high: int) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool), name, f"must be an integer, got {_shown(value)}")
    _require(low <= value <= high, name, f"must be in [{low}, {high}], got {_shown(value)}")


def _require_list(name: str, value: Any) -> None:
    _require(isinstance(value, Sequence) and not isinstance(value, str | bytes), name, f"must be a list, got {_shown(value)}")


def _require_ids(name: str, value: Any) -> None:
    _require_list(name, value)
    for token_id in value:
        _require_int(name, token_id, 0, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Ids are checked against the vocabulary, and lengths against the model, when the request is added; everything else is
    checked here.

    Raises:
        InvalidRequestError: naming the field, for any value out of range (NaN is out of every range).
    """

    n: int = 1  # choices; greedy needs 1
    temperature: float = 1.0  # [0, 2]; below 1e-5 greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    presence_penalty: float = 0.0  # [-2, 2], on tokens generated so far
    frequency_penalty: float = 0.0  # [-2, 2], on tokens generated so far
    repetition_penalty: float = 1.0  # [1e-6, 1e6], on prompt and generated tokens; beyond it logits leave fp32
    seed: int | None = None  # choice i of n draws as a single run with seed + i would; -1: none, as with vLLM
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0  # end-of-sequence and stop ids are masked until then
    max_tokens: int | None = 16  # None: up to the model's limit
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None  # 0..20 alternatives besides the sampled token
    prompt_logprobs: int | None = None  # 0..20
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # clamped to [-100, 100]
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("bad_words", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        self._check_numbers()
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        for name in _FLAGS:
            _require(isinstance(getattr(self, name), bool), name, f"must be true or false, got {_shown(getattr(self, name))}")
        kind = f"must be a RequestOutputKind, got {_shown(self.output_kind)}"
        _require(isinstance(self.output_kind, RequestOutputKind), "output_kind", kind)
        self._check_lists()

    def _check_numbers(self) -> None:
        _require_int("n", self.n, 1, 16384)
        _require_number("temperature", self.temperature, 0.0, 2.0)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_int("top_k", self.top_k, -1, 2**31 - 1)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.seed is not None:
            _require_int("seed", self.seed, -MAX_SEED, MAX_SEED)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _require_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            limit = f"must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", limit)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _require(self.n == 1 or not self.is_greedy, "n", "must be 1 with greedy sampling (temperature 0)")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            _require_list(name, getattr(self, name))
            for text in getattr(self, name):
                _require(isinstance(text, str), name, f"must hold strings, got {_shown(text)}")
                _require(text != "", name, "must not hold an empty string")
        _require(self.detokenize or not self.stop, "stop", "needs detokenize=True")
        _require_ids("stop_token_ids", self.stop_token_ids)
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", "must map token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _require_int("logit_bias", token_id, 0, 2**31 - 1)
            is_number = _is_number(bias) and bias == bias  # NaN is not
            _require(is_number, "logit_bias", f"token {token_id} must have a number, got {_shown(bias)}")
        if self.allowed_token_ids is not None:
            _require_ids("allowed_token_ids", self.allowed_token_ids)
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every step."""
        return self.temperature < GREEDY_TEMPERATURE

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with the given fields changed, checked anew."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(**{**values, **changes})
