"""Requests that arrive together and share a prefix compute it once, and nobody waits for it in vain."""

from __future__ import annotations

import pytest
from scheduling import Harness

SUFFIX = 32


def shared_prefix(num_requests: int, prefix: int, budget: int, **options: bool) -> Harness:
    harness = Harness(num_blocks=4000, block_size=16, max_num_seqs=256, max_num_batched_tokens=budget, **options)
    for i in range(num_requests):
        harness.add(f"r{i}", [*range(prefix), *(10_000 + 50 * i + j for j in range(SUFFIX))], 2)
    return harness


@pytest.mark.parametrize("budget", [128, 512, 2048])
@pytest.mark.parametrize("prefix", [128, 512])
def test_a_shared_prefix_is_computed_once(budget: int, prefix: int) -> None:
    harness = shared_prefix(32, prefix, budget)
    harness.run()
    harness.check_outputs()
    assert harness.worker.num_computed_tokens == prefix + 32 * (SUFFIX + 1)


def test_the_first_step_after_it_takes_them_all_in() -> None:
    harness = shared_prefix(32, 512, 2048)
    harness.step()
    assert harness.scheduled() == {"r0": 512 + SUFFIX}
    harness.step()
    assert len(harness.scheduled()) == 32


def test_those_behind_start_meanwhile() -> None:
    harness = shared_prefix(2, 512, 2048)
    harness.add("other", 100, 2)
    harness.step()
    assert set(harness.scheduled()) == {"r0", "other"}
    harness.run()
    harness.check_outputs()


def test_a_short_prefix_is_not_waited_for() -> None:
    harness = shared_prefix(3, 48, 2048)
    harness.step()
    assert len(harness.scheduled()) == 3
    harness.run()


def test_a_salt_keeps_them_apart() -> None:
    harness = Harness(num_blocks=400, block_size=16, max_num_batched_tokens=2048)
    for salt in ("a", "b", None):
        harness.add(f"of {salt}", list(range(200)), 2, cache_salt=salt)
    harness.step()
    assert len(harness.scheduled()) == 3
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("end", ["fails", "is aborted", "is aborted in its step", "is preempted"])
def test_the_one_they_wait_for_may_go(end: str) -> None:
    harness = shared_prefix(4, 512, 256)
    harness.step()
    assert harness.scheduled() == {"r0": 256}
    if end == "fails":
        harness.worker.fail["r0"] = "out of luck"
    elif end == "is aborted":
        harness.abort("r0")
    elif end == "is aborted in its step":
        harness.abort_in_next_step = ["r0"]
    else:
        harness.scheduler.preempt_requests(["r0"])
    harness.run()
    harness.check_outputs()
    assert {harness.finish_reasons[f"r{i}"] for i in range(1, 4)} == {"length"}


def test_those_who_wait_may_go() -> None:
    harness = shared_prefix(4, 512, 256)
    harness.step()
    harness.abort_in_next_step = ["r1"]
    harness.step()
    harness.abort("r2")
    harness.run()
    harness.check_outputs()


def test_without_prefix_caching_nobody_waits() -> None:
    harness = shared_prefix(3, 512, 2048, enable_prefix_caching=False)
    harness.step()
    assert len(harness.scheduled()) == 3
    harness.run()
