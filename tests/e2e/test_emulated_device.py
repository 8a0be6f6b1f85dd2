"""The whole engine over the CUDA kernels in emulation: its tokens are the CPU backend's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.worker.backends.emulated import EmulatedEvent, EmulatedStream

PROMPTS = [{"prompt_token_ids": [(7 * i + 13 * j) % 500 + 3 for j in range(20 + 5 * i)]} for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def run(path: Path, device: str, prompts: list[Any] = PROMPTS, params: SamplingParams = GREEDY, **options: Any) -> Any:
    """Token ids of each choice of each prompt, and the engine's counters."""
    options = {"max_model_len": 128, "num_kv_blocks": 100, "enable_prefix_caching": False, **options}
    with LLM(model=str(path), device=device, **options) as llm:  # late copies must land before their pools go
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs], stats


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_tokens_equal_the_cpus(tiny_llama: Path, kv_cache_dtype: str) -> None:
    expected, _ = run(tiny_llama, "cpu", kv_cache_dtype=kv_cache_dtype)
    actual, _ = run(tiny_llama, "emulated", kv_cache_dtype=kv_cache_dtype)
    assert actual == expected


def test_chunked_prefill_and_prefix_caching(tiny_llama: Path) -> None:
    shared = [(3 * j) % 500 + 3 for j in range(50)]
    prompts = [{"prompt_token_ids": [*shared, 40 + i]} for i in range(4)]
    expected, _ = run(tiny_llama, "cpu", prompts)
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 3, "enable_prefix_caching": True}
    actual, stats = run(tiny_llama, "emulated", prompts, **options)
    assert actual == expected
    assert stats["num_cached_tokens"] > 0


def test_copy_on_write(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)
    expected, _ = run(tiny_llama, "cpu", PROMPTS[:2], params)
    actual, _ = run(tiny_llama, "emulated", PROMPTS[:2], params)
    assert actual == expected
    assert len({tuple(choice) for choice in actual[0]}) == 3


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption(tiny_llama: Path, mode: str) -> None:
    expected, _ = run(tiny_llama, "cpu")
    actual, stats = run(tiny_llama, "emulated", num_kv_blocks=14, preemption_mode=mode, swap_space=0.01)
    assert actual == expected
    assert stats[f"num_preemptions_{mode}"] > 0


def test_a_dropped_wait_shows(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its waits the engine computes with blocks that have not arrived: late streams make that visible."""
    expected, _ = run(tiny_llama, "cpu")
    monkeypatch.setattr(EmulatedStream, "wait_event", lambda self, event: None)
    monkeypatch.setattr(EmulatedEvent, "synchronize", lambda self: None)
    actual, stats = run(tiny_llama, "emulated", num_kv_blocks=14, preemption_mode="swap", swap_space=0.01)
    assert stats["num_preemptions_swap"] > 0
    assert actual != expected
