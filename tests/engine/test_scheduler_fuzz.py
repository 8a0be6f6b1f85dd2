"""A state machine over scheduler, block manager, prefix cache and swap space: tiny pools, every action at any time.

After every action `Harness` checks reference counts, free lists, fill and cache against the tables, and the dummy worker checks
every KV slot that is read. At the end all requests finish with the tokens that they generate alone, and every block is free.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from scheduling import Harness

from pyengine.engine.prefix_cache import HashFunction, hash_block
from pyengine.errors import InvalidRequestError
from pyengine.tenants import Tenant


def _poor_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    return hash_block(parent_hash, token_ids) % 5


HASH_FUNCTIONS: list[HashFunction] = [hash_block, hash_block, _poor_hash]

# Long runs of few different tokens, so that prefixes are often shared and often nearly shared.
PROMPTS = st.one_of(
    st.integers(1, 24).map(lambda length: [0] * length),
    st.tuples(st.integers(0, 16), st.lists(st.integers(0, 1), min_size=1, max_size=8)).map(lambda p: [0] * p[0] + p[1]),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, aborts, failures, preemptions and resets."""

    @initialize(
        num_blocks=st.integers(4, 16),
        num_cpu_blocks=st.sampled_from([0, 2, 6, 64]),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        hash_function=st.sampled_from(HASH_FUNCTIONS),
        max_num_seqs=st.integers(1, 6),
        spare_tokens=st.integers(0, 20),
        threshold=st.sampled_from([0, 0, 1, 3]),
        chunked=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority"]),
        mode=st.sampled_from(["auto", "recompute", "swap", "swap"]),
        static=st.sampled_from([False, False, False, True]),
        tokens_per_step=st.sampled_from([1, 1, 3]),
        headroom=st.booleans(),
        quota=st.sampled_from([None, None, 0.3, 0.6, 1.0]),
        min_shared_tokens=st.sampled_from([1, 1, 4, 1000]),
    )
    def start(self, **c: Any) -> None:
        budget = c["max_num_seqs"] + c["spare_tokens"]
        self.max_len = c["num_blocks"] * c["block_size"]
        tenants: tuple[Tenant, ...] = ()  # none, or three: "a" has a quota, "b" a limit and weight, "default" nothing special
        self.max_lens = {None: self.max_len, "a": self.max_len, "b": self.max_len}
        if c["quota"] is not None:
            self.max_lens["a"] = int(c["quota"] * c["num_blocks"]) * c["block_size"]
            limited = Tenant(name="b", weight=3.0, max_concurrent=2, cache_group="ab")
            tenants = (Tenant(name="a", kv_quota=c["quota"], cache_group="ab"), limited, Tenant(name="default"))
        if not c["chunked"]:
            budget = max(budget, self.max_len)
        self.harness = Harness(
            num_blocks=c["num_blocks"],
            num_cpu_blocks=c["num_cpu_blocks"],
            block_size=c["block_size"],
            enable_prefix_caching=c["caching"],
            hash_function=c["hash_function"],
            vocab_size=3,
            headroom=c["headroom"],
            min_shared_tokens=c["min_shared_tokens"],
            max_num_seqs=c["max_num_seqs"],
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=c["threshold"],
            enable_chunked_prefill=c["chunked"],
            policy=c["policy"],
            preemption_mode=c["mode"],
            static_batching=c["static"],
            tenants=tenants,
        )
        self.harness.worker.tokens_per_step = c["tokens_per_step"]
        self.num_added = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 4, 7]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, None, "a"]),
        stop=st.sampled_from([None, None, 0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        tenant=st.sampled_from([None, "a", "b"]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        salt: str | None,
        stop: int | None,
        prompt_logprobs: int | None,
        tenant: str | None,
    ) -> None:
        request_id = f"r{self.num_added}"
        self.num_added += 1
        fields: dict[str, Any] = {"priority": priority, "cache_salt": salt, "seed": self.num_added * 100, "tenant": tenant}
        if stop is not None:
            fields["stop_token_ids"] = (stop,)
        fields["prompt_logprobs"] = prompt_logprobs
        fits = len(prompt) + max_tokens <= self.max_lens[tenant]
        try:
            if n == 1:
                self.harness.add(request_id, prompt, max_tokens, **fields)
            else:
                self.harness.add_siblings(request_id, prompt, n, max_tokens, **fields)
        except InvalidRequestError:
            assert not fits
        else:
            assert fits

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.scheduler.live.all)
    @rule(data=st.data(), how_many=st.integers(1, 3))
    def abort(self, data: st.DataObject, how_many: int) -> None:
        live = sorted(self.harness.scheduler.live.all)
        self.harness.abort(*(data.draw(st.sampled_from(live)) for _ in range(how_many)))

    @precondition(lambda self: self.harness.scheduler.live.running)
    @rule(data=st.data(), how_many=st.integers(1, 3))
    def preempt(self, data: st.DataObject, how_many: int) -> None:
        running = sorted(request.request_id for request in self.harness.scheduler.live.running)
        self.harness.scheduler.preempt_requests(data.draw(st.sampled_from(running)) for _ in range(how_many))
        self.harness.step()

    @precondition(lambda self: self.harness.scheduler.live.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(r.request_id for r in self.harness.scheduler.live.running)))
        self.harness.worker.fail[request_id] = "out of luck"
        self.harness.step()
        self.harness.worker.fail.clear()  # it may not have run in this step

    @precondition(lambda self: self.harness.scheduler.live.all)
    @rule(data=st.data(), how_many=st.integers(1, 3))
    def abort_during_step(self, data: st.DataObject, how_many: int) -> None:
        live = sorted(self.harness.scheduler.live.all)
        self.harness.abort_in_next_step = [data.draw(st.sampled_from(live)) for _ in range(how_many)]
        self.harness.step()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "harness") or self.harness.is_broken:
            return
        self.harness.run()
        self.harness.check_outputs()
        for request_id, positions in self.harness.prompt_logprobs.items():
            request = self.harness.requests[request_id]
            assert positions == request.prompt_token_ids[1 : len(positions) + 1], (
                "each prompt position is reported once, in order"
            )
            if self.harness.finish_reasons[request_id] in ("stop", "length"):
                assert len(positions) == request.num_prompt_tokens - 1


def _run(max_examples: int, step_count: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=step_count,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=8),
    num_blocks=st.integers(9, 24),
    budget=st.integers(4, 40),
    threshold=st.sampled_from([0, 1, 3, 8]),
    stop=st.sampled_from([(), (0,)]),
)
def test_rule_03_cold_and_warm_agree_under_eviction_and_chunking(
    prompts: list[list[int]], num_blocks: int, budget: int, threshold: int, stop: tuple[int, ...]
) -> None:
    """Behaviour 3: whatever is cached, evicted or cut into chunks, the same requests give the same tokens."""

    def run(*, caching: bool) -> Harness:
        harness = Harness(
            num_blocks=num_blocks,
            block_size=4,
            vocab_size=3,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=caching,
        )
        for i in range(3):  # the first time cold, then as warm as the pool allows
            for j, prompt in enumerate(prompts):
                harness.add(f"{i}-{j}", prompt, 6, stop_token_ids=stop)
            harness.run()
        return harness

    cold, warm = run(caching=False), run(caching=True)
    assert cold.outputs == warm.outputs
    assert cold.finish_reasons == warm.finish_reasons
    assert {request.num_cached_tokens for request in cold.requests.values()} == {0}


def test_rules_01_03_04_05_14_any_interleaving() -> None:
    """Behaviour 1, 3, 4, 5 and 14: no leak, double free, wrong share, lost request or livelock in any order of events."""
    _run(max_examples=250, step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rules_01_03_04_05_14_any_interleaving_at_length() -> None:
    """The same, for longer."""
    _run(max_examples=700, step_count=50)
