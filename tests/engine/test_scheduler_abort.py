"""Requests that end from outside, wherever they are."""

from __future__ import annotations

import random

import pytest
from scheduling import Harness

from pyengine.engine.request import RequestStatus


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "swapped", "waiting for a sibling"])
def test_rule_05_an_abort_frees_everything_at_once_in_every_state(state: str) -> None:
    """Behaviour 5: queued, prefilling, decoding or swapped; blocks are free when the call returns, nobody else notices."""
    mode = "swap" if state == "swapped" else "recompute"
    harness = Harness(block_size=4, max_num_batched_tokens=8, num_cpu_blocks=16, preemption_mode=mode, max_num_seqs=2)
    harness.add("other", 5, 12)
    harness.step()
    if state == "waiting for a sibling":
        harness.add_siblings("x", 20, 2, 8)
        request_id = "1_x"
    else:
        harness.add("x", 20, 8)
        request_id = "x"
    num_steps = {"waiting": 0, "prefilling": 2}.get(state, 1 if state == "waiting for a sibling" else 5)
    for _ in range(num_steps):
        harness.step()
    if state in ("preempted", "swapped"):
        harness.scheduler.preempt_requests(["x"])
        harness.step()
    request = harness.requests[request_id]
    expected = {
        "waiting": RequestStatus.WAITING,
        "prefilling": RequestStatus.RUNNING,
        "decoding": RequestStatus.RUNNING,
        "preempted": RequestStatus.PREEMPTED,
        "swapped": RequestStatus.SWAPPED,
        "waiting for a sibling": RequestStatus.WAITING,
    }
    assert request.status is expected[state]
    worker_knows = request_id in harness.worker.sequences
    others = [r for r in harness.scheduler.live.all.values() if r is not request]
    assert harness.abort(request_id) == [request_id]
    held = {block_id for r in others if r.block_table is not None for block_id in r.block_table.block_ids}
    assert harness.manager.num_free_blocks == 64 - len(held)
    assert harness.manager.swap_space.num_free_blocks == 16
    harness.step()
    assert harness.last_step.finished_req_ids == ([request_id] if worker_knows else [])
    harness.run()
    harness.check_outputs()
    assert request.finish_reason == "abort"


def test_an_abort_is_idempotent_and_knows_strangers() -> None:
    harness = Harness()
    harness.add("a", 4, 4)
    harness.step()
    assert harness.abort("a", "a", "nobody") == ["a"]
    assert harness.abort("a") == []
    harness.run()


def test_an_abort_while_a_step_runs_takes_nothing_in() -> None:
    harness = Harness()
    harness.add("a", 4, 4)
    harness.add("b", 4, 4)
    harness.step()
    harness.abort_in_next_step = ["a"]
    outputs = harness.step()
    assert [output.req_id for output in outputs] == ["b"]
    harness.run()
    harness.check_outputs()


def test_ending_a_request_for_another_reason() -> None:
    harness = Harness()
    request = harness.add("a", 4, 4)
    harness.step()
    assert harness.scheduler.finish_requests(["a"], "stop") == ["a"]
    assert request.finish_reason == "stop"
    harness.step()
    assert harness.last_step.finished_req_ids == ["a"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_rule_05_a_thousand_random_cancels_leak_nothing(mode: str) -> None:
    """Behaviour 5: 1,000 random cancels; the others' tokens are unchanged."""
    rng = random.Random(mode)
    harness = Harness(
        num_blocks=40, block_size=4, num_cpu_blocks=30, preemption_mode=mode, max_num_batched_tokens=24, vocab_size=5
    )
    num_cancelled = num_added = 0
    while num_cancelled < 1000:
        while len(harness.scheduler.live.all) < 24:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            if rng.random() < 0.2:
                harness.add_siblings(f"n{num_added}", prompt, rng.randrange(2, 6), rng.randrange(1, 30), seed=num_added)
            else:
                harness.add(f"r{num_added}", prompt, rng.randrange(1, 30), seed=num_added)
            num_added += 1
        harness.step()
        live = sorted(harness.scheduler.live.all)
        num_cancelled += len(harness.abort(*rng.sample(live, min(len(live), rng.randrange(1, 12)))))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().num_preemptions_recompute + harness.scheduler.stats().num_preemptions_swap > 0
