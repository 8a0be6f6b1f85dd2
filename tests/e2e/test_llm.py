"""The whole engine on a tiny checkpoint: the same tokens as Transformers, whatever else happens to a request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers_reference import NEAR_TIE, TransformersReference

from pyengine import LLM, RequestOutput, SamplingParams

NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """16 prompts of 1 to 150 tokens; two share a prefix of 64."""
    rng = random.Random(1)
    lengths = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 100, 150]
    prompts = [[rng.randrange(4, 512) for _ in range(n)] for n in lengths]
    shared = [rng.randrange(4, 512) for _ in range(64)]
    return [*prompts, [*shared, 5, 6, 7], [*shared, 8, 9]]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> TransformersReference:
    return TransformersReference.from_folder(tiny_llama)


@contextmanager
def running(model: Path, **args: Any) -> Iterator[LLM]:
    """An LLM that must have every block free in the end."""
    with LLM(str(model), **({"device": "cpu", "num_kv_blocks": 400, "swap_space": 0.01} | args)) as llm:
        yield llm
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"] == llm.llm_engine.config.cache.num_blocks
        assert stats["num_free_cpu_blocks"] == stats["num_cpu_blocks"]


def generate(
    llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY, prompts: list[list[int]] = PROMPTS
) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    """This engine's own tokens, one request at a time, nothing cached."""
    with running(tiny_llama, enable_prefix_caching=False) as llm:
        return [tokens(generate(llm, prompts=[prompt]))[0] for prompt in PROMPTS]


def test_greedy_tokens_equal_transformers(tiny_llama: Path, reference: TransformersReference) -> None:
    with running(tiny_llama) as llm:
        got = tokens(generate(llm))
    assert [len(token_ids) for token_ids in got] == [NUM_TOKENS] * len(PROMPTS)
    assert len({tuple(token_ids) for token_ids in got}) == len(PROMPTS)
    near_ties = 0
    for prompt, token_ids in zip(PROMPTS, got, strict=True):
        judgement = reference.judge(prompt + token_ids)
        assert judgement.first_difference(len(prompt)) is None
        near_ties += sum(gap < NEAR_TIE for gap in judgement.gaps[len(prompt) - 1 :])
    assert near_ties < 0.01 * NUM_TOKENS * len(PROMPTS)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"long_prefill_token_threshold": 16},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        {"block_size": 8},
        {"enable_chunked_prefill": False, "max_model_len": 256},
    ],
    ids=str,
)
def test_together_equals_one_by_one(tiny_llama: Path, expected: list[list[int]], args: dict[str, Any]) -> None:
    """Rules 3 and 10: batch, chunks, slots and a prefix cache, cold and warm, change no token."""
    with running(tiny_llama, **args) as llm:
        assert tokens(generate(llm)) == expected
        assert tokens(generate(llm)) == expected
        cached = [output.num_cached_tokens for output in generate(llm)]
        if args.get("enable_prefix_caching", True):
            size = llm.llm_engine.config.cache.block_size
            assert cached == [(len(prompt) - 1) // size * size for prompt in PROMPTS]
        else:
            assert cached == [0] * len(PROMPTS)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_preemption_changes_no_token(tiny_llama: Path, expected: list[list[int]], mode: str) -> None:
    """Rules 1 and 14: a pool far too small for all; each finishes, with the tokens of an unpreempted run."""
    with running(tiny_llama, num_kv_blocks=16, preemption_mode=mode) as llm:
        outputs = generate(llm)
        assert tokens(outputs) == expected
        stats = llm.stats()
        if mode != "auto":
            assert stats[f"num_preemptions_{mode}"] > 0
        if mode == "swap":
            assert stats["num_blocks_swapped_out"] == stats["num_blocks_swapped_in"] > 0
        assert max(output.metrics.num_preemptions for output in outputs if output.metrics) <= NUM_TOKENS + 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_many_choices_of_one_prompt_in_a_small_pool(tiny_llama: Path, mode: str) -> None:
    """Rule 1: n=125 of a long prompt, overcommitted: all finish, each as a run of its own with its own seed."""
    prompt = PROMPTS[13]
    with running(tiny_llama, num_kv_blocks=40, preemption_mode=mode) as llm:
        params = SamplingParams(n=125, seed=11, max_tokens=20, ignore_eos=True)
        (output,) = generate(llm, params, [prompt])
        assert [len(choice.token_ids) for choice in output.outputs] == [20] * 125
        assert llm.stats()[f"num_preemptions_{mode}"] > 0
        some = [0, 1, 60, 124]
        singles = generate(llm, [params.replace(n=1, seed=11 + i) for i in some], [prompt] * len(some))
        assert tokens(singles) == [output.outputs[i].token_ids for i in some]


def test_choices_equal_single_runs_with_their_seeds(tiny_llama: Path) -> None:
    """Rule 10: n=4 with a seed is four runs with seed + i, whatever else runs; unseeded runs differ."""
    with running(tiny_llama) as llm:
        params = SamplingParams(n=4, seed=21, temperature=0.8, top_p=0.95, max_tokens=30, ignore_eos=True)
        (output, other) = generate(llm, [params, params.replace(seed=None)], [PROMPTS[9], PROMPTS[9]])
        singles = [generate(llm, params.replace(n=1, seed=21 + i), [PROMPTS[9]])[0].outputs[0].token_ids for i in range(4)]
        assert [choice.token_ids for choice in output.outputs] == singles
        assert len({tuple(choice.token_ids) for choice in (*output.outputs, *other.outputs)}) == 8
        (again,) = generate(llm, params.replace(seed=None), [PROMPTS[9]])
        assert not {tuple(c.token_ids) for c in again.outputs} & {tuple(c.token_ids) for c in other.outputs}


@pytest.mark.parametrize("threshold", [0, 16])
def test_logprobs_equal_transformers(tiny_llama: Path, reference: TransformersReference, threshold: int) -> None:
    """Rule 9: raw log-probabilities, of prompt and output, with the prompt in one step and in chunks."""
    with running(tiny_llama, long_prefill_token_threshold=threshold) as llm:
        generate(llm)  # a cached prompt must not cost its logprobs
        outputs = generate(llm, GREEDY.replace(logprobs=2, prompt_logprobs=1, max_tokens=8, repetition_penalty=1.3))
    for output in outputs:
        choice, prompt = output.outputs[0], output.prompt_token_ids
        assert choice.logprobs is not None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [entry for entry in output.prompt_logprobs if entry is not None] + choice.logprobs
        own = [entry[token].logprob for entry, token in zip(entries, (prompt + choice.token_ids)[1:], strict=True)]
        assert own == pytest.approx(reference.judge(prompt + choice.token_ids).logprobs, abs=1e-4)
        assert choice.cumulative_logprob == pytest.approx(sum(own[len(prompt) - 1 :]))


def test_kv_utilisation_is_reported(tiny_llama: Path) -> None:
    with running(tiny_llama) as llm:
        generate(llm)
        assert 0.7 < llm.stats()["kv_utilisation"] <= 1.0


def test_emulated_cuda_gives_greedy_tokens(tiny_llama: Path, reference: TransformersReference) -> None:
    prompts = PROMPTS[:10]
    with running(tiny_llama, device="emulated") as llm:
        got = tokens(generate(llm, GREEDY.replace(max_tokens=12), prompts))
    for prompt, token_ids in zip(prompts, got, strict=True):
        assert len(token_ids) == 12
        assert reference.judge(prompt + token_ids).first_difference(len(prompt)) is None
