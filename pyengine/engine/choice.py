"""The output side of one sequence: its tokens become text, stop strings end it, and logprobs get their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from pyengine.engine.detokenizer import IncrementalDetokenizer, TokenVocabulary
from pyengine.engine.stop_strings import StopAutomaton
from pyengine.outputs import CompletionOutput, FinishReason, Logprob, PositionLogprobs
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.scheduler_output import SequenceOutput, TokenLogprobs


def position_logprobs(
    entry: TokenLogprobs, vocabulary: TokenVocabulary | None, chosen_bytes: bytes | None = None
) -> PositionLogprobs:
    """One position's log-probabilities with text and bytes.

    Args:
        entry: the chosen token first.
        vocabulary: None without a tokenizer; then there is neither text nor bytes.
        chosen_bytes: what the chosen token added to the text, where that is known; else the token's own bytes.
    """
    position: PositionLogprobs = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
        if token_id in position:
            continue
        if vocabulary is None:
            position[token_id] = Logprob(logprob, rank)
            continue
        data = vocabulary.token_bytes(token_id) or b"" if position or chosen_bytes is None else chosen_bytes
        position[token_id] = Logprob(logprob, rank, vocabulary.token_text(token_id), data)
    return position


class Choice:
    """What one sequence has generated, and how much of it the caller has seen.

    Args:
        request_id: the sequence's id.
        index: of the choice among the request's n.
        params: the request's.
        vocabulary: None without a tokenizer.
        stops: the request's stop strings; None without any.
        prompt_token_ids: the context of the text.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        vocabulary: TokenVocabulary | None,
        stops: StopAutomaton | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.num_tokens = 0
        self.last_token_time: float | None = None  # seconds of time.monotonic
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._vocabulary = vocabulary
        self._stops = stops
        self._stop_state = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        if vocabulary is not None and params.detokenize:
            self._detokenizer = vocabulary.detokenizer(
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._held = ""  # decoded, but maybe the beginning of a stop string
        self._text: list[str] = []  # what the caller may see; with DELTA, has not seen yet
        self._token_ids: list[int] = []  # the same of the tokens
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._has_news = False
        self._reported_finish = False

    def update(self, output: SequenceOutput) -> bool:
        """Take what one step generated.

        Returns:
            Whether a stop string ended the sequence, so that the scheduler must be told.
        """
        logprobs: Sequence[TokenLogprobs | None] = [None] * len(output.new_token_ids)
        if self._logprobs is not None and output.new_token_ids:
            logprobs = output.logprobs or ()
        last = len(output.new_token_ids) - 1
        for i, (token_id, entry) in enumerate(zip(output.new_token_ids, logprobs, strict=True)):
            # The token that ends a sequence is not text, unless the client wants to see what stopped it.
            ends = i == last and output.finish_reason == "stop" and not self._params.include_stop_str_in_output
            if self._take_token(token_id, entry, is_text=not ends):
                return True
        if output.finish_reason is not None:
            return self._finish(output)
        return False

    def _take_token(self, token_id: int, entry: TokenLogprobs | None, *, is_text: bool) -> bool:
        self.num_tokens += 1
        self._token_ids.append(token_id)
        text, data = "", b""
        if self._detokenizer is None:
            self._has_news = True
        elif is_text:
            text = self._detokenizer.append(token_id)
            data = self._detokenizer.token_bytes
        if self._logprobs is not None:
            assert entry is not None
            self._cumulative_logprob += entry.logprobs[0]
            chosen = None if self._detokenizer is None else data
            self._logprobs.append(position_logprobs(entry, self._vocabulary, chosen))
        return bool(text) and self._take_text(text)

    def _take_text(self, text: str) -> bool:
        """Release what cannot become a stop string; return whether a stop string is complete."""
        if self._stops is None:
            self._release(text)
            return False
        may_stop = self.num_tokens > self._params.min_tokens
        self._stop_state, match = self._stops.feed(self._stop_state, text, match=may_stop)
        if match is None:
            text = self._held + text
            certain = len(text) - self._stops.held(self._stop_state)
            self._held = text[certain:]
            self._release(text[:certain])
            return False
        text = self._held + text[: match.end]
        self._held = ""
        if not self._params.include_stop_str_in_output:
            text = text[: len(text) - len(match.stop)]
        self._release(text)
        self.finish_reason, self.stop_reason = "stop", match.stop
        return True

    def _release(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._has_news = True

    def _finish(self, output: SequenceOutput) -> bool:
        """The scheduler ended the sequence: nothing is held back any longer."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if rest and self._take_text(rest):
            return False  # a stop string after all; the scheduler has finished with the sequence already
        self._release(self._held)
        self._held = ""
        self.finish_reason = output.finish_reason  # type: ignore[assignment]
        self.stop_reason = output.stop_reason
        return False

    def end(self, reason: FinishReason) -> None:
        """End the sequence from outside (abort, error)."""
        if self.finish_reason is None:
            self._release(self._held)
            self._held = ""
            self.finish_reason = reason

    @property
    def has_news(self) -> bool:
        """Whether there is something that the caller has not seen: text (tokens, without a detokenizer) or the end."""
        return self._has_news or (self.finish_reason is not None and not self._reported_finish)

    def completion(self) -> CompletionOutput:
        """The choice as the caller wants it; marks it as seen."""
        self._has_news = False
        self._reported_finish = self.finish_reason is not None
        output = CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self._token_ids if self._is_delta else self._token_ids.copy(),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=self._logprobs if self._is_delta or self._logprobs is None else self._logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if self._is_delta:
            self._text, self._token_ids = [], []
            self._logprobs = None if self._logprobs is None else []
        elif len(self._text) > 1:
            self._text = [output.text]
        return output
