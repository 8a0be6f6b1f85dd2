"""Pacing, by a clock of the test's own: steps keep to what is aimed at, use what it leaves, and prompts always get on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import pytest
from fake_executor import FakeExecutor, counting, fake_config, fake_engine

from pyengine.config import EngineArgs, UsageContext
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.pace import MIN_PROMPT_TOKENS, PROBE_INTERVAL, RelativePacer, TargetPacer
from pyengine.engine.startup import EngineParts
from pyengine.errors import ConfigError
from pyengine.inputs import TokensPrompt
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize(
    ("fixed", "per_stream", "per_prompt_token"), [(0.004, 0.0002, 0.0002), (0.02, 0.00001, 0.00005), (0.001, 0.001, 0.0005)]
)
def test_any_machine_is_learnt(fixed: float, per_stream: float, per_prompt_token: float) -> None:
    """Steps with endless prompts to compute, a varying number of streams, and times that vary by 3%."""
    rng, target = random.Random(0), 0.05
    pacer = TargetPacer(target, 2048, 256)
    times, uses = [], []
    for step in range(600):
        num_streams = 4 + 12 * (step // 60 % 3)
        num_prompt_tokens = pacer.limits(num_streams).num_tokens - num_streams
        seconds = (fixed + per_stream * num_streams + per_prompt_token * num_prompt_tokens) * rng.gauss(1, 0.03)
        pacer.observe(seconds, num_streams, num_prompt_tokens)
        if step > 30:
            times.append(seconds)
            possible = (target - fixed - per_stream * num_streams) / per_prompt_token
            uses.append(num_prompt_tokens / min(possible, 2048 - num_streams))
    assert percentile(times, 0.95) < 1.05 * target
    assert sum(uses) / len(uses) > 0.75, "what the target allows is used"


def test_nothing_is_held_back_while_nobody_streams() -> None:
    pacer = TargetPacer(0.001, 512, 64)
    for _ in range(20):
        pacer.observe(1.0, 0, 512)
    assert (pacer.limits(0).num_tokens, pacer.limits(0).num_seqs) == (512, 64)
    assert pacer.limits(3).num_tokens == 3 + MIN_PROMPT_TOKENS


def test_new_streams_are_let_in_as_far_as_the_target_allows() -> None:
    """Where a stream costs a millisecond, 40 ms hold fewer than 40 of them, and more than 30."""
    pacer = TargetPacer(0.04, 512, 256)
    rng = random.Random(1)
    for _ in range(200):
        num_streams, num_prompt_tokens = rng.randrange(1, 60), rng.randrange(0, 40)
        pacer.observe(0.001 * num_streams + 0.0001 * num_prompt_tokens, num_streams, num_prompt_tokens)
    assert 30 <= pacer.limits(20).num_seqs < 40


def test_a_disturbed_step_is_not_taken_for_the_rule() -> None:
    pacer = TargetPacer(0.05, 512, 64)
    for step in range(100):
        pacer.observe(0.01 + 0.0002 * (step % 100), 8, step % 100)
    before = pacer.limits(8).num_tokens
    pacer.observe(30.0, 8, 50)  # the process was stopped for half a minute
    assert pacer.limits(8).num_tokens > before / 3
    for step in range(60):
        pacer.observe(0.01 + 0.0002 * (step % 100), 8, step % 100)
    assert pacer.limits(8).num_tokens > 0.8 * before


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    target_itl_ms: float | None, cost: Callable[[int, int], float], usage_context: UsageContext = "llm_class"
) -> tuple[dict[str, list[int]], list[float], int]:
    """Streams that run, and long prompts that arrive all the time: tokens by request, ITLs of the streams, and steps."""
    clock = Clock()
    config = fake_config(
        max_position_embeddings=1024,
        num_kv_blocks=2000,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        skip_tokenizer_init=True,
        target_itl_ms=target_itl_ms,
        usage_context=usage_context,
    )

    class Timed(FakeExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            counts = scheduler_output.num_scheduled_tokens.values()
            clock.now += cost(sum(count == 1 for count in counts), sum(count for count in counts if count > 1))
            return super().execute_model(scheduler_output)

    engine = LLMEngine(EngineArgs(), parts=EngineParts(config, Timed(counting), None), clock=clock)
    tokens: dict[str, list[int]] = {}
    seen: dict[str, float] = {}
    gaps: list[float] = []

    def add(name: str, first: int, prompt_len: int, max_tokens: int) -> None:
        prompt = [5 + (first + i) % 400 for i in range(prompt_len)]
        engine.add_request(name, TokensPrompt(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    for i in range(4):
        add(f"stream{i}", i, 4, 400)
    steps = 0
    while engine.has_unfinished_requests():
        if steps % 25 == 0 and steps < 350:
            add(f"long{steps}", 7 + steps, 600, 4)
        steps += 1
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            if output.request_id.startswith("stream"):
                if output.request_id in seen and steps > 60:
                    gaps.append(clock.now - seen[output.request_id])
                seen[output.request_id] = clock.now
    assert engine.stats()["num_free_blocks"] == 2000
    return tokens, gaps, steps


def cost(num_streams: int, num_prompt_tokens: int) -> float:
    return 0.008 + 0.0002 * num_streams + 0.0004 * num_prompt_tokens


def test_streams_keep_their_pace_and_tokens_stay_the_same() -> None:
    free, free_gaps, _ = run(None, cost)
    paced, gaps, _ = run(30.0, cost)
    assert percentile(free_gaps, 0.99) > 0.1, "a whole chunk of 512 in one step"
    assert percentile(gaps, 0.95) <= 1.2 * 0.030
    assert max(gaps) < 0.06
    assert paced == free


def test_a_target_that_cannot_be_met_stops_nobody() -> None:
    free, _, _ = run(None, cost)
    paced, _, _ = run(0.5, cost)
    assert paced == free


def test_wrong_targets() -> None:
    assert fake_config(target_itl_ms=0, enable_chunked_prefill=False).scheduler.target_itl is None, "0: no target"
    for value in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="target_itl_ms"):
            EngineArgs(target_itl_ms=value)
    with pytest.raises(ConfigError, match="target_itl_ms: needs chunked prefill"):
        EngineArgs(target_itl_ms=10.0, enable_chunked_prefill=False)
    assert fake_engine(counting)[0]._pacer is None


# ---- relative to what streams alone take


@dataclass(frozen=True)
class Machine:
    """What steps take: affine, or by stairs of several streams, with noise; now and then one is disturbed."""

    fixed: float
    per_stream: float
    per_prompt_token: float
    stair: int = 1
    noise: float = 0.05
    disturbed: float = 0.0

    def decode(self, num_streams: int) -> float:
        return self.fixed + self.per_stream * self.stair * -(-num_streams // self.stair)

    def step(self, num_streams: int, num_prompt_tokens: int, rng: random.Random) -> float:
        seconds = (self.decode(num_streams) + self.per_prompt_token * num_prompt_tokens) * max(0.5, rng.gauss(1, self.noise))
        return seconds * rng.uniform(2, 10) if rng.random() < self.disturbed else seconds


def simulate(
    pacer: RelativePacer, machine: Machine, num_streams: Callable[[int], int], num_steps: int = 800, seed: int = 0
) -> tuple[list[float], list[int], float]:
    """Steps with endless prompts: their times over those without prompts, their prompt tokens, and seconds in all."""
    rng, ratios, prompts, total = random.Random(seed), [], [], 0.0
    for step in range(num_steps):
        streams = num_streams(step)
        prompt_tokens = pacer.limits(streams).num_tokens - streams
        seconds = machine.step(streams, prompt_tokens, rng)
        pacer.observe(seconds, streams, prompt_tokens)
        ratios.append(seconds / machine.decode(streams))
        prompts.append(prompt_tokens)
        total += seconds
    return ratios, prompts, total


MACHINES = [
    Machine(0.008, 0.0002, 0.0004),
    Machine(0.001, 0.001, 0.0005),
    Machine(0.1, 0.001, 0.004),
    Machine(0.011, 0.0012, 0.0007, stair=16),
    Machine(0.011, 0.0012, 0.0007, noise=0.2),
]


@pytest.mark.parametrize("num_streams", [lambda step: 28, lambda step: 4 + step * 7 // 10 % 40], ids=["steady", "varying"])
@pytest.mark.parametrize("machine", MACHINES)
def test_steps_take_a_few_times_what_streams_alone_take(machine: Machine, num_streams: Callable[[int], int]) -> None:
    ratios, prompts, total = simulate(RelativePacer(3.0, 2048, 256), machine, num_streams)
    assert percentile(ratios, 0.99) <= 4.0
    # Prompts get most of the time; with as much as is allowed and no noise, it would be two thirds of it.
    assert sum(prompts) * machine.per_prompt_token / total > 0.45
    assert statistics.median(ratios) > 1.8


def test_a_disturbed_machine_slows_prompts_a_little() -> None:
    calm, disturbed = (
        simulate(RelativePacer(3.0, 2048, 256), Machine(0.011, 0.0012, 0.0007, disturbed=share), lambda step: 28)[1]
        for share in (0.0, 0.02)
    )
    assert sum(disturbed) > 0.7 * sum(calm)


@pytest.mark.parametrize("seconds", [30.0, 0.0001])
def test_a_first_step_that_was_out_of_the_ordinary_is_made_up_for(seconds: float) -> None:
    """The first step without prompts says what streams take; the next ones say otherwise."""
    pacer = RelativePacer(3.0, 2048, 256)
    pacer.observe(seconds, 28, 0)
    ratios, prompts, _ = simulate(pacer, MACHINES[0], lambda step: 28, 200)
    assert percentile(ratios[20:], 0.99) <= 4.0
    assert statistics.median(prompts[100:]) > 2 * MIN_PROMPT_TOKENS


def test_prompts_always_get_on() -> None:
    """Even where nothing is left for them: two steps in a row have some, whether or not any step is seen."""
    pacer = RelativePacer(3.0, 2048, 256)
    given = [pacer.limits(8).num_tokens - 8 for _ in range(6)]
    assert given == [0, MIN_PROMPT_TOKENS] * 3, "steps that were never observed"
    _, prompts, _ = simulate(pacer, Machine(0.001, 0.0, 1.0), lambda step: 1 + step % 200, 400)
    assert all(a + b >= MIN_PROMPT_TOKENS for a, b in pairwise(prompts))


def test_what_streams_take_is_looked_at_again() -> None:
    """A machine that becomes three times as slow for streams, and not for prompts, has room for more of them."""
    pacer = RelativePacer(3.0, 2048, 256)
    _, before, _ = simulate(pacer, Machine(0.01, 0.0005, 0.0004), lambda step: 16)
    _, after, _ = simulate(pacer, Machine(0.03, 0.0015, 0.0004), lambda step: 16, 1200)
    assert max(len(list(group)) for key, group in groupby(before, bool) if key) <= PROBE_INTERVAL
    assert statistics.median(after[-200:]) > 2 * statistics.median(before[-200:])


def test_relative_pace_holds_nothing_back_while_nobody_streams() -> None:
    pacer = RelativePacer(3.0, 512, 64)
    for _ in range(20):
        pacer.observe(1.0, 0, 512)
    assert (pacer.limits(0).num_tokens, pacer.limits(0).num_seqs) == (512, 64)
    assert pacer.limits(3).num_seqs == 64, "nor new streams while some run"


def test_servers_on_cpus_pace_steps_by_default() -> None:
    free, free_gaps, free_steps = run(0, cost, "server")
    paced, gaps, steps = run(None, cost, "server")
    alone = cost(4, 0)
    assert percentile(free_gaps, 0.99) > 10 * alone
    assert percentile(gaps, 0.99) <= 4 * alone
    assert steps < 4 * free_steps
    assert paced == free


@pytest.mark.parametrize(
    ("args", "ratio"),
    [
        ({"usage_context": "server"}, 3.0),
        ({}, None),
        ({"usage_context": "server", "target_itl_ms": 0}, None),
        ({"usage_context": "server", "target_itl_ms": 50}, None),
        ({"usage_context": "server", "static_batching": True}, None),
        ({"usage_context": "server", "enable_chunked_prefill": False}, None),
    ],
)
def test_who_is_paced_by_default(args: dict[str, Any], ratio: float | None) -> None:
    assert fake_config(**args).scheduler.max_step_ratio == ratio


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_whatever_is_learnt_everybody_ends_where_memory_is_short(policy: str) -> None:
    """Streams that lack the blocks for a token, prompts that must get on before any is free, and times that say nothing."""
    for seed in range(6):
        results = [serve_with_little_memory(seed, policy, usage_context) for usage_context in ("llm_class", "server")]
        assert results[0] == results[1], seed


def serve_with_little_memory(seed: int, policy: str, usage_context: str) -> dict[str, list[int]]:
    rng, times, clock = random.Random(seed), random.Random(seed), Clock()

    class Timed(FakeExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            clock.now += times.choice([0.0, 0.001, 0.1, 1.0]) * times.random()
            return super().execute_model(scheduler_output)

    config = fake_config(
        num_kv_blocks=rng.choice([16, 20, 40]),
        max_num_seqs=rng.choice([2, 6, 16]),
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
        scheduling_policy=policy,
        usage_context=usage_context,
    )
    engine = LLMEngine(EngineArgs(), parts=EngineParts(config, Timed(counting), None), clock=clock)
    tokens: dict[str, list[int]] = {}
    for step in range(5000):
        if step % 3 == 0 and step < 60:
            prompt = [5 + (step + i) % 400 for i in range(rng.randrange(1, 200))]
            params = SamplingParams(max_tokens=rng.randrange(1, 50), ignore_eos=True)
            engine.add_request(str(step), TokensPrompt(prompt), params, priority=rng.randrange(3))
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if step >= 60 and not engine.has_unfinished_requests():
            return tokens
    raise AssertionError(f"{engine.stats()} after {step + 1} steps")
