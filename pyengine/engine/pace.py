"""How much to compute in a step, so that streams keep their pace.

A token of every stream comes with each step, so the time between two tokens is the time of a step. `TargetPacer` keeps that
near a time that the user gives (`--target-itl-ms`), `RelativePacer` near a multiple of what the step would take without prompt
tokens. Both learn from the steps as they come, since times depend on the model, the machine, the lengths, and who else uses the
machine. What is computed does not depend on it, only when: a request's tokens are the same however its prompt is cut.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from pyengine.config import SchedulerConfig

#: prompt tokens in a step at least, so that prompts get on where the aim cannot be met
MIN_PROMPT_TOKENS = 16
#: prompt tokens in the first step beside streams, before anything is known
FIRST_PROMPT_TOKENS = 32
#: a step that takes longer than this many times the expected was disturbed, and says as much and no more
MAX_SURPRISE = 3.0
#: of the steps beside prompts are to keep to what is aimed at ...
QUANTILE = 0.95
#: ... and so fast the margin for that follows what is seen, of the expected time a step
MARGIN_RATE = 0.02
MAX_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold at most."""

    num_tokens: int
    num_seqs: int  # beyond which no waiting request is admitted; those that run go on


class _Margin:
    """A step's time over the expected, which QUANTILE of the steps beside prompts do not exceed; follows what is seen."""

    def __init__(self, value: float) -> None:
        self.value = value

    def observe(self, ratio: float) -> None:
        # A quantile, followed by a small step up or down for each value (stochastic approximation).
        self.value += MARGIN_RATE * (QUANTILE if ratio > self.value else QUANTILE - 1)
        self.value = min(MAX_MARGIN, max(1.0, self.value))


class StepPacer(Protocol):
    """Chooses the limits of each step and learns from its time."""

    def limits(self, num_streams: int) -> StepLimits:
        """The limits of the next step; called once for each.

        Args:
            num_streams: running requests that are due one token.
        """

    def observe(self, seconds: float, num_streams: int, num_prompt_tokens: int) -> None:
        """A step took that long.

        Args:
            num_streams: requests that got one token computed.
            num_prompt_tokens: computed beside them.
        """


def make_pacer(config: SchedulerConfig) -> StepPacer | None:
    """The pacer that a configuration asks for; None: steps are as large as they may be."""
    if config.target_itl is not None:
        return TargetPacer(config.target_itl, config.max_num_batched_tokens, config.max_num_seqs)
    if config.max_step_ratio is not None:
        return RelativePacer(config.max_step_ratio, config.max_num_batched_tokens, config.max_num_seqs)
    return None


#: a step counts this much less than the one after it
FORGETTING = 0.98
_SCALE = (1.0, 16.0, 64.0)  # units of the model's three terms, so that they are of one order


class TargetPacer:
    """Keeps the time between two tokens near a target, of which prompts get what streams leave.

    A step is modelled as

        seconds = fixed + per_stream * streams + per_prompt_token * prompt tokens

    which is fitted to the steps (recursive least squares with forgetting).

    Args:
        target: seconds between two tokens of a stream.
        max_num_tokens, max_num_seqs: that no limit exceeds.
    """

    def __init__(self, target: float, max_num_tokens: int, max_num_seqs: int) -> None:
        self._target = target
        self._margin = _Margin(1.1)
        self._max_num_tokens = max_num_tokens
        self._max_num_seqs = max_num_seqs
        self._model = _StepTimeModel()
        self._largest_prompt_step = FIRST_PROMPT_TOKENS // 2  # prompt tokens of any step so far: the model knows no larger

    def limits(self, num_streams: int) -> StepLimits:
        """See `StepPacer`. New streams wait where more would not fit into the target."""
        if num_streams == 0:  # nobody waits for a next token
            return StepLimits(self._max_num_tokens, self._max_num_seqs)
        fixed, per_stream, per_prompt_token = self._model.terms()
        aim = self._target / self._margin.value
        spare = aim - fixed - per_stream * num_streams
        # Twice what was seen at most: beyond that the model would be trusted blindly.
        num_prompt_tokens = 2 * self._largest_prompt_step
        if per_prompt_token > 0:
            num_prompt_tokens = min(num_prompt_tokens, int(spare / per_prompt_token))
        num_prompt_tokens = max(MIN_PROMPT_TOKENS, num_prompt_tokens)
        num_seqs = self._max_num_seqs
        if per_stream > 0:
            # Room is left for the prompt tokens without which no new stream would ever begin.
            room = aim - fixed - per_prompt_token * MIN_PROMPT_TOKENS
            num_seqs = max(1, min(num_seqs, int(room / per_stream)))
        return StepLimits(min(self._max_num_tokens, num_streams + num_prompt_tokens), num_seqs)

    def observe(self, seconds: float, num_streams: int, num_prompt_tokens: int) -> None:
        """See `StepPacer`."""
        expected = self._model.expected(num_streams, num_prompt_tokens)
        if expected is not None and num_streams and num_prompt_tokens:
            self._margin.observe(seconds / expected)
        self._model.observe(seconds, num_streams, num_prompt_tokens)
        self._largest_prompt_step = max(self._largest_prompt_step, num_prompt_tokens)


class _StepTimeModel:
    """Recursive least squares over three terms."""

    def __init__(self) -> None:
        self._terms = [0.0, 0.0, 0.0]
        self._covariance = [[1e4 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._num_observed = 0

    def terms(self) -> tuple[float, float, float]:
        """Seconds: fixed, per stream, per prompt token. None is negative: such a fit is noise."""
        fixed, per_stream, per_prompt_token = (max(0.0, term) / unit for term, unit in zip(self._terms, _SCALE, strict=True))
        return fixed, per_stream, per_prompt_token

    def expected(self, num_streams: int, num_prompt_tokens: int) -> float | None:
        """Seconds of a step; None while too little is known."""
        if self._num_observed <= 10:
            return None
        fixed, per_stream, per_prompt_token = self.terms()
        return fixed + per_stream * num_streams + per_prompt_token * num_prompt_tokens or None

    def observe(self, seconds: float, num_streams: int, num_prompt_tokens: int) -> None:
        """Fit the terms to one more step."""
        row = [1.0, num_streams / _SCALE[1], num_prompt_tokens / _SCALE[2]]
        expected = sum(term * value for term, value in zip(self._terms, row, strict=True))
        self._num_observed += 1
        if self._num_observed > 10 and expected > 0:
            seconds = min(seconds, MAX_SURPRISE * expected)
        covariance = self._covariance
        gain = [sum(covariance[i][j] * row[j] for j in range(3)) for i in range(3)]
        weight = FORGETTING + sum(gain[i] * row[i] for i in range(3))
        error = seconds - expected
        self._terms = [term + gain[i] * error / weight for i, term in enumerate(self._terms)]
        fresh = [[(covariance[i][j] - gain[i] * gain[j] / weight) / FORGETTING for j in range(3)] for i in range(3)]
        # Steps that are all alike say nothing of what varies; forgetting would blow their uncertainty up without end.
        if max(fresh[i][i] for i in range(3)) < 1e6:
            self._covariance = fresh


#: prompt steps in a row at most before one without prompt tokens shows anew what streams alone take
PROBE_INTERVAL = 32
#: such steps of a size of which the median is taken, and how many must have been seen at least
NUM_DECODE_STEPS = 9
MIN_DECODE_STEPS = 3
#: what prompt tokens cost in a step counts this much less than what they cost in the next
PROMPT_FORGETTING = 0.9


class RelativePacer:
    """Keeps a step near a multiple of what it would take without prompt tokens, on any machine, with any model.

    The time of a step without prompt tokens is learnt by number of streams, from steps that have none: those that come by
    themselves, and one now and then among those beside prompts. What a step takes beyond that is its prompt tokens'.

    Args:
        max_ratio: of a step's time to its time without prompt tokens.
        max_num_tokens, max_num_seqs: that no limit exceeds. Of streams there may be any number: each raises both times.
    """

    def __init__(self, max_ratio: float, max_num_tokens: int, max_num_seqs: int) -> None:
        self._max_ratio = max_ratio
        self._max_num_tokens = max_num_tokens
        self._max_num_seqs = max_num_seqs
        self._margin = _Margin(1.3)
        self._decode_seconds: dict[int, deque[float]] = {}  # by size class: of the last steps without prompt tokens
        self._num_since_decode_only = 0  # steps beside prompts
        self._is_probe = False  # whether the step that `limits` was last asked for is to show what streams alone take
        self._excess = self._num_tokens = 0.0  # what prompt tokens took beyond that, and how many; both fade
        self._largest_prompt_step = FIRST_PROMPT_TOKENS // 2  # prompt tokens of any step beside streams so far

    def limits(self, num_streams: int) -> StepLimits:
        """See `StepPacer`. Two steps in a row have room for `MIN_PROMPT_TOKENS` prompt tokens at least."""
        if num_streams == 0:  # nobody waits for a next token
            return StepLimits(self._max_num_tokens, self._max_num_seqs)
        num_seen = len(self._decode_seconds.get(_size_class(num_streams), ()))
        is_due = num_seen < MIN_DECODE_STEPS or self._num_since_decode_only >= PROBE_INTERVAL
        # Never twice in a row: should streams lack the memory to go on, it is for prompts to get on and end.
        self._is_probe = is_due and not self._is_probe
        num_prompt_tokens = 0 if self._is_probe else self._num_prompt_tokens(num_streams)
        return StepLimits(min(self._max_num_tokens, num_streams + num_prompt_tokens), self._max_num_seqs)

    def _num_prompt_tokens(self, num_streams: int) -> int:
        decode = self._decode_time(num_streams)
        if decode is None:
            return MIN_PROMPT_TOKENS
        # Twice what was seen at most: a few small prompts say little of what a large one takes.
        num_prompt_tokens = 2 * self._largest_prompt_step
        if self._excess > 0:
            spare = (self._max_ratio / self._margin.value - 1) * decode
            num_prompt_tokens = min(num_prompt_tokens, int(spare * self._num_tokens / self._excess))
        return max(MIN_PROMPT_TOKENS, num_prompt_tokens)

    def _decode_time(self, num_streams: int) -> float | None:
        """Seconds of a step without prompt tokens; None if no such step has been seen."""
        seen = self._decode_seconds.get(_size_class(num_streams))
        return None if seen is None else median_low(seen)

    def observe(self, seconds: float, num_streams: int, num_prompt_tokens: int) -> None:
        """See `StepPacer`."""
        if num_streams == 0:
            return
        decode = self._decode_time(num_streams)
        if num_prompt_tokens == 0:
            self._num_since_decode_only = 0
            self._decode_seconds.setdefault(_size_class(num_streams), deque(maxlen=NUM_DECODE_STEPS)).append(seconds)
            return
        self._num_since_decode_only += 1
        self._largest_prompt_step = max(self._largest_prompt_step, num_prompt_tokens)
        if decode is None:
            return
        if seconds < decode:  # which was too much, then: without prompt tokens it would have taken no longer
            self._decode_seconds[_size_class(num_streams)].append(seconds)
        excess = max(0.0, seconds - decode)
        if self._excess > 0:
            expected = decode + self._excess / self._num_tokens * num_prompt_tokens
            self._margin.observe(seconds / expected)
            excess = min(excess, MAX_SURPRISE * expected - decode)
        self._excess = PROMPT_FORGETTING * self._excess + excess
        self._num_tokens = PROMPT_FORGETTING * self._num_tokens + num_prompt_tokens


def _size_class(num_streams: int) -> int:
    """Numbers of streams that take about the same time: up to 16 each for itself, then eight classes an octave."""
    shift = max(0, num_streams.bit_length() - 4)
    return num_streams >> shift << shift
