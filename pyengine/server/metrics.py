"""What the engine counts, as Prometheus series: vLLM's names, so that its dashboards work, and this engine's own.

Series are made anew from the engine's counters at every scrape. So each of them is there, at zero, from the first scrape on,
and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pyengine.config import EngineConfig
from pyengine.engine.metrics import Histogram
from pyengine.server.frontend import Frontend

#: This program runs one engine; vLLM numbers several.
ENGINE = "0"
_LABELS = ("model_name", "engine")

#: name: help
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a sequence.",
    "request_time_per_output_token_seconds": "Mean time between two tokens of a request.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to its first step.",
    "request_inference_time_seconds": "From a request's first step to its last token.",
    "request_prefill_time_seconds": "From a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a sequence.",
    "request_params_n": "The parameter n of a request.",
    "request_params_max_tokens": "The parameter max_tokens of a request that sets it.",
    "iteration_tokens_total": "Tokens computed in a step.",
}


@dataclass(frozen=True)
class _Series:
    """A series with one value, a sum of `LLMEngine.stats`."""

    name: str
    help: str
    keys: tuple[str, ...]


_COUNTERS = (
    _Series("vllm:prompt_tokens", "Prompt tokens of requests that have their first token.", ("prompt_tokens",)),
    _Series("vllm:generation_tokens", "Tokens generated.", ("generation_tokens",)),
    _Series("vllm:prefix_cache_queries", "Tokens that were looked up in the prefix cache.", ("prefix_cache_queries",)),
    _Series("vllm:prefix_cache_hits", "Tokens that were found in the prefix cache.", ("prefix_cache_hits",)),
    _Series("vllm:num_preemptions", "Preemptions.", ("num_preemptions_recompute", "num_preemptions_swap")),
    _Series("pyengine:steps", "Steps that computed anything.", ("num_steps",)),
    _Series("pyengine:cached_tokens", "Tokens not computed because the prefix cache had them.", ("num_cached_tokens",)),
    _Series("pyengine:allocated_blocks", "KV blocks taken from the free list.", ("num_blocks_allocated",)),
    _Series("pyengine:swapped_out_blocks", "KV blocks copied to the CPU pool.", ("num_blocks_swapped_out",)),
    _Series("pyengine:swapped_in_blocks", "KV blocks copied back from the CPU pool.", ("num_blocks_swapped_in",)),
    _Series("pyengine:swap_fallbacks", "Preemptions by recompute for want of room in the CPU pool.", ("num_swap_fallbacks",)),
)
_GAUGES = (
    _Series("vllm:num_requests_running", "Sequences that run.", ("num_running",)),
    # vLLM has no swapped state: to its dashboards a sequence runs or waits.
    _Series("vllm:num_requests_waiting", "Sequences that wait, swapped ones among them.", ("num_waiting", "num_swapped")),
    _Series("pyengine:num_requests_swapped", "Sequences whose KV is in the CPU pool.", ("num_swapped",)),
    _Series("pyengine:num_requests", "Requests that the engine holds.", ("num_requests",)),
    _Series("pyengine:kv_slot_utilisation", "Used over allocated KV slots, now.", ("kv_utilisation_now",)),
    _Series("pyengine:kv_slot_utilisation_mean", "The mean of that over steps.", ("kv_utilisation",)),
    _Series("pyengine:num_kv_blocks", "KV blocks of the device.", ("num_blocks",)),
    _Series("pyengine:num_free_kv_blocks", "KV blocks that nobody holds.", ("num_free_blocks",)),
    _Series("pyengine:num_cpu_blocks", "Blocks of the CPU pool.", ("num_cpu_blocks",)),
    _Series("pyengine:num_free_cpu_blocks", "Blocks of the CPU pool that nobody holds.", ("num_free_cpu_blocks",)),
)


@dataclass(frozen=True)
class _TenantSeries:
    """A series with a value for each tenant, one of its entry in `LLMEngine.stats`."""

    name: str
    help: str
    key: str
    is_counter: bool = False


_TENANT_SERIES = (
    _TenantSeries("pyengine:tenant_requests_running", "Sequences of a tenant that run.", "num_running"),
    _TenantSeries("pyengine:tenant_requests_waiting", "Sequences of a tenant that wait.", "num_waiting"),
    _TenantSeries("pyengine:tenant_kv_blocks", "KV blocks that a tenant's sequences hold.", "num_kv_blocks"),
    _TenantSeries("pyengine:tenant_kv_quota_blocks", "KV blocks that they may hold.", "kv_quota_blocks"),
    _TenantSeries("pyengine:tenant_computed_tokens", "Tokens computed for a tenant.", "computed_tokens", is_counter=True),
    _TenantSeries("pyengine:tenant_generation_tokens", "Tokens generated for a tenant.", "generation_tokens", is_counter=True),
    _TenantSeries("pyengine:tenant_preemptions", "Preemptions of a tenant's sequences.", "num_preemptions", is_counter=True),
)


class EngineCollector(Collector):
    """Reads a serving frontend's engine; without one there is nothing to collect."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def collect(self) -> Iterator[Metric]:
        engine = self._frontend.engine
        stats, labels = engine.stats(), (self._frontend.model_name, ENGINE)
        for series in _COUNTERS:
            counter = CounterMetricFamily(series.name, series.help, labels=_LABELS)
            counter.add_metric(labels, sum(stats[key] for key in series.keys))
            yield counter
        for series in _GAUGES:
            yield _gauge(series.name, series.help, labels, sum(stats[key] for key in series.keys))
        yield from self._usage(stats, labels)
        yield from self._by_tenant(stats["tenants"], labels)
        yield _finished_requests(stats, labels)
        for name, text in _HISTOGRAMS.items():
            yield _histogram(f"vllm:{name}", text, labels, getattr(engine.metrics, name))
        yield _cache_config(engine.config, labels)
        yield _gauge("pyengine:requests_in_flight", "Requests that this server works on.", labels, self._frontend.num_active)
        choices = "Choices of those requests, and calls of the tokenizer: what --max-concurrent-requests bounds."
        yield _gauge("pyengine:choices_in_flight", choices, labels, self._frontend.num_choices)
        yield _gauge("pyengine:stalled_seconds", "Time without a step while there is work.", labels, engine.stalled_for())
        yield _gauge(
            "pyengine:is_stalled", "Whether the watchdog holds the engine for stuck.", labels, self._frontend.is_stalled
        )
        build = GaugeMetricFamily("pyengine:build_info", "The program.", labels=(*_LABELS, "version"))
        build.add_metric((*labels, self._frontend.version), 1)
        yield build

    def _by_tenant(self, tenants: Mapping[str, Mapping[str, Any]], labels: tuple[str, str]) -> Iterator[Metric]:
        names = (*_LABELS, "tenant")
        for series in _TENANT_SERIES:
            make = CounterMetricFamily if series.is_counter else GaugeMetricFamily
            family = make(series.name, series.help, labels=names)
            for tenant, values in tenants.items():
                family.add_metric((*labels, tenant), values[series.key])
            yield family
        tenancy = self._frontend.tenancy
        for unit, counts in (("requests", tenancy.requests_in_flight), ("choices", tenancy.choices_in_flight)):
            in_flight = GaugeMetricFamily(
                f"pyengine:tenant_{unit}_in_flight", f"{unit.capitalize()} of a tenant in flight.", labels=names
            )
            for tenant, count in list(counts.items()):
                in_flight.add_metric((*labels, tenant), count)
            yield in_flight
        refused = CounterMetricFamily(
            "pyengine:tenant_requests_refused", "Requests refused for a tenant's limits.", labels=(*names, "reason")
        )
        for (tenant, reason), count in list(tenancy.refused.items()):
            refused.add_metric((*labels, tenant, reason), count)
        yield refused

    @staticmethod
    def _usage(stats: Mapping[str, Any], labels: tuple[str, str]) -> Iterator[Metric]:
        usage = 1 - stats["num_free_blocks"] / stats["num_blocks"]
        yield _gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all.", labels, usage)
        yield _gauge("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", labels, usage)


def _gauge(name: str, text: str, labels: tuple[str, str], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=_LABELS)
    gauge.add_metric(labels, value)
    return gauge


def _finished_requests(stats: Mapping[str, Any], labels: tuple[str, str]) -> Metric:
    counter = CounterMetricFamily("vllm:request_success", "Sequences that ended.", labels=(*_LABELS, "finished_reason"))
    for reason, count in stats["request_success"].items():
        counter.add_metric((*labels, reason), count)
    return counter


def _histogram(name: str, text: str, labels: tuple[str, str], histogram: Histogram) -> Metric:
    bounds = [str(bound) for bound in histogram.buckets] + ["+Inf"]
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    # One copy of the counts, while the step thread goes on counting: buckets and their sum always agree.
    family.add_metric(labels, list(zip(bounds, accumulate(list(histogram.counts)), strict=True)), histogram.sum)
    return family


def _cache_config(config: EngineConfig, labels: tuple[str, str]) -> Metric:
    cache = config.cache
    values = {
        "block_size": cache.block_size,
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "num_gpu_blocks": cache.num_blocks,
        "num_cpu_blocks": cache.num_cpu_blocks,
    }
    info = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=(*_LABELS, *values))
    info.add_metric((*labels, *map(str, values.values())), 1)
    return info


class Metrics:
    """Everything that a scrape of this process gets."""

    def __init__(self, frontend: Frontend) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(frontend))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """The series in the form that an Accept header prefers, and that form's content type.

        Raises:
            UnavailableError: the model is still being loaded.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
