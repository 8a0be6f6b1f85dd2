"""/metrics: every series is there at zero, and agrees with what clients saw. Health and readiness beside it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, wait_until

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.server.flags import ServerArgs
from pyengine.server.frontend import State
from pyengine.server.lifecycle import InferenceServer
from pyengine.server.proto import inference_pb2 as pb

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens")
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_n", "request_params_max_tokens", "iteration_tokens_total"),
)
OURS_AT_ZERO = (
    *("num_requests_swapped", "kv_slot_utilisation", "allocated_blocks_total", "swapped_in_blocks_total"),
    *("swapped_out_blocks_total", "steps_total", "cached_tokens_total", "requests_in_flight", "choices_in_flight"),
    *("is_stalled", "stalled_seconds"),
)


def get(port: Any, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    request = urllib.request.Request(f"http://{port.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers["content-type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read().decode()


def series(server: RunningServer) -> dict[str, float]:
    """By name and, where it has more than the two of every series, its other labels."""
    status, _, text = get(server.server.http_ports["metrics"], "/metrics")
    assert status == 200, text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(("vllm:", "pyengine:")):
                continue
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == (server.engine.config.model.served_model_name, "0")
            found[sample.name + "".join(f"|{value}" for value in labels.values())] = sample.value
    return found


def expect_zero(found: dict[str, float]) -> None:
    for name in GAUGES:
        assert found[f"vllm:{name}"] == 0, name
    for name in COUNTERS:
        assert found[f"vllm:{name}_total"] == 0, name
    for reason in ("stop", "length", "abort", "error"):
        assert found[f"vllm:request_success_total|{reason}"] == 0
    for name in HISTOGRAMS:
        assert (found[f"vllm:{name}_sum"], found[f"vllm:{name}_count"], found[f"vllm:{name}_bucket|+Inf"]) == (0, 0, 0), name
    for name in OURS_AT_ZERO:
        assert found[f"pyengine:{name}"] == 0, name


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    args = EngineArgs(model=str(tiny_llama), served_model_name="tiny", device="cpu", num_kv_blocks=32, block_size=8)
    running = RunningServer(AsyncLLMEngine(LLMEngine(args)), metrics_port=0)
    yield running
    running.close()


def test_rule_18_zero_before_traffic_and_true_after_it(real: RunningServer) -> None:
    """Also: the warm-up of the start counts nowhere."""
    expect_zero(series(real))
    sampling = {"temperature": 0, "ignore_eos": True}
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 20), sampling=pb.SamplingParams(max_tokens=9, **sampling))
    usages = [real.stub.Complete(request, timeout=120).usage for _ in range(3)]
    found = series(real)
    prompt = sum(usage.prompt_tokens for usage in usages)
    generated = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    assert (prompt, generated, cached) == (60, 27, 32)
    assert found["vllm:prompt_tokens_total"] == found["vllm:request_prompt_tokens_sum"] == prompt
    assert found["vllm:generation_tokens_total"] == found["vllm:request_generation_tokens_sum"] == generated
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (prompt, cached)
    assert found["pyengine:cached_tokens_total"] == cached
    assert found["vllm:iteration_tokens_total_sum"] == prompt - cached + generated - len(usages)
    assert found["vllm:iteration_tokens_total_count"] == found["pyengine:steps_total"] == generated
    assert found["pyengine:allocated_blocks_total"] == 4 + 2 * 2  # 28 tokens each; two blocks of the prompt are cached
    assert (found["vllm:request_success_total|length"], found["vllm:request_success_total|stop"]) == (3, 0)
    assert found["vllm:request_params_max_tokens_bucket|10.0"] - found["vllm:request_params_max_tokens_bucket|5.0"] == 3
    for name in HISTOGRAMS[:8]:
        expected = generated - len(usages) if name == "inter_token_latency_seconds" else len(usages)
        assert found[f"vllm:{name}_count"] == found[f"vllm:{name}_bucket|+Inf"] == expected, name
        assert found[f"vllm:{name}_sum"] > 0, name
    for name in GAUGES:
        assert found[f"vllm:{name}"] == 0, name


def test_gauges_while_requests_run(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(metrics_port=0)
    server.engine.hold = 1
    calls = [server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60) for _ in range(2)]
    for call in calls:
        next(call)
    found = series(server)
    assert found["vllm:num_requests_running"] == found["pyengine:requests_in_flight"] == 2
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.25
    assert found["pyengine:build_info|1.2.3"] == 1
    assert [name for name in found if name.startswith("vllm:cache_config_info|16|float32|True|")]
    for call in calls:
        call.cancel()
    wait_until(lambda: series(server)["vllm:num_requests_running"] == 0)


def test_both_text_forms(start_server: Callable[..., RunningServer]) -> None:
    port = start_server(metrics_port=0).server.http_ports["metrics"]
    _, content_type, text = get(port, "/metrics")
    assert content_type.startswith("text/plain")
    assert "\nprocess_resident_memory_bytes " in text
    _, content_type, text = get(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert get(port, "/v1/models")[0] == 404


def test_health_and_readiness_through_a_servers_life() -> None:
    engine, may_load = FakeEngine(), threading.Event()

    def make_engine() -> FakeEngine:
        may_load.wait()
        return engine

    async def scenario() -> None:
        server = InferenceServer(ServerArgs(port=0, metrics_port=0), make_engine, version="1")
        await server.bind()
        port = server.http_ports["metrics"]

        async def statuses() -> list[int]:
            return [(await asyncio.to_thread(get, port, path))[0] for path in ("/health", "/ready", "/metrics")]

        assert await statuses() == [503, 503, 503]
        may_load.set()
        await server.load()
        assert await statuses() == [200, 200, 200]
        server.frontend.is_stalled = True
        assert await statuses() == [503, 503, 200]
        server.frontend.is_stalled = False
        await server.drain()
        assert await statuses() == [200, 503, 200]
        server.frontend.state = State.FAILED
        assert await statuses() == [503, 503, 200]
        await server.close()
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(get, port, "/health")

    asyncio.run(scenario())


def test_the_dashboard_asks_for_series_that_exist(start_server: Callable[..., RunningServer]) -> None:
    """Every query of the dashboard names series of /metrics, and every panel has a query."""
    found = {name.split("|")[0] for name in series(start_server(metrics_port=0))}
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    assert len(panels) >= 10
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = re.findall(r"(?:vllm|pyengine):\w+", target["expr"])
            assert names, target["expr"]
            assert set(names) <= found, (panel["title"], target["expr"])
