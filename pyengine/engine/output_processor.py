"""From the scheduler's sequences to the caller's requests: text, stop strings, logprobs, and n choices in one stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyengine.engine.choice import Choice, position_logprobs
from pyengine.engine.detokenizer import TokenVocabulary
from pyengine.engine.input_processor import ProcessedInput
from pyengine.engine.metrics import EngineMetrics
from pyengine.engine.request import Request
from pyengine.outputs import FinishReason, PositionLogprobs, RequestMetrics, RequestOutput
from pyengine.sampling_params import RequestOutputKind
from pyengine.scheduler_output import SequenceOutput


@dataclass(slots=True)
class ProcessedOutputs:
    """One step's result."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    #: sequences that the scheduler does not know to be finished, and why
    finished_sequences: list[tuple[str, FinishReason]] = field(default_factory=list)


class RequestState:
    """One client's request: its choices and what was reported of them."""

    def __init__(self, source: ProcessedInput, requests: Sequence[Request], vocabulary: TokenVocabulary | None) -> None:
        self.source = source
        self.requests = list(requests)
        self.choices = [
            Choice(request.request_id, request.index, source.params, vocabulary, source.stops, source.prompt_token_ids)
            for request in requests
        ]
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        if source.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.error: str | None = None
        self._reported_prompt_logprobs = False

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def metrics(self, finished_time: float | None) -> RequestMetrics:
        started = [r.first_scheduled_time for r in self.requests if r.first_scheduled_time is not None]
        return RequestMetrics(
            arrival_time=self.source.arrival_time,
            first_scheduled_time=min(started, default=None),
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
            finished_time=finished_time,
            num_preemptions=sum(r.num_preemptions for r in self.requests),
        )

    def output(self, now: float) -> RequestOutput | None:
        """What the caller is to be told after a step; None if there is nothing new for it."""
        kind, finished = self.source.params.output_kind, self.is_finished
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        news = [choice for choice in self.choices if choice.has_news]
        if not news:
            return None
        chosen = news if kind is RequestOutputKind.DELTA else self.choices
        prompt_logprobs = self.prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            prompt_logprobs = None if self._reported_prompt_logprobs else prompt_logprobs
            self._reported_prompt_logprobs = True
        return RequestOutput(
            request_id=self.source.request_id,
            prompt=self.source.prompt,
            prompt_token_ids=self.source.prompt_token_ids,
            outputs=[choice.completion() for choice in chosen],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.requests[0].num_cached_tokens,
            metrics=self.metrics(now if finished else None),
            error=self.error,
        )


class OutputProcessor:
    """Holds the output side of every live request. Called from the step thread only.

    Args:
        vocabulary: None without a tokenizer.
        metrics: told of tokens and finished requests.
    """

    def __init__(self, vocabulary: TokenVocabulary | None, metrics: EngineMetrics) -> None:
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._states: dict[str, RequestState] = {}
        self._by_sequence: dict[str, tuple[RequestState, Choice]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._states

    @property
    def request_ids(self) -> list[str]:
        return list(self._states)

    def has_sequence(self, sequence_id: str) -> bool:
        return sequence_id in self._by_sequence

    def add_request(self, source: ProcessedInput, requests: Sequence[Request]) -> None:
        """Follow a request whose sequences are `requests`, in the order of their indices."""
        state = RequestState(source, requests, self._vocabulary)
        self._states[source.request_id] = state
        for choice in state.choices:
            self._by_sequence[choice.request_id] = (state, choice)

    def abort_request(self, request_id: str, now: float) -> tuple[RequestOutput | None, list[str]]:
        """Forget a request, wherever it stands.

        Returns:
            Its last output, with reason "abort", and the sequences to finish in the scheduler; (None, []) if it is unknown.
        """
        state = self._states.get(request_id)
        if state is None:
            return None, []
        live = self._end(state, "abort")
        output = state.output(now)
        self._remove(state, now)
        return output, live

    def process(self, outputs: Iterable[SequenceOutput], now: float) -> ProcessedOutputs:
        """Take one step's sequences.

        Args:
            outputs: what `Scheduler.update_from_output` returned.
            now: seconds of `time.monotonic`.
        """
        result = ProcessedOutputs()
        touched: dict[str, RequestState] = {}
        for output in outputs:
            found = self._by_sequence.get(output.req_id)
            if found is None:
                continue  # aborted, or a sibling failed, since the step was scheduled
            state, choice = found
            if choice.finish_reason is not None:
                continue
            touched[state.source.request_id] = state
            self._take(state, choice, output, now, result)
        for state in touched.values():
            request_output = state.output(now)
            if request_output is not None:
                result.request_outputs.append(request_output)
            if state.is_finished:
                self._remove(state, now)
        return result

    def _take(self, state: RequestState, choice: Choice, output: SequenceOutput, now: float, result: ProcessedOutputs) -> None:
        if output.prompt_logprobs and state.prompt_logprobs is not None and choice.index == 0:
            state.prompt_logprobs += [position_logprobs(entry, self._vocabulary) for entry in output.prompt_logprobs]
        if output.finish_reason == "error":
            # A request fails whole: a caller of n choices has no use for some of them.
            state.error = output.error or "the request failed"
            others = [sequence_id for sequence_id in self._end(state, "error") if sequence_id != choice.request_id]
            result.finished_sequences += [(sequence_id, "error") for sequence_id in others]
            return
        if output.new_token_ids:
            self._observe_tokens(state, choice, len(output.new_token_ids), now)
        if choice.update(output):
            result.finished_sequences.append((choice.request_id, "stop"))

    def _observe_tokens(self, state: RequestState, choice: Choice, count: int, now: float) -> None:
        if state.first_token_time is None:
            state.first_token_time = now
            waited = now - state.source.arrival_time
            self._metrics.observe_first_token(waited, len(state.source.prompt_token_ids))
        previous = choice.last_token_time
        self._metrics.observe_tokens(count, None if previous is None else now - previous)
        state.last_token_time = choice.last_token_time = now

    def _end(self, state: RequestState, reason: FinishReason) -> list[str]:
        """End every choice that still runs; return their sequences."""
        live = [choice for choice in state.choices if choice.finish_reason is None]
        for choice in live:
            choice.end(reason)
        return [choice.request_id for choice in live]

    def _remove(self, state: RequestState, now: float) -> None:
        del self._states[state.source.request_id]
        for choice in state.choices:
            del self._by_sequence[choice.request_id]
        self._metrics.observe_finished(
            state.metrics(now),
            num_prompt_tokens=len(state.source.prompt_token_ids),
            num_generated_tokens=[choice.num_tokens for choice in state.choices],
            finish_reasons=[choice.finish_reason for choice in state.choices],
            n=state.source.params.n,
            max_tokens=state.source.params.max_tokens,
        )

    def clear(self) -> list[str]:
        """Forget everything; return the sequences that were live."""
        sequence_ids = list(self._by_sequence)
        self._states.clear()
        self._by_sequence.clear()
        return sequence_ids
