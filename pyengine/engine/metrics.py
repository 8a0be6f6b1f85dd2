"""Engine-level counters and histograms. Named as vLLM's Prometheus series; every one of them exists from the start, at zero."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import get_args

from pyengine.outputs import FinishReason, RequestMetrics

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_REQUEST_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
_COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0)
_ITERATION_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts of values in buckets, as Prometheus defines them: bucket i counts values <= its bound, the last one all others.

    Args:
        buckets: upper bounds, ascending.
    """

    __slots__ = ("buckets", "count", "counts", "sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)  # not cumulative
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times
        self.count += times


class EngineMetrics:
    """Everything counted since the start. Written by the step thread only; a reader sees each number whole."""

    def reset(self) -> None:
        """Count from zero again."""
        vars(self).update(vars(EngineMetrics()))

    def __init__(self) -> None:
        self.prompt_tokens = 0  # of requests that have their first token
        self.generation_tokens = 0
        self.request_success: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)  # sequences
        self.time_to_first_token_seconds = Histogram(_TTFT_BUCKETS)
        self.inter_token_latency_seconds = Histogram(_TOKEN_BUCKETS)
        self.request_time_per_output_token_seconds = Histogram(_TOKEN_BUCKETS)
        self.e2e_request_latency_seconds = Histogram(_REQUEST_BUCKETS)
        self.request_queue_time_seconds = Histogram(_REQUEST_BUCKETS)
        self.request_inference_time_seconds = Histogram(_REQUEST_BUCKETS)
        self.request_prefill_time_seconds = Histogram(_REQUEST_BUCKETS)
        self.request_decode_time_seconds = Histogram(_REQUEST_BUCKETS)
        self.request_prompt_tokens = Histogram(_COUNT_BUCKETS)
        self.request_generation_tokens = Histogram(_COUNT_BUCKETS)
        self.request_params_n = Histogram(_N_BUCKETS)
        self.request_params_max_tokens = Histogram(_COUNT_BUCKETS)
        self.iteration_tokens_total = Histogram(_ITERATION_BUCKETS)

    def observe_step(self, num_tokens: int) -> None:
        """One step computed `num_tokens` query tokens."""
        if num_tokens:
            self.iteration_tokens_total.observe(num_tokens)

    def observe_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A request has its first token, `seconds` after it arrived."""
        self.time_to_first_token_seconds.observe(seconds)
        self.prompt_tokens += num_prompt_tokens

    def observe_tokens(self, count: int, seconds: float | None) -> None:
        """A sequence got `count` tokens, `seconds` after its last one (None: its first)."""
        self.generation_tokens += count
        if seconds is not None:
            self.inter_token_latency_seconds.observe(seconds / count, count)

    def observe_finished(
        self,
        times: RequestMetrics,
        *,
        num_prompt_tokens: int,
        num_generated_tokens: Sequence[int],
        finish_reasons: Sequence[FinishReason | None],
        n: int,
        max_tokens: int | None,
    ) -> None:
        """A request is over. Lists have an entry a choice."""
        for count, reason in zip(num_generated_tokens, finish_reasons, strict=True):
            self.request_generation_tokens.observe(count)
            if reason is not None:
                self.request_success[reason] += 1
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_params_n.observe(n)
        if max_tokens is not None:
            self.request_params_max_tokens.observe(max_tokens)
        if times.finished_time is None:
            return
        self.e2e_request_latency_seconds.observe(times.finished_time - times.arrival_time)
        if times.first_scheduled_time is None:
            return
        self.request_queue_time_seconds.observe(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None or times.last_token_time is None:
            return
        decode = times.last_token_time - times.first_token_time
        self.request_prefill_time_seconds.observe(times.first_token_time - times.first_scheduled_time)
        self.request_decode_time_seconds.observe(decode)
        self.request_inference_time_seconds.observe(times.last_token_time - times.first_scheduled_time)
        longest = max(num_generated_tokens)
        if longest > 1:
            self.request_time_per_output_token_seconds.observe(decode / (longest - 1))
