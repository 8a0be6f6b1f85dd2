"""--target-itl-ms, by a clock of the test's own: steps keep to the target, use what it leaves, and prompts always get on."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_executor import FakeExecutor, counting, fake_config, fake_engine

from pyengine.config import EngineArgs
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.pace import MIN_PROMPT_TOKENS, StepPacer
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
    pacer = StepPacer(target, 2048, 256)
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
    pacer = StepPacer(0.001, 512, 64)
    for _ in range(20):
        pacer.observe(1.0, 0, 512)
    assert (pacer.limits(0).num_tokens, pacer.limits(0).num_seqs) == (512, 64)
    assert pacer.limits(3).num_tokens == 3 + MIN_PROMPT_TOKENS


def test_new_streams_are_let_in_as_far_as_the_target_allows() -> None:
    """Where a stream costs a millisecond, 40 ms hold fewer than 40 of them, and more than 30."""
    pacer = StepPacer(0.04, 512, 256)
    rng = random.Random(1)
    for _ in range(200):
        num_streams, num_prompt_tokens = rng.randrange(1, 60), rng.randrange(0, 40)
        pacer.observe(0.001 * num_streams + 0.0001 * num_prompt_tokens, num_streams, num_prompt_tokens)
    assert 30 <= pacer.limits(20).num_seqs < 40


def test_a_disturbed_step_is_not_taken_for_the_rule() -> None:
    pacer = StepPacer(0.05, 512, 64)
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


def run(target_itl_ms: float | None, cost: Callable[[int, int], float]) -> tuple[dict[str, list[int]], list[float], int]:
    """Streams that run, and long prompts that arrive all the time: tokens by request, ITLs of the streams, and steps."""
    clock = Clock()
    config = fake_config(
        max_position_embeddings=1024,
        num_kv_blocks=2000,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        skip_tokenizer_init=True,
        target_itl_ms=target_itl_ms,
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
    for value in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="target_itl_ms"):
            EngineArgs(target_itl_ms=value)
    with pytest.raises(ConfigError, match="target_itl_ms: needs chunked prefill"):
        EngineArgs(target_itl_ms=10.0, enable_chunked_prefill=False)
    assert fake_engine(counting)[0]._pacer is None
