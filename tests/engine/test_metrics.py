"""Counters and histograms of the engine, and its statistics by name."""

from __future__ import annotations

import logging

import pytest
from fake_executor import FakeExecutor, counting, fake_config, fake_engine

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.metrics import EngineMetrics, Histogram
from pyengine.engine.startup import EngineParts
from pyengine.engine.stat_logger import StatLogger
from pyengine.inputs import TokensPrompt
from pyengine.outputs import RequestMetrics
from pyengine.sampling_params import SamplingParams

COUNTERS = ("prompt_tokens", "generation_tokens")
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
)


def test_every_series_is_there_at_zero() -> None:
    """Rule 18's engine half, under the names that dashboards read."""
    metrics = EngineMetrics()
    for name in COUNTERS:
        assert getattr(metrics, name) == 0
    for name in HISTOGRAMS:
        histogram = getattr(metrics, name)
        assert (histogram.count, histogram.sum, set(histogram.counts)) == (0, 0.0, {0})
        assert list(histogram.buckets) == sorted(set(histogram.buckets))
    assert metrics.request_success == {"stop": 0, "length": 0, "abort": 0, "error": 0}


def test_buckets_hold_values_up_to_their_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, 3)
    assert histogram.counts == [2, 4, 1]
    assert (histogram.count, histogram.sum) == (7, 12.0)


def test_a_request_that_never_ran_counts_only_what_it_has() -> None:
    metrics = EngineMetrics()
    metrics.observe_finished(
        RequestMetrics(arrival_time=1.0, finished_time=3.0),
        num_prompt_tokens=7,
        num_generated_tokens=[0, 0],
        finish_reasons=["abort", "abort"],
        n=2,
        max_tokens=None,
    )
    assert metrics.request_success["abort"] == 2
    assert metrics.e2e_request_latency_seconds.sum == 2.0
    assert metrics.request_queue_time_seconds.count == 0
    assert metrics.request_decode_time_seconds.count == 0
    assert metrics.request_params_max_tokens.count == 0


def test_stats_names() -> None:
    engine, _ = fake_engine(counting)
    stats = engine.stats()
    for name in (
        "num_blocks",
        "num_free_blocks",
        "num_preemptions_recompute",
        "num_preemptions_swap",
        "num_cached_tokens",
        "kv_utilisation",
        "num_running",
        "num_waiting",
        "num_swapped",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
    ):
        assert stats[name] == (64 if "blocks" in name else 0), name
    engine.add_request("r", TokensPrompt([3] * 17), SamplingParams(max_tokens=2))
    engine.step()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_free_blocks"], stats["num_requests"]) == (1, 62, 1)
    assert stats["kv_utilisation"] == stats["kv_utilisation_now"] == pytest.approx(17 / 32)


def test_a_busy_engine_logs_its_rates(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = fake_engine(counting)
    stat_logger = StatLogger(interval=10.0)
    stat_logger.observe(100.0, engine.stats())
    engine.add_request("r", TokensPrompt([3] * 20), SamplingParams(max_tokens=100))
    for _ in range(50):
        engine.step()
    with caplog.at_level(logging.INFO, logger="pyengine"):
        stat_logger.observe(109.9, engine.stats())
        assert caplog.text == ""
        stat_logger.observe(110.0, engine.stats())
        assert "prompt 2.0 tok/s, generation 5.0 tok/s; running 1, waiting 0, swapped 0; KV cache 7.8% in use" in caplog.text
        caplog.clear()
        stat_logger.observe(120.0, engine.stats())
        assert "prompt 0.0 tok/s, generation 0.0 tok/s" in caplog.text


def test_log_stats_follows_its_flag() -> None:
    for disabled in (False, True):
        config, executor = fake_config(), FakeExecutor(counting)
        engine = LLMEngine(EngineArgs(disable_log_stats=disabled), parts=EngineParts(config, executor, None))
        assert engine.log_stats is not disabled
        assert (AsyncLLMEngine(engine)._step_thread._stat_logger is None) is disabled


def test_counting_from_zero_again_keeps_the_gauges() -> None:
    """What only warmed the engine up is in no figure afterwards, and what runs is still seen to run."""
    engine, _ = fake_engine(counting)
    fresh = engine.stats()
    engine.add_request("warm-up", TokensPrompt([3] * 20), SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats()["num_blocks_allocated"] == 2
    assert engine.stats() != fresh
    engine.reset_metrics()
    assert engine.stats() == fresh
    assert all(histogram.count == 0 for histogram in vars(engine.metrics).values() if isinstance(histogram, Histogram))
    engine.add_request("r", TokensPrompt([4] * 17), SamplingParams(max_tokens=5))
    engine.step()
    engine.reset_metrics()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_free_blocks"], stats["generation_tokens"], stats["num_steps"]) == (1, 62, 0, 0)
    engine.step()
    assert engine.metrics.generation_tokens == engine.metrics.inter_token_latency_seconds.count == 1
