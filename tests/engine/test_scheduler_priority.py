"""The policy "priority": lower values run first, and may take a running request's place."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import Harness

PREEMPTION = [
    pytest.param({"preemption_mode": "recompute"}, id="recompute"),
    pytest.param({"preemption_mode": "swap", "num_cpu_blocks": 64}, id="swap"),
]


def steps_to_first_token(harness: Harness, request_id: str) -> int:
    for steps in range(1, 1000):
        harness.step()
        if harness.outputs[request_id]:
            return steps
    raise AssertionError("no token")


@pytest.mark.parametrize("mode", PREEMPTION)
def test_rule_02_an_urgent_request_takes_a_slot_at_once(mode: dict[str, Any]) -> None:
    """Behaviour 2: time to first token stays bounded when all slots are taken."""
    harness = Harness(policy="priority", max_num_seqs=3, **mode)
    for i in range(6):
        harness.add(f"low{i}", 4, 50, priority=1)
    harness.step()
    harness.step()
    harness.add("urgent", 10, 4, priority=0)
    assert steps_to_first_token(harness, "urgent") == 1
    assert [r.request_id for r in harness.scheduler.live.running] == ["urgent", "low0", "low1"], (
        "the latest of the least urgent goes"
    )
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("mode", PREEMPTION)
def test_rule_02_an_urgent_request_takes_blocks_at_once(mode: dict[str, Any]) -> None:
    """Behaviour 2: the same when slots are free and memory is not."""
    harness = Harness(policy="priority", num_blocks=24, block_size=2, **mode)
    for i in range(4):
        harness.add(f"low{i}", 8, 8, priority=1)
    for _ in range(4):
        harness.step()
    harness.add("urgent", 20, 4, priority=0)
    assert steps_to_first_token(harness, "urgent") == 1
    assert harness.requests["low0"].num_preemptions == 0, "no more are preempted than it takes"
    harness.run()
    harness.check_outputs()


def test_rule_02_several_urgent_requests_start_together() -> None:
    """Behaviour 2: one step lets in as many as there are slots to take."""
    harness = Harness(policy="priority", max_num_seqs=4)
    for i in range(4):
        harness.add(f"low{i}", 4, 50, priority=5)
    harness.step()
    for i in range(3):
        harness.add(f"urgent{i}", 4, 3, priority=i)
    harness.step()
    assert set(harness.scheduled()) == {"low0", "urgent0", "urgent1", "urgent2"}
    harness.run()
    harness.check_outputs()


def test_rule_02_an_urgent_prompt_does_not_wait_for_a_long_one() -> None:
    """Behaviour 2: the token budget, too, goes to the urgent request first; running decodes keep theirs."""
    harness = Harness(policy="priority", num_blocks=200, max_num_batched_tokens=16)
    harness.add("decoding", 2, 100, priority=1)
    harness.step()
    harness.add("long", 300, 4, priority=1)
    harness.step()
    harness.add("urgent", 12, 4, priority=0)
    harness.step()
    assert harness.scheduled()["urgent"] == 12
    assert harness.scheduled()["decoding"] == 1
    harness.run()
    harness.check_outputs()


def test_equal_priorities_do_not_preempt_each_other() -> None:
    harness = Harness(policy="priority", max_num_seqs=2)
    for i in range(4):
        harness.add(f"r{i}", 4, 6, priority=3)
    harness.run()
    assert all(request.num_preemptions == 0 for request in harness.requests.values())


def test_waiting_requests_start_by_priority_then_by_arrival() -> None:
    harness = Harness(policy="priority", max_num_seqs=1)
    for request_id, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 0)):
        harness.add(request_id, 3, 2, priority=priority)
    started = []
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        started += [new.req_id for new in harness.last_step.scheduled_new_reqs]
    assert started == ["d", "b", "a", "c"]


def test_nobody_is_preempted_in_vain() -> None:
    harness = Harness(policy="priority", num_blocks=16, block_size=2)
    harness.add("big", 20, 4, priority=0)
    harness.add("small", 2, 12, priority=2)
    harness.step()
    harness.add("urgent", 24, 4, priority=1)
    for _ in range(3):
        harness.step()
    assert harness.requests["small"].num_preemptions == 0, "its two blocks would not have been enough"
    harness.run()
    harness.check_outputs()


def test_a_protected_request_is_left_to_get_its_token() -> None:
    harness = Harness(policy="priority", max_num_seqs=1, max_num_batched_tokens=4, enable_prefix_caching=False)
    harness.add("low", 12, 6, priority=1)
    for _ in range(4):
        harness.step()
    for i in range(20):
        harness.add(f"urgent{i}", 2, 1, priority=0)
        harness.step()
    harness.run()
    low = harness.requests["low"]
    assert 0 < low.num_preemptions <= 6
    harness.check_outputs()


def test_victims_of_memory_are_the_least_urgent() -> None:
    harness = Harness(policy="priority", num_blocks=9, block_size=2)
    harness.add("low", 4, 8, priority=2)
    harness.add("high", 4, 8, priority=1)
    preempted: list[str] = []
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        preempted += harness.last_step.preempted_req_ids
    assert preempted == ["low"], "although it came first"
    harness.check_outputs()


def test_an_urgent_sibling_waits_for_its_prompt_and_holds_up_nobody() -> None:
    harness = Harness(policy="priority", max_num_seqs=4, max_num_batched_tokens=8)
    for i in range(4):
        harness.add(f"low{i}", 2, 30, priority=1)
    harness.step()
    harness.add_siblings("n", 12, 3, 4, priority=0)
    harness.run()
    harness.check_outputs()
    prompt_tokens = harness.worker.num_computed_tokens
    assert prompt_tokens < 4 * 32 + 12 + 2 * 13 + 60
