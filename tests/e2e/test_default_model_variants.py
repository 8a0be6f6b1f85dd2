"""The default model, exact and quantised: whatever happens to a request, it gets the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
from test_default_model import PROMPTS

from pyengine import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SEEDED = SamplingParams(seed=7, temperature=0.9, top_p=0.95, max_tokens=64, ignore_eos=True)
LONG = "In the beginning there was a long text. " * 24  # more tokens than one chunk of any variant but the largest
OURS = [PROMPTS[0], PROMPTS[5], PROMPTS[12], LONG]
MODES: dict[str, dict[str, Any]] = {"exact": {"dtype": "float32", "quantization": "none"}, "quantized": {}}


def run(prompts: list[str], *rounds: list[SamplingParams], **args: Any) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Token ids of the prompts in each round, one choice after another, and the counters; every block is free after it."""
    with LLM(**({"device": "cpu", "max_model_len": 1024, "num_kv_blocks": 2000} | args)) as llm:
        results = [llm.generate(prompts, params, use_tqdm=False) for params in rounds]
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"] == llm.llm_engine.config.cache.num_blocks
        assert stats["num_free_cpu_blocks"] == stats["num_cpu_blocks"]
    return [[choice.token_ids for output in outputs for choice in output.outputs] for outputs in results], stats


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture(scope="module")
def alone(mode: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Each of OURS by itself, nothing cached: greedy, and with a seed."""
    one_by_one = {"greedy": GREEDY, "seeded": SEEDED}
    return {
        name: [run([prompt], [params], enable_prefix_caching=False, **mode)[0][0][0] for prompt in OURS]
        for name, params in one_by_one.items()
    }


def crowd() -> tuple[list[str], list[SamplingParams]]:
    """64 requests: ours greedy, ours seeded, and 56 others of other lengths."""
    others = (PROMPTS * 2)[:56]
    params = [GREEDY] * len(OURS) + [SEEDED] * len(OURS) + [GREEDY.replace(max_tokens=5 + i) for i in range(56)]
    return OURS + OURS + others, params


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"long_prefill_token_threshold": 16},
        {"long_prefill_token_threshold": 64},
        {"long_prefill_token_threshold": 512, "max_num_batched_tokens": 1024},
        {"max_num_seqs": 7},
    ],
    ids=str,
)
def test_among_64_cold_and_warm(mode: dict[str, Any], alone: dict[str, list[list[int]]], args: dict[str, Any]) -> None:
    prompts, params = crowd()
    rounds, stats = run(prompts, params, params, **mode, **args)
    for tokens in rounds:
        assert tokens[:4] == alone["greedy"]
        assert tokens[4:8] == alone["seeded"]
    assert stats["num_cached_tokens"] > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_after_preemption_in_a_pool_a_quarter_of_what_is_needed(
    mode: dict[str, Any], alone: dict[str, list[list[int]]], preemption: str
) -> None:
    prompts, params = crowd()
    with LLM(device="cpu", max_model_len=1024, num_kv_blocks=2000, **mode) as llm:
        lengths = [len(llm.get_tokenizer()(prompt)["input_ids"]) for prompt in prompts]
    needed = sum(-(-(length + (p.max_tokens or 0)) // 16) for length, p in zip(lengths, params, strict=True))
    args = {"num_kv_blocks": needed // 4, "preemption_mode": preemption, "enable_prefix_caching": False}
    (tokens,), stats = run(prompts, params, **mode, **args)
    assert tokens[:4] == alone["greedy"]
    assert tokens[4:8] == alone["seeded"]
    assert stats[f"num_preemptions_{preemption}"] > 0


def test_four_choices_equal_four_single_runs(mode: dict[str, Any]) -> None:
    (together,), _ = run(OURS, [SEEDED.replace(n=4)] * len(OURS), **mode)
    for i in range(4):
        (single,), _ = run(OURS, [SEEDED.replace(seed=7 + i)] * len(OURS), **mode)
        assert single == together[i::4]
