"""The sampler against the float64 reference: every parameter, alone and together; behaviour rules 9 and 10."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import acceptable_tokens, log_softmax, probabilities, processed_logits

from pyengine.errors import InvalidRequestError
from pyengine.sampling.draw import _search
from pyengine.sampling.philox import uniforms
from pyengine.sampling.sampler import Sampler, SamplerOutput, SamplingState
from pyengine.sampling_params import SamplingParams


def make_logits(rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """fp32 [rows, vocab_size]"""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def make_state(params: SamplingParams, vocab_size: int, **changes: Any) -> SamplingState:
    defaults: dict[str, Any] = {
        "seed": 0,
        "prompt_token_ids": [],
        "output_token_ids": [],
        "stop_token_ids": frozenset(),
        "bad_words_token_ids": [],
    }
    return SamplingState(params, vocab_size=vocab_size, **(defaults | changes))


def sample(logits: torch.Tensor, states: list[SamplingState]) -> SamplerOutput:
    before = logits.clone()
    output = Sampler(logits.shape[1]).sample(logits, states)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits are left as they are"
    return output


def sample_one(logits: torch.Tensor, params: SamplingParams, **changes: Any) -> int:
    output = sample(logits, [make_state(params, logits.shape[1], **changes)])
    assert not output.errors
    return output.token_ids[0]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A vocabulary, a past and parameters that act on both, any of them at once."""
    vocab_size = draw(st.sampled_from([2, 5, 40, 300, 1000, 4097]))
    token = st.integers(0, vocab_size - 1)
    output = draw(st.lists(token, max_size=12))
    params = {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, -1, 1, 2, 7, 50, 400, 10**6])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.05])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5, -1.0])),
        "presence_penalty": draw(st.sampled_from([0.0, 1.5, -2.0])),
        "logit_bias": draw(st.dictionaries(token, st.floats(-200, 200), max_size=4)),
        "min_tokens": draw(st.sampled_from([0, 0, 3, 20])),
        "max_tokens": 64,
    }
    if draw(st.booleans()):
        params["allowed_token_ids"] = draw(st.lists(token, min_size=1, max_size=20))
    return {
        "vocab_size": vocab_size,
        "params": SamplingParams(**params),
        "prompt": draw(st.lists(token, min_size=1, max_size=12)),
        "output": output,
        "stop_token_ids": frozenset(draw(st.lists(token, max_size=1))),
        "bad_words": draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=3)),
        "spread": draw(st.sampled_from([0.1, 1.0, 4.0])),
        "seed": draw(st.integers(-(2**63) + 1, 2**63 - 1)),
        "logits_seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_combination_agrees_with_the_reference(case: dict[str, Any]) -> None:
    params: SamplingParams = case["params"]
    vocab_size, prompt, output = case["vocab_size"], case["prompt"], case["output"]
    logits = make_logits(1, vocab_size, case["logits_seed"], case["spread"])
    # Half of the past reaches the state at once, as after a preemption, half token by token.
    state = make_state(
        params,
        vocab_size,
        seed=case["seed"],
        prompt_token_ids=prompt,
        output_token_ids=output[: len(output) // 2],
        stop_token_ids=case["stop_token_ids"],
        bad_words_token_ids=case["bad_words"],
    )
    for token_id in output[len(output) // 2 :]:
        state.append(token_id)
    result = sample(logits, [state])
    expected = processed_logits(logits[0].numpy(), params, prompt, output, case["stop_token_ids"], case["bad_words"])
    if np.isneginf(expected).all():
        assert "no token to sample" in result.errors[0]
        assert result.token_ids == [-1]
        return
    assert not result.errors
    token_id = result.token_ids[0]
    if params.is_greedy:
        assert expected[token_id] >= expected.max() - 1e-4 * max(1.0, abs(expected.max()))
    else:
        uniform = float(uniforms(case["seed"], len(output), 1)[0])
        assert token_id in acceptable_tokens(expected, uniform, params)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(parameters: dict[str, Any]) -> None:
    """Chi-square of 4,000 draws of one seed against the reference's probabilities."""
    num_draws, vocab_size = 4000, 12
    logits = make_logits(1, vocab_size, seed=3, spread=1.5)
    state = make_state(SamplingParams(max_tokens=None, **parameters), vocab_size, seed=99)
    sampler = Sampler(vocab_size)
    drawn = [sampler.sample(logits, [state]).token_ids[0] for _ in range(num_draws)]
    expected = probabilities(logits[0].double().numpy(), **({"temperature": 1.0} | parameters)) * num_draws
    counts = np.bincount(drawn, minlength=vocab_size)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    freedom = int(kept.sum()) - 1
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


def test_draws_of_different_seeds_follow_the_distribution() -> None:
    """Unseeded requests get seeds of their own, so the first tokens of many requests must be a sample too."""
    num_draws, vocab_size = 4000, 8
    logits = make_logits(1, vocab_size, seed=5, spread=1.0).expand(num_draws, vocab_size).contiguous()
    states = [make_state(SamplingParams(), vocab_size, seed=seed) for seed in range(num_draws)]
    counts = np.bincount(sample(logits, states).token_ids, minlength=vocab_size)
    expected = probabilities(logits[0].double().numpy(), temperature=1.0) * num_draws
    assert ((counts - expected) ** 2 / expected).sum() < 7 + 6 * 14**0.5


MIXED_PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": 5},
    {"logprobs": 20, "repetition_penalty": 1.2},
    {"logit_bias": {7: 5.0}, "frequency_penalty": 0.5},
    {"top_p": 0.999},
]


@pytest.mark.parametrize("vocab_size", [1000, 49152, 50257])
def test_rule_10_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    """Tokens and log-probabilities are bitwise the same alone, and anywhere in batches of 1 to 64 rows."""
    num_rows = 64
    logits = make_logits(num_rows, vocab_size, seed=1)

    def states() -> list[SamplingState]:
        return [
            make_state(SamplingParams(**MIXED_PARAMETERS[i % 10]), vocab_size, seed=i, prompt_token_ids=[i, 7])
            for i in range(num_rows)
        ]

    sampler = Sampler(vocab_size)
    alone: list[tuple[Any, ...]] = []
    for i, state in enumerate(states()):
        output = sampler.sample(logits[i : i + 1].clone(), [state])
        alone.append((output.token_ids[0], output.logprobs[0]))
    for size in (2, 3, 7, 16, 33, 64):
        order = np.random.default_rng(size).permutation(num_rows)[:size]
        fresh = states()
        output = Sampler(vocab_size).sample(logits[order].contiguous(), [fresh[i] for i in order])
        assert [(t, p) for t, p in zip(output.token_ids, output.logprobs, strict=True)] == [alone[i] for i in order]


def test_rule_10_a_seed_gives_the_same_tokens_after_a_preemption() -> None:
    """A state rebuilt from its tokens goes on exactly as the one that was never dropped."""
    vocab_size = 500
    logits = make_logits(40, vocab_size, seed=2)
    params = SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=30, max_tokens=64, seed=5
    )
    changes: dict[str, Any] = {
        "seed": 5,
        "prompt_token_ids": [1, 2, 3],
        "stop_token_ids": frozenset({9, 10}),
        "bad_words_token_ids": [[4], [5, 6], [7, 8, 9]],
    }
    kept, tokens = make_state(params, vocab_size, **changes), []
    for step in range(40):
        rebuilt = make_state(params, vocab_size, output_token_ids=tokens, **changes)
        first = sample(logits[step : step + 1], [kept]).token_ids
        assert sample(logits[step : step + 1], [rebuilt]).token_ids == first
        tokens += first
    assert len(set(tokens)) > 20


def test_rule_10_unlike_seeds_differ() -> None:
    logits = make_logits(1, 5000, seed=1, spread=0.5).expand(32, 5000).contiguous()
    states = [make_state(SamplingParams(), 5000, seed=seed) for seed in range(32)]
    assert len(set(sample(logits, states).token_ids)) > 28


def test_rule_10_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 700)
    logits[0, [650, 3, 400]] = 2.0
    logits[1, 699] = 2.0
    states = [make_state(SamplingParams(temperature=0), 700) for _ in range(3)]
    assert sample(logits, states).token_ids == [3, 699, 0]


def test_top_k_1_is_greedy_whatever_the_temperature() -> None:
    logits = make_logits(20, 2000, seed=8)
    logits[:, 5] = logits.max(dim=1).values * (1 + 1e-6)  # a rival within rounding of the softmax
    states = [make_state(SamplingParams(temperature=2.0, top_k=1), 2000, seed=i) for i in range(20)]
    assert sample(logits, states).token_ids == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(("vocab_size", "top_k"), [(49152, 50), (49152, 95), (49152, 500), (700, 1), (700, 699)])
def test_top_k_keeps_exactly_the_k_most_likely(vocab_size: int, top_k: int) -> None:
    logits = make_logits(1, vocab_size, seed=9, spread=1e-3)
    states = [make_state(SamplingParams(top_k=top_k), vocab_size, seed=seed) for seed in range(1000)]
    drawn = sample(logits.expand(1000, vocab_size), states).token_ids
    best = logits[0].topk(top_k).indices.tolist()
    assert set(drawn) <= set(best)
    assert len(set(drawn)) >= (top_k if top_k <= 95 else 300)


def test_top_k_keeps_ties_and_top_p_the_lower_ids() -> None:
    logits = torch.full((1, 600), -5.0)
    logits[0, [10, 20, 30, 40]] = 1.0
    drawn = {sample_one(logits, SamplingParams(top_k=2), seed=seed) for seed in range(200)}
    assert drawn == {10, 20, 30, 40}
    # Each of the four has a little less than a quarter of the whole: half of it needs three.
    drawn = {sample_one(logits, SamplingParams(temperature=0.5, top_p=0.5), seed=seed) for seed in range(200)}
    assert drawn == {10, 20, 30}


def test_a_nucleus_that_weighs_exactly_top_p_is_complete() -> None:
    logits = torch.full((1, 600), -np.inf)
    logits[0, [7, 500]] = 1.0
    assert {sample_one(logits, SamplingParams(top_p=0.5), seed=seed) for seed in range(50)} == {7}


def test_a_target_that_rounding_took_out_of_range_picks_a_token_that_has_weight() -> None:
    cumulative = np.array([0.0, 0.0, 0.4, 1.0, 1.0])
    assert [_search(cumulative, target) for target in (-1e-20, 0.0, 0.4, 1.0, 1.1)] == [2, 2, 3, 3, 3]


def test_a_wide_nucleus_is_not_cut_short() -> None:
    """A flat distribution has far more tokens in its nucleus than the sampler looks at first."""
    logits = make_logits(1, 3000, seed=4, spread=0.01)
    drawn = [sample_one(logits, SamplingParams(top_p=0.9), seed=seed) for seed in range(400)]
    assert len(set(drawn)) > 300
    excluded = np.argsort(logits[0].numpy())[:250]
    assert not set(drawn) & set(excluded.tolist())


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = make_logits(1, 1000, seed=1, spread=1e4)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        token_id = sample_one(logits, SamplingParams(temperature=1.1e-5, top_p=0.9, min_p=0.1, top_k=5))
    assert token_id == int(logits.argmax())


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.001}], ids=str)
def test_the_ends_of_the_unit_interval_pick_tokens_that_have_weight(uniform: float, parameters: dict[str, Any]) -> None:
    logits = torch.full((1, 1111), -np.inf)
    logits[0, [300, 301, 900]] = torch.tensor([1.0, 0.5, 0.9])
    params = SamplingParams(**parameters)
    state = make_state(params, 1111)
    state.uniforms._page, state.uniforms._first = [uniform] * 64, 0
    assert sample(logits, [state]).token_ids == [300 if uniform == 0 else 900]


def test_min_tokens_masks_stop_ids_until_then() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 9.0
    logits[0, 5] = 8.0
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=5)
    state = make_state(params, 10, stop_token_ids=frozenset({4, 5, 10_000}))
    assert [sample(logits, [state]).token_ids[0] for _ in range(4)] == [0, 0, 4, 4]


def test_bad_words_are_banned_only_after_their_prefix() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 9.0
    logits[0, 5] = 8.0
    state = make_state(SamplingParams(temperature=0), 10, bad_words_token_ids=[[4, 4], [4, 5, 4]])
    assert [sample(logits, [state]).token_ids[0] for _ in range(5)] == [4, 5, 5, 4, 5]


def test_the_prompt_is_no_prefix_of_a_bad_word() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 9.0
    params = SamplingParams(temperature=0)
    assert sample_one(logits, params, prompt_token_ids=[3], bad_words_token_ids=[[3, 4]]) == 4
    assert sample_one(logits, params, output_token_ids=[3], bad_words_token_ids=[[3, 4]]) == 0


def test_logit_bias_is_clamped() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 0] = 150.0
    assert sample_one(logits, SamplingParams(temperature=0, logit_bias={3: float("inf")})) == 0
    assert sample_one(logits, SamplingParams(temperature=0, logit_bias={3: 90.0, 0: -61.0})) == 3


def test_penalties_count_as_specified() -> None:
    logits = torch.zeros(1, 8)
    logits[0] = torch.tensor([4.0, 4.1, -4.0, -3.9, 1.0, -9.0, -9.0, -9.0])
    params = SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    state = make_state(params, 8, prompt_token_ids=[0, 2], output_token_ids=[1, 1, 3])
    processed = state.processed(logits[0].numpy())
    expected = [2.0, 2.05 - 1.0 - 1.0, -8.0, -7.8 - 1.0 - 0.5, 1.0, -9.0, -9.0, -9.0]
    assert np.allclose(processed, expected, rtol=0, atol=1e-6)


def test_without_repetition_penalty_the_prompt_is_not_penalised() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    state = make_state(params, 8, prompt_token_ids=[0, 2])
    logits = np.arange(8, dtype=np.float32)
    assert state.processed(logits) is logits


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20])
def test_rule_9_logprobs_are_raw(num_logprobs: int) -> None:
    """Before penalties, masks and temperature; the chosen token first, then the most likely ones with their ranks."""
    vocab_size = 49152
    logits = make_logits(2, vocab_size, seed=6)
    params = SamplingParams(
        temperature=2.0, logprobs=num_logprobs, logit_bias={11: 100.0}, presence_penalty=2.0, allowed_token_ids=[11, 12]
    )
    likely = SamplingParams(temperature=0, logprobs=num_logprobs)
    output = sample(logits, [make_state(params, vocab_size), make_state(likely, vocab_size)])
    for row in range(2):
        expected = log_softmax(logits[row].numpy())
        order = np.argsort(-expected, kind="stable")
        entry = output.logprobs[row]
        assert entry is not None
        assert entry.token_ids[0] == output.token_ids[row]
        assert entry.token_ids[1:] == [i for i in order[:num_logprobs].tolist() if i != output.token_ids[row]]
        assert entry.ranks == [int(np.flatnonzero(order == i)[0]) + 1 for i in entry.token_ids]
        assert np.allclose(entry.logprobs, expected[entry.token_ids], rtol=0, atol=2e-6)
    assert output.token_ids[0] == 11
    assert output.logprobs[0].ranks[0] > 1000  # type: ignore[union-attr]
    assert output.logprobs[1].ranks[0] == 1  # type: ignore[union-attr]


def test_logprobs_of_equals_have_one_order() -> None:
    logits = torch.zeros(1, 600)
    params = SamplingParams(logprobs=3, allowed_token_ids=[5])
    entry = sample(logits, [make_state(params, 600)]).logprobs[0]
    assert entry is not None
    assert (entry.token_ids, entry.ranks) == ([5, 0, 1, 2], [6, 1, 2, 3])


@pytest.mark.parametrize(
    "parameters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"logprobs": 2, "logit_bias": {0: 1.0}}], ids=str
)
@pytest.mark.parametrize("broken", ["nan", "inf", "one nan", "all -inf"])
def test_a_row_that_is_not_finite_fails_alone(parameters: dict[str, Any], broken: str) -> None:
    logits = make_logits(3, 700, seed=1)
    good = [make_state(SamplingParams(**parameters), 700, seed=i) for i in range(3)]
    expected = sample(logits.clone(), good)
    fill = {"nan": np.nan, "inf": np.inf, "one nan": logits[1], "all -inf": -np.inf}[broken]
    logits[1] = torch.as_tensor(fill)
    if broken == "one nan":
        logits[1, 333] = np.nan
    states = [make_state(SamplingParams(**parameters), 700, seed=i) for i in range(3)]
    output = sample(logits, states)
    assert list(output.errors) == [1]
    assert "not finite" in output.errors[1]
    assert output.token_ids == [expected.token_ids[0], -1, expected.token_ids[2]]
    assert [state.num_output_tokens for state in states] == [1, 0, 1]


def test_masks_that_leave_nothing_fail_alone() -> None:
    logits = make_logits(2, 50, seed=1)
    params = SamplingParams(allowed_token_ids=[3], min_tokens=2, max_tokens=4)
    states = [make_state(params, 50, stop_token_ids=frozenset({3})), make_state(SamplingParams(), 50)]
    output = sample(logits, states)
    assert list(output.errors) == [0]
    assert "allowed_token_ids" in output.errors[0]
    assert output.token_ids[1] >= 0


@pytest.mark.parametrize(
    ("parameters", "field"),
    [({"allowed_token_ids": [3, 50]}, "allowed_token_ids"), ({"logit_bias": {50: 1.0}}, "logit_bias")],
)
def test_rule_11_an_id_outside_the_vocabulary_names_its_field(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match="50 is outside the vocabulary of 50") as caught:
        make_state(SamplingParams(**parameters), 50)
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError, match="bad_words"):
        make_state(SamplingParams(), 50, bad_words_token_ids=[[1, -1]])
