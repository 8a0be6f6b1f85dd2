"""`--target-itl-ms`: how much to compute in a step, so that streams keep their pace.

A token of every stream comes with each step, so the time between two tokens is the time of a step. That is modelled as

    seconds = fixed + per_stream * streams + per_prompt_token * prompt tokens

and fitted to the steps as they come (recursive least squares with forgetting), since it depends on the model, the machine, the
lengths, and who else uses the machine. What is computed does not depend on it, only when: a request's tokens are the same
however its prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

#: of the steps beside prompts are to keep to the target ...
QUANTILE = 0.95
#: ... and so fast the margin for that follows what is seen, of the expected time a step
MARGIN_RATE = 0.02
MAX_MARGIN = 3.0
#: a step counts this much less than the one after it
FORGETTING = 0.98
#: prompt tokens in a step at least, so that prompts get on where the target cannot be met
MIN_PROMPT_TOKENS = 16
#: prompt tokens in the first step beside streams, before anything is known
FIRST_PROMPT_TOKENS = 32
#: a step that takes longer than this many times the expected was disturbed, and says as much and no more
MAX_SURPRISE = 3.0
_SCALE = (1.0, 16.0, 64.0)  # units of the model's three terms, so that they are of one order


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold at most."""

    num_tokens: int
    num_seqs: int  # beyond which no waiting request is admitted; those that run go on


class StepPacer:
    """Chooses the limits of each step and learns from its time.

    Args:
        target: seconds between two tokens of a stream.
        max_num_tokens, max_num_seqs: that no limit exceeds.
    """

    def __init__(self, target: float, max_num_tokens: int, max_num_seqs: int) -> None:
        self._target = target
        self._margin = 1.1  # a step's time over the expected, which QUANTILE of the steps do not exceed
        self._max_num_tokens = max_num_tokens
        self._max_num_seqs = max_num_seqs
        self._model = _StepTimeModel()
        self._largest_prompt_step = FIRST_PROMPT_TOKENS // 2  # prompt tokens of any step so far: the model knows no larger

    def limits(self, num_streams: int) -> StepLimits:
        """The limits of the next step.

        Args:
            num_streams: running requests that are due one token.
        """
        if num_streams == 0:  # nobody waits for a next token
            return StepLimits(self._max_num_tokens, self._max_num_seqs)
        fixed, per_stream, per_prompt_token = self._model.terms()
        aim = self._target / self._margin
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
        """A step took that long.

        Args:
            num_streams: requests that got one token computed.
            num_prompt_tokens: computed beside them.
        """
        expected = self._model.expected(num_streams, num_prompt_tokens)
        if expected is not None and num_streams and num_prompt_tokens:
            # A quantile, followed by a small step up or down for each value (stochastic approximation).
            self._margin += MARGIN_RATE * (QUANTILE if seconds > self._margin * expected else QUANTILE - 1)
            self._margin = min(MAX_MARGIN, max(1.0, self._margin))
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
