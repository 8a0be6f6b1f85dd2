"""Whole steps on a tiny Llama: the same tokens as Transformers, and the same bits whatever else happens in a step.

Rules 1, 4 and 10: preemption by recompute and by swap, copies, chunks and neighbours change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Chances, Driver, Sequence, make_executor
from tiny_models import make_model
from token_reference import Reference

from pyengine.config import EngineArgs, EngineConfig
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import NewRequestData, SchedulerOutput
from pyengine.worker.executor import UniprocExecutor
from pyengine.worker.input_batch import StepInputs
from pyengine.worker.step_replay import EagerStepRunner, ReplayedStepRunner, StepLogits, StepRunner

NUM_OUTPUT = 10
EVERYTHING = Chances(idle=0.2, swap_out=0.15, swap_in=0.5, recompute=0.08, copy=0.3, whole_prompt=0.4)


def make_args(device: str = "cpu", **changes: object) -> EngineArgs:
    flags = {"device": device, "max_num_seqs": 8, "max_model_len": 256, "num_kv_blocks": 60, "swap_space": 0.004}
    return EngineArgs(**(flags | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cpu(tiny_llama: Path) -> Iterator[tuple[UniprocExecutor, EngineConfig]]:
    executor, config = make_executor(tiny_llama, make_args())
    yield executor, config
    executor.shutdown()


def step_runner(executor: UniprocExecutor) -> StepRunner:
    assert executor._worker._runner is not None
    return executor._worker._runner._step


def prompts(count: int = 8) -> list[list[int]]:
    return [[(i * 31 + j * 17 + j * j * i) % 508 + 4 for j in range(1 + 13 * i)] for i in range(count)]


def greedy_sequences(logprobs: int | None = 3, count: int = 8) -> list[Sequence]:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, logprobs=logprobs)
    return [Sequence(str(i), prompt, params) for i, prompt in enumerate(prompts(count))]


def sampled_sequences() -> list[Sequence]:
    """Every sampling parameter that has a memory or draws."""
    variants = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.4, "temperature": 0},
        {"frequency_penalty": 0.7, "presence_penalty": 0.5},
        {"min_tokens": 8, "logit_bias": {5: 4.0}},
        {"allowed_token_ids": list(range(100, 140))},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.95},
    ]
    return [
        Sequence(
            str(i),
            prompt,
            SamplingParams(max_tokens=NUM_OUTPUT, logprobs=2, **variant),  # type: ignore[arg-type]
            seed=1000 + i,
            stop_token_ids=frozenset({5, 6, 7}),
            bad_words=[[9], [10, 11], [120, 121, 122]],
        )
        for i, (prompt, variant) in enumerate(zip(prompts(), variants, strict=True))
    ]


def results(sequences: list[Sequence]) -> list[tuple[object, ...]]:
    assert not [sequence.error for sequence in sequences if sequence.error]
    return [(s.output, s.logprobs, s.prompt_logprobs) for s in sequences]


def test_greedy_tokens_equal_transformers(cpu: tuple[UniprocExecutor, EngineConfig], transformers_reference: Reference) -> None:
    for sequence in Driver(*cpu).run(greedy_sequences()):
        assert sequence.output == transformers_reference.greedy(tuple(sequence.prompt), NUM_OUTPUT)
        expected = transformers_reference.logprobs(sequence.prompt + sequence.output)[len(sequence.prompt) - 1 : -1]
        for entry, row in zip(sequence.logprobs, expected, strict=True):
            assert entry.ranks == [1, 2, 3]
            assert torch.allclose(row[entry.token_ids], torch.tensor(entry.logprobs, dtype=torch.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("make_sequences", [greedy_sequences, sampled_sequences])
@pytest.mark.parametrize(
    "chances",
    [
        Chances(whole_prompt=0.0),
        Chances(idle=0.5),
        Chances(recompute=0.2),
        Chances(swap_out=0.3, swap_in=0.5),
        Chances(copy=0.5),
        EVERYTHING,
    ],
    ids=lambda chances: ",".join(k for k in vars(EVERYTHING) if getattr(chances, k) != getattr(Chances(), k)),
)
def test_rules_1_and_10_the_same_bits_whatever_happens(
    cpu: tuple[UniprocExecutor, EngineConfig], make_sequences: object, chances: Chances
) -> None:
    """Tokens and log-probabilities equal those of each sequence alone, bit for bit."""
    assert callable(make_sequences)
    alone = [Driver(*cpu).run([sequence])[0] for sequence in make_sequences()]
    for seed in range(3):
        driver = Driver(*cpu, chances, seed)
        assert results(driver.run(make_sequences())) == results(alone)
        for what, count in driver.counts.items():
            wanted = {"chunk": chances.whole_prompt < 1, "swap_in": chances.swap_out > 0, "steps": True}
            assert (count > 0) == wanted.get(what, getattr(chances, what, 0) > 0), what


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3", "int8"])
def test_rule_1_the_same_bits_with_a_smaller_cache_type(tiny_llama: Path, kv_cache_dtype: str) -> None:
    """An INT8 cache has scales, which must travel with their blocks."""
    executor, config = make_executor(tiny_llama, make_args(kv_cache_dtype=kv_cache_dtype))
    alone = [Driver(executor, config).run([sequence])[0] for sequence in greedy_sequences()]
    driver = Driver(executor, config, EVERYTHING)
    assert results(driver.run(greedy_sequences())) == results(alone)
    assert min(driver.counts["swap_in"], driver.counts["copy"]) > 3
    executor.shutdown()


def test_rule_4_emulated_late_copies_are_waited_for(tiny_llama: Path, transformers_reference: Reference) -> None:
    """The emulated copy stream runs late and spoils its targets until then: a missing wait gives other tokens, or NaN."""
    executor, config = make_executor(tiny_llama, make_args("emulated", num_kv_blocks=16))
    chances = Chances(swap_out=0.4, swap_in=0.7, copy=0.3, whole_prompt=0.7)
    try:
        for seed in range(2):
            driver = Driver(executor, config, chances, seed)
            sequences = driver.run(greedy_sequences(None, count=5))
            for sequence in sequences:
                assert sequence.error is None
                assert sequence.output == transformers_reference.greedy(tuple(sequence.prompt), NUM_OUTPUT)
            assert min(driver.counts["swap_out"], driver.counts["copy"]) > 3
    finally:
        executor.shutdown()


def test_emulated_split_kv_gives_the_cpu_tokens(tiny_llama: Path, cpu: tuple[UniprocExecutor, EngineConfig]) -> None:
    """A sequence long enough for several parts, beside short ones."""
    args = make_args("emulated", max_model_len=700, num_kv_blocks=60, max_num_batched_tokens=700)
    params = SamplingParams(temperature=0, max_tokens=3)
    long = [(7 * j * j + j) % 508 + 4 for j in range(530)]

    def sequences() -> list[Sequence]:
        return [Sequence("long", long, params), Sequence("short", long[:20], params)]

    outputs = []
    for device in ("emulated", "cpu"):
        executor, config = make_executor(tiny_llama, make_args(device, **{k: getattr(args, k) for k in LONG}))
        outputs.append([sequence.output for sequence in Driver(executor, config).run(sequences())])
        executor.shutdown()
    assert outputs[0] == outputs[1]


LONG = ("max_model_len", "num_kv_blocks", "max_num_batched_tokens")


@pytest.mark.parametrize("whole_prompt", [1.0, 0.0])
def test_rule_9_prompt_logprobs_over_chunks(
    cpu: tuple[UniprocExecutor, EngineConfig], transformers_reference: Reference, whole_prompt: float
) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    sequences = [Sequence(str(i), prompt, params) for i, prompt in enumerate(prompts(5))]
    for sequence in Driver(*cpu, Chances(whole_prompt=whole_prompt)).run(sequences):
        prompt = sequence.prompt
        assert sorted(sequence.prompt_logprobs) == list(range(1, len(prompt)))
        expected = transformers_reference.logprobs(prompt)
        for position, entry in sequence.prompt_logprobs.items():
            row = expected[position - 1]
            assert entry.token_ids[0] == prompt[position]
            assert entry.token_ids[1:] == [i for i in row.topk(2).indices.tolist() if i != prompt[position]]
            assert entry.ranks[0] == 1 + int((row > row[prompt[position]]).sum())
            assert torch.allclose(row[entry.token_ids], torch.tensor(entry.logprobs, dtype=torch.float64), rtol=0, atol=1e-4)


def test_only_rows_that_sample_get_logits(cpu: tuple[UniprocExecutor, EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    executor, config = cpu
    step = step_runner(executor)
    assert isinstance(step, ReplayedStepRunner)
    rows: list[int] = []
    run = step.run

    def counted(inputs: StepInputs) -> StepLogits:
        result = run(inputs)
        rows.append(len(result.logits))
        return result

    monkeypatch.setattr(step, "run", counted)
    sequences = greedy_sequences(None)
    Driver(executor, config, Chances(whole_prompt=0.0)).run(sequences)
    assert sum(rows) == sum(len(sequence.output) for sequence in sequences)


SCORED = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
PLAIN = SamplingParams(temperature=0, max_tokens=4, logprobs=2)


def scored_sequences(scored: Callable[[int], bool]) -> list[Sequence]:
    """Some of which want the log-probabilities of their prompts, and so a row of each token in the last layer."""
    return [Sequence(str(i), prompt, SCORED if scored(i) else PLAIN) for i, prompt in enumerate(prompts(6))]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({"architecture": "Qwen3ForCausalLM", "use_sliding_window": False}, {"kv_cache_dtype": "int8"}),
        ({"architecture": "Qwen2ForCausalLM", "use_sliding_window": False}, {"quantization": "int4"}),
        ({"architecture": "MistralForCausalLM", "sliding_window": 12}, {"kv_cache_dtype": "fp8_e4m3"}),
    ],
    ids=["llama-bf16", "qwen3-int8-cache", "qwen2-int4", "window-fp8-cache"],
)
def test_rows_that_are_wanted_have_the_bits_of_whole_steps(
    model: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    path = make_model(tmp_path, **model)

    def run(scored: Callable[[int], bool], *, eager: bool) -> list[Sequence]:
        executor, config = make_executor(path, make_args(**flags, enforce_eager=eager))
        assert isinstance(step_runner(executor), EagerStepRunner if eager else ReplayedStepRunner)
        sequences = Driver(executor, config, EVERYTHING, seed=1).run(scored_sequences(scored))
        executor.shutdown()
        return sequences

    whole = run(lambda i: True, eager=True)  # every row of every step is wanted
    results(whole)
    for scored in (lambda i: False, lambda i: i % 2 == 0):
        for eager in (True, False):
            for sequence, expected in zip(run(scored, eager=eager), whole, strict=True):
                assert (sequence.error, sequence.output, sequence.logprobs) == (None, expected.output, expected.logprobs)
                assert sequence.prompt_logprobs == (expected.prompt_logprobs if sequence.params is SCORED else {})


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_neighbour_whose_prompt_is_scored_changes_no_bit(device: str, tiny_llama: Path) -> None:
    executor, config = make_executor(tiny_llama, make_args(device))
    for scored in (lambda i: False, lambda i: i == 0):
        alone = [Driver(executor, config).run([sequence])[0] for sequence in scored_sequences(scored)[1:4]]
        together = Driver(executor, config).run(scored_sequences(scored)[:4])
        assert results(together[1:]) == results(alone)
    executor.shutdown()


def test_rule_11_a_request_that_cannot_run_fails_alone(cpu: tuple[UniprocExecutor, EngineConfig]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT)
    bad = [
        Sequence("vocabulary", [3, 600], params),
        Sequence(
            "mask", [3, 4], SamplingParams(max_tokens=4, min_tokens=2, allowed_token_ids=[5]), stop_token_ids=frozenset({5})
        ),
        Sequence("bias", [3, 4], SamplingParams(max_tokens=4, logit_bias={512: 1.0})),
    ]
    good = greedy_sequences(count=5)
    alone = results(Driver(*cpu).run(greedy_sequences(count=5)))
    Driver(*cpu).run([*good, *bad])
    assert results(good) == alone
    assert [sequence.output for sequence in bad] == [[], [], []]
    for sequence, message in zip(bad, ("token id 600 is outside the vocabulary of 512", "no token", "logit_bias"), strict=True):
        assert sequence.error is not None
        assert message in sequence.error
    assert executor_requests(cpu[0]) == 0


def executor_requests(executor: UniprocExecutor) -> int:
    assert executor._worker._runner is not None
    return executor._worker._runner.num_requests


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_not_a_number_fails_its_own_request_only(tiny_llama: Path, device: str) -> None:
    """Nor do NaNs that it left in its blocks reach the sequences that use them next."""
    executor, config = make_executor(tiny_llama, make_args(device, num_kv_blocks=20))
    model = executor._worker._model
    embedding = getattr(model, "_embedding", None)
    assert embedding is not None
    alone = results(Driver(executor, config).run(greedy_sequences(count=4)))
    token_of_doom = 511
    assert not any(token_of_doom in prompt for prompt in prompts(4))
    embedding.weight[token_of_doom] = torch.nan
    for logprobs in ({}, {"prompt_logprobs": 1}):
        params = SamplingParams(temperature=0, max_tokens=3, **logprobs)  # type: ignore[arg-type]
        doomed = Sequence("doomed", [*range(20, 60), token_of_doom, *range(60, 80)], params)
        driver = Driver(executor, config)
        together = driver.run([doomed, *greedy_sequences(count=3)])
        assert doomed.error is not None
        assert "not finite" in doomed.error
        assert results(together[1:]) == alone[:3]
        assert results(driver.run(greedy_sequences(count=4))) == alone
    executor.shutdown()


def test_a_request_that_failed_on_its_prompt_gives_no_token(
    cpu: tuple[UniprocExecutor, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, config = cpu
    step = step_runner(executor)
    compute_logits = step.compute_logits

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        """The prompt's rows come first, and more than one at a time."""
        return compute_logits(hidden) * (torch.inf if len(hidden) > 1 else 1.0)

    monkeypatch.setattr(step, "compute_logits", spoilt)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    (sequence,) = Driver(executor, config).run([Sequence("a", list(range(5, 15)), params)])
    assert sequence.error is not None
    assert "not finite" in sequence.error
    assert sequence.output == []


def test_no_more_prompt_logprobs_than_the_scheduler_wants(cpu: tuple[UniprocExecutor, EngineConfig]) -> None:
    """The client's parameters do not say: after a preemption they may all have been reported."""
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    for wanted in (1, None):
        new = NewRequestData("a", [5, 6, 7], [8], params, 0, [1], 0, frozenset(), num_prompt_logprobs=wanted)
        result = cpu[0].execute_model(
            SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 4}, total_num_scheduled_tokens=4)
        )
        cpu[0].execute_model(SchedulerOutput(finished_req_ids=["a"]))
        assert len(result.sampled_token_ids["a"]) == 1
        assert {req_id: len(entries) for req_id, entries in result.prompt_logprobs.items()} == ({"a": 2} if wanted else {})


def test_a_broken_step_is_an_exception_and_not_a_failed_request(cpu: tuple[UniprocExecutor, EngineConfig]) -> None:
    new = NewRequestData("a", [5, 6, 7], [], SamplingParams(), 0, [1], 0, frozenset())
    out = SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 40}, total_num_scheduled_tokens=40)
    with pytest.raises(RuntimeError, match="sequence a is scheduled up to token 40"):
        cpu[0].execute_model(out)
    cpu[0].execute_model(SchedulerOutput(finished_req_ids=["a", "never seen"]))
    assert executor_requests(cpu[0]) == 0


def test_ended_while_swapped_out(cpu: tuple[UniprocExecutor, EngineConfig]) -> None:
    executor, _ = cpu
    new = NewRequestData("a", [5, 6, 7], [], SamplingParams(), 0, [1], 0, frozenset())
    executor.execute_model(
        SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 3}, total_num_scheduled_tokens=3)
    )
    executor.execute_model(SchedulerOutput(swapped_out_req_ids=["a"], blocks_to_swap_out=[(1, 0)]))
    assert executor_requests(executor) == 1
    executor.execute_model(SchedulerOutput(finished_req_ids=["a"]))
    assert executor_requests(executor) == 0


def test_torch_threads_are_the_callers_again_after_a_step(cpu: tuple[UniprocExecutor, EngineConfig]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Driver(*cpu).run(greedy_sequences(count=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [lambda: greedy_sequences(3), sampled_sequences], ids=["greedy", "sampled"])
def test_steps_run_op_by_op_give_the_same_bits(
    cpu: tuple[UniprocExecutor, EngineConfig], tiny_llama: Path, make: Callable[[], list[Sequence]]
) -> None:
    """Replayed steps against eager ones, with chunks, preemption, swaps and copies of their own."""
    assert isinstance(step_runner(cpu[0]), ReplayedStepRunner)
    executor, config = make_executor(tiny_llama, make_args(enforce_eager=True))
    assert isinstance(step_runner(executor), EagerStepRunner)
    expected = results(Driver(executor, config, EVERYTHING, seed=1).run(make()))
    executor.shutdown()
    for chances, seed in ((Chances(), 2), (EVERYTHING, 3), (EVERYTHING, 4)):
        assert results(Driver(*cpu, chances, seed=seed).run(make())) == expected
