"""Requests with n > 1: one computes the prompt, the others share its blocks."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import Harness

PREEMPTION = [
    pytest.param({"preemption_mode": "recompute"}, id="recompute"),
    pytest.param({"preemption_mode": "swap", "num_cpu_blocks": 1000}, id="swap"),
    pytest.param({"preemption_mode": "swap", "num_cpu_blocks": 30}, id="swap-with-little-room"),
    pytest.param({"preemption_mode": "auto", "num_cpu_blocks": 1000}, id="auto"),
]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 7, 8, 9, 23])
def test_siblings_share_the_prompt_and_compute_only_its_last_token(caching: bool, num_prompt: int) -> None:
    harness = Harness(block_size=4, enable_prefix_caching=caching)
    harness.add_siblings("p", num_prompt, 4, 6)
    harness.step()
    assert harness.scheduled() == {"0_p": num_prompt} or num_prompt == 1
    harness.step()
    assert harness.scheduled() == {"0_p": 1, "1_p": 1, "2_p": 1, "3_p": 1}
    if num_prompt > 1:
        new = harness.last_step.scheduled_new_reqs
        assert [data.num_computed_tokens for data in new] == [num_prompt - 1] * 3
        num_full = (num_prompt - 1) // 4
        assert len({tuple(data.block_ids[:num_full]) for data in new}) == 1
        assert len({data.block_ids[num_full] for data in new}) == 3, "the block that each writes is its own"
        is_partial = (num_prompt - 1) % 4 != 0
        assert len(harness.last_step.blocks_to_copy) == (3 if is_partial else 0)
    harness.run()
    harness.check_outputs()
    assert len({tuple(output) for output in harness.outputs.values()}) == 4, "each has its own seed"


def test_shared_blocks_count_once() -> None:
    harness = Harness(num_blocks=30, block_size=4, max_num_batched_tokens=128)
    harness.add_siblings("p", 80, 4, 6)
    harness.step()
    harness.step()
    assert harness.manager.pool.num_allocated_blocks == 20 + 1 + 3, "20 of the prompt, and a block each"
    harness.run()
    harness.check_outputs()


def test_siblings_wait_for_a_prompt_in_chunks_and_hold_up_nobody() -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=8)
    harness.add_siblings("p", 24, 3, 3)
    harness.add("other", 4, 3)
    steps = []
    for _ in range(5):
        harness.step()
        steps.append(harness.scheduled())
    assert steps[:3] == [{"0_p": 8}, {"0_p": 8}, {"0_p": 8}]
    assert steps[3] == {"0_p": 1, "1_p": 1, "2_p": 1, "other": 4}
    harness.run()
    harness.check_outputs()


def test_a_request_behind_waiting_siblings_starts_before_them() -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    harness.add_siblings("p", 24, 3, 3)
    harness.add("other", 4, 3)
    harness.step()
    assert harness.scheduled() == {"0_p": 4, "other": 4}
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("how", ["abort", "fail", "preempt"])
def test_when_the_one_that_computes_leaves_the_next_one_takes_over(how: str) -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    harness.add_siblings("p", 24, 3, 3)
    harness.step()
    if how == "abort":
        harness.abort("0_p")
    elif how == "fail":
        harness.worker.fail["0_p"] = "no"
        harness.step()
    else:
        harness.scheduler.preempt_requests(["0_p"])
        harness.step()
    harness.step()
    assert harness.scheduled() == {"0_p" if how == "preempt" else "1_p": 8}
    harness.run()
    harness.check_outputs()


def test_a_late_sibling_forks_from_one_that_is_far_ahead() -> None:
    harness = Harness(block_size=4, max_num_seqs=2)
    harness.add_siblings("p", 6, 3, 9)
    for _ in range(4):
        harness.step()
    harness.abort("1_p")
    harness.step()
    assert harness.scheduled() == {"0_p": 1, "2_p": 1}
    harness.run()
    harness.check_outputs()


def test_a_preempted_sibling_comes_back_as_a_fork() -> None:
    harness = Harness(block_size=4, enable_prefix_caching=False)
    harness.add_siblings("p", 22, 2, 9)
    for _ in range(4):
        harness.step()
    harness.scheduler.preempt_requests(["1_p"])
    harness.step()
    harness.step()
    new = harness.last_step.scheduled_new_reqs[0]
    assert (new.req_id, new.num_computed_tokens, len(new.output_token_ids)) == ("1_p", 21, 3)
    assert harness.scheduled()["1_p"] == 4, "its own tokens and the prompt's last one"
    harness.run()
    harness.check_outputs()


def test_a_sibling_forks_from_one_that_comes_back_in_the_same_step() -> None:
    harness = Harness(block_size=4, max_num_seqs=2, num_cpu_blocks=20, preemption_mode="swap", enable_prefix_caching=False)
    harness.add_siblings("p", 22, 3, 9)
    for _ in range(3):
        harness.step()
    harness.scheduler.preempt_requests(["0_p", "1_p"])
    harness.step()
    harness.abort("1_p")
    harness.step()
    assert [back.req_id for back in harness.last_step.scheduled_swapped_in_reqs] == ["0_p"]
    assert harness.scheduled() == {"0_p": 1, "2_p": 1}
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("mode", PREEMPTION)
@pytest.mark.parametrize("caching", [False, True])
def test_rule_01_125_choices_of_a_long_prompt_finish_in_an_overcommitted_pool(mode: dict[str, Any], caching: bool) -> None:
    """Behaviour 1: n = 125, with every sequence's own tokens."""
    harness = Harness(
        num_blocks=160, block_size=4, max_num_seqs=128, max_num_batched_tokens=128, enable_prefix_caching=caching, **mode
    )
    harness.add_siblings("p", 201, 125, 16)
    needed = 50 + 125 * 5
    assert needed > 4 * 160
    harness.run()
    harness.check_outputs()
    assert set(harness.finish_reasons.values()) == {"length"}
    alone = 201 + 16
    assert harness.worker.num_computed_tokens < 10 * alone + 125 * 2 * 16, "the prompt is computed few times, not 125"


@pytest.mark.parametrize("mode", PREEMPTION)
def test_siblings_of_a_prompt_that_fills_the_pool_finish_one_by_one(mode: dict[str, Any]) -> None:
    harness = Harness(num_blocks=10, block_size=4, max_num_batched_tokens=20, **mode)
    harness.add_siblings("p", 30, 5, 10)
    harness.run()
    harness.check_outputs()
    assert set(harness.finish_reasons.values()) == {"length"}


def test_swapped_siblings_share_their_copies() -> None:
    harness = Harness(block_size=4, num_cpu_blocks=16, preemption_mode="swap")
    harness.add_siblings("p", 30, 5, 6)
    harness.step()
    harness.step()
    harness.scheduler.preempt_requests([f"{i}_p" for i in range(1, 5)])
    harness.step()
    assert len(harness.last_step.swapped_out_req_ids) == 4, "40 blocks of tables, 7 shared and 5 own ones"
    assert len(harness.last_step.blocks_to_swap_out) == 7 + 4
    harness.run()
    harness.check_outputs()


def test_siblings_report_the_same_cached_tokens() -> None:
    harness = Harness(block_size=4)
    harness.add("first", list(range(17)), 2)
    harness.run()
    siblings = harness.add_siblings("p", list(range(20)), 3, 2)
    harness.run()
    assert [request.num_cached_tokens for request in siblings] == [16, 16, 16]


def test_only_choice_0_reports_prompt_logprobs_and_the_others_still_fork() -> None:
    harness = Harness(block_size=4)
    harness.add_siblings("p", list(range(10)), 3, 4, prompt_logprobs=0)
    harness.step()
    harness.step()
    assert harness.scheduled() == {"0_p": 1, "1_p": 1, "2_p": 1}
    harness.run()
    assert harness.prompt_logprobs == {"0_p": list(range(1, 10))}
    harness.check_outputs()


def test_siblings_must_have_the_same_prompt() -> None:
    harness = Harness()
    harness.add("0_p", [1, 2], parent_id="p")
    with pytest.raises(ValueError, match="no sibling"):
        harness.add("1_p", [1, 3], parent_id="p", index=1)
    with pytest.raises(ValueError, match="no sibling"):
        harness.add("1_p", [1, 2], parent_id="p", index=1, cache_salt="other")
    harness.run()
