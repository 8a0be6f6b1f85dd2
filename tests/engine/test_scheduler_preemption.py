"""Memory that is too small for what runs: preemption by recompute and by swap."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import Harness

from pyengine.engine.block_manager import SharedPrefix
from pyengine.engine.preemption import should_swap
from pyengine.engine.request import RequestStatus

MODES = [
    pytest.param({"preemption_mode": "recompute"}, id="recompute"),
    pytest.param({"preemption_mode": "swap", "num_cpu_blocks": 512}, id="swap"),
    pytest.param({"preemption_mode": "swap", "num_cpu_blocks": 7}, id="swap-with-little-room"),
    pytest.param({"preemption_mode": "auto", "num_cpu_blocks": 512}, id="auto"),
]


def num_preemptions(harness: Harness) -> int:
    stats = harness.scheduler.stats()
    return stats.num_preemptions_recompute + stats.num_preemptions_swap


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_rule_01_a_pool_four_times_too_small_finishes_everything(mode: dict[str, Any], caching: bool) -> None:
    """Behaviour 1: all finish, with the tokens of an unpreempted run; preemptions are bounded (checked at every step)."""
    harness = Harness(
        num_blocks=100, block_size=4, max_num_seqs=64, max_num_batched_tokens=128, enable_prefix_caching=caching, **mode
    )
    for i in range(64):
        harness.add(f"r{i}", 4 + i % 7, 12 + i % 17)
    needed = sum(-(-(r.num_prompt_tokens + (r.sampling_params.max_tokens or 0)) // 4) for r in harness.requests.values())
    assert needed > 4 * 100
    harness.run()
    harness.check_outputs()
    assert set(harness.finish_reasons.values()) == {"length"}
    assert num_preemptions(harness) > 10
    assert max(r.num_preemptions for r in harness.requests.values()) <= 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_blocks", "prompt", "output"), [(8, 1, 31), (8, 16, 16), (8, 29, 3), (8, 31, 1), (9, 15, 17)])
def test_rule_14_requests_that_each_need_the_whole_pool_all_finish(
    mode: dict[str, Any], num_blocks: int, prompt: int, output: int
) -> None:
    """Behaviour 14: a request that was admitted never dies of memory, not even if nothing else fits beside it."""
    harness = Harness(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16, **mode)
    for i in range(6):
        harness.add(f"r{i}", prompt, output)
    harness.run()
    harness.check_outputs()
    assert set(harness.finish_reasons.values()) == {"length"}


@pytest.mark.parametrize("mode", MODES)
def test_rule_14_long_and_short_together(mode: dict[str, Any]) -> None:
    """Behaviour 14: one request that fills the pool among many small ones."""
    harness = Harness(num_blocks=16, block_size=4, max_num_seqs=16, **mode)
    for i in range(8):
        harness.add(f"before{i}", 3, 10)
    harness.add("huge", 20, 44)
    for i in range(8):
        harness.add(f"after{i}", 3, 10)
    harness.run()
    harness.check_outputs()
    assert set(harness.finish_reasons.values()) == {"length"}


def test_the_latest_arrival_is_preempted_and_the_first_never() -> None:
    harness = Harness(num_blocks=6, block_size=2)
    for request_id in ("a", "b", "c"):
        harness.add(request_id, 2, 10)
    preempted: list[str] = []
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        preempted += harness.last_step.preempted_req_ids
        if harness.last_step.preempted_req_ids:
            running = [r.request_id for r in harness.scheduler.live.running]
            assert all(victim > survivor for victim in harness.last_step.preempted_req_ids for survivor in running)
    assert preempted
    assert "a" not in preempted


def test_rule_01_a_resumed_request_is_not_preempted_before_it_has_a_token() -> None:
    """Behaviour 1: some progress between two preemptions, however often somebody asks. `Harness.step` checks it, too."""
    harness = Harness(num_blocks=24, block_size=2, max_num_batched_tokens=8, enable_prefix_caching=False)
    for i in range(4):
        harness.add(f"r{i}", 3, 17)
    num_protected = 0
    while harness.scheduler.has_unfinished_requests():
        harness.scheduler.preempt_requests(list(harness.scheduler.live.all))
        harness.step()
        num_protected += sum(r.is_protected for r in harness.scheduler.live.running)
    assert num_protected > 10
    for request in harness.requests.values():
        assert 3 < request.num_preemptions <= len(request.output_token_ids) + 1
    harness.check_outputs()


def grow_beside_a_resumed_request(num_blocks: int) -> Harness:
    """Two requests fill the pool while a third one, preempted before, catches up by a token a step."""
    harness = Harness(
        num_blocks=num_blocks,
        block_size=2,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=1,
        enable_prefix_caching=False,
        headroom=False,
    )
    for request_id in ("first", "second"):
        harness.add(request_id, 2, 40)
    late = harness.add("late", 14, 3)
    while late.num_tokens == 14:
        harness.step()
    harness.scheduler.preempt_requests(["late"])
    while not late.is_protected:
        harness.step()
    return harness


def test_rule_01_a_resumed_request_keeps_its_place_and_the_next_one_goes() -> None:
    """Behaviour 1: under pressure the victim is the least urgent one that has made progress, not the one that has none yet."""
    harness = grow_beside_a_resumed_request(num_blocks=28)
    first, second, late = harness.requests.values()
    while late.is_protected:
        assert "first" in harness.scheduled()
        harness.step()
    assert [r.num_preemptions for r in (first, second, late)] == [0, 1, 1]
    harness.run()
    harness.check_outputs()


def test_rule_01_if_nobody_can_go_even_the_most_urgent_waits_but_not_for_long() -> None:
    """Behaviour 1: its blocks are reserved (`Harness` checks it), so that the resumed request has its token in bounded time."""
    harness = grow_beside_a_resumed_request(num_blocks=28)
    first, _, late = harness.requests.values()
    harness.abort("second")
    filler = harness.manager.open_table(SharedPrefix([], 0, None), None)
    reserved = harness.manager.num_blocks_for(15)
    harness.manager.append_slots(filler, (harness.manager.num_free_blocks - reserved) * 2, 28)
    harness.check_invariants = lambda: None  # type: ignore[method-assign]  # the filler is no request's
    num_waits = 0
    while late.is_protected:
        harness.step()
        num_waits += "first" not in harness.scheduled()
    assert 0 < num_waits <= 15
    assert (first.num_preemptions, late.num_preemptions) == (0, 1)
    harness.manager.free(filler)
    harness.run()
    harness.check_outputs()


def test_a_resumed_request_waits_until_it_will_not_be_in_the_way() -> None:
    harness = Harness(num_blocks=30, block_size=2, max_num_seqs=3, max_num_batched_tokens=3, enable_prefix_caching=False)
    for request_id in ("first", "second"):
        harness.add(request_id, 2, 56)
    while harness.scheduler.has_unfinished_requests():
        waits = set(harness.scheduled()) < {r.request_id for r in harness.scheduler.live.running}
        assert not waits, "whoever runs gets on at every step"
        harness.step()
    assert [r.num_preemptions for r in harness.requests.values()] == [0, 1]
    harness.check_outputs()


def test_a_chunk_shrinks_before_anything_is_preempted() -> None:
    harness = Harness(num_blocks=12, block_size=2, max_num_batched_tokens=10, enable_prefix_caching=False)
    harness.add("long", 20, 2)
    harness.step()
    harness.add("late", 1, 12)
    harness.run()
    assert num_preemptions(harness) == 0
    harness.check_outputs()


def test_nothing_is_reserved_for_tokens_not_generated_yet() -> None:
    harness = Harness(num_blocks=12, block_size=4, max_num_seqs=10)
    for i in range(10):
        harness.add(f"r{i}", 4, 40)
    harness.step()
    assert len(harness.scheduler.live.running) == 8, "a block each, and one for every second one to grow into, not 11 each"
    assert harness.manager.num_free_blocks == 4
    harness.run()
    harness.check_outputs()


# ---- what the worker is told


def test_a_recomputed_request_is_sent_again_whole_with_its_output() -> None:
    harness = Harness(block_size=4, enable_prefix_caching=False)
    harness.add("a", [1, 2, 3, 4, 5], 6, seed=3)
    for _ in range(3):
        harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.step()
    assert harness.last_step.preempted_req_ids == ["a"]
    assert not harness.scheduled(), "it does not come back in the same step"
    assert harness.requests["a"].status is RequestStatus.PREEMPTED
    harness.step()
    new = harness.last_step.scheduled_new_reqs[0]
    assert new.prompt_token_ids == [1, 2, 3, 4, 5]
    assert new.output_token_ids == harness.outputs["a"][:3]
    assert harness.scheduled() == {"a": 8}
    harness.run()
    harness.check_outputs()


def test_the_prefix_cache_shortens_a_recompute() -> None:
    harness = Harness(block_size=4)
    request = harness.add("a", 9, 6)
    for _ in range(5):
        harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.step()
    harness.step()
    assert harness.scheduled() == {"a": 2}, "of 14 tokens, three blocks were cached"
    assert request.num_cached_tokens == 0, "of the prompt, when it first ran"
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_cached_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits) == (12, 9, 0)
    harness.check_outputs()


def test_a_swapped_request_comes_back_with_its_blocks() -> None:
    harness = Harness(block_size=4, num_cpu_blocks=8, preemption_mode="swap")
    harness.add("a", 9, 6)
    harness.step()
    harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.step()
    step = harness.last_step
    assert (step.swapped_out_req_ids, step.preempted_req_ids) == (["a"], [])
    assert [device for device, _ in step.blocks_to_swap_out] == [1, 2, 3]
    stats = harness.scheduler.stats()
    assert (stats.num_swapped, stats.num_waiting, stats.num_free_blocks, stats.num_free_cpu_blocks) == (1, 0, 64, 5)
    harness.step()
    (back,) = harness.last_step.scheduled_swapped_in_reqs
    assert (back.req_id, back.num_computed_tokens, len(back.block_ids)) == ("a", 10, 3)
    assert [device for _, device in harness.last_step.blocks_to_swap_in] == back.block_ids
    assert harness.scheduled() == {"a": 1}
    harness.run()
    harness.check_outputs()
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions_swap, stats.num_blocks_swapped_out, stats.num_blocks_swapped_in) == (1, 3, 3)


def test_a_prompt_can_be_swapped_halfway() -> None:
    harness = Harness(block_size=4, num_cpu_blocks=8, preemption_mode="swap", max_num_batched_tokens=6)
    harness.add("a", 20, 3)
    harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.step()
    harness.step()
    assert harness.last_step.scheduled_swapped_in_reqs[0].num_computed_tokens == 6
    assert harness.scheduled() == {"a": 6}
    harness.run()
    harness.check_outputs()


def test_a_full_cpu_pool_turns_swaps_into_recomputes_and_counts_them() -> None:
    harness = Harness(block_size=4, num_cpu_blocks=3, preemption_mode="swap")
    harness.add("a", 9, 6)
    harness.add("b", 9, 6)
    harness.step()
    harness.scheduler.preempt_requests(["a", "b"])
    harness.step()
    assert (harness.last_step.swapped_out_req_ids, harness.last_step.preempted_req_ids) == (["b"], ["a"])
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute, stats.num_swap_fallbacks) == (1, 1, 1)
    harness.run()
    harness.check_outputs()


def test_without_a_cpu_pool_preemption_is_by_recompute() -> None:
    harness = Harness(num_cpu_blocks=0, preemption_mode="swap")
    harness.add("a", 9, 6)
    harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.run()
    assert harness.scheduler.stats().num_preemptions_recompute == 1
    harness.check_outputs()


def test_rule_04_blocks_of_a_swap_under_way_are_not_reused_wrongly() -> None:
    """Behaviour 4: device blocks may be reused at once (the worker waits for the copy), CPU blocks in a later step only.

    The dummy worker carries the copies out in the documented order, and asserts that no CPU block is both source and
    destination in one step; here both directions happen all the time.
    """
    harness = Harness(num_blocks=10, block_size=2, num_cpu_blocks=12, preemption_mode="swap", enable_prefix_caching=False)
    for i in range(8):
        harness.add(f"r{i}", 3 + i % 4, 12)
    reused_at_once = both_directions = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        step = harness.last_step
        swapped_out = {device for device, _ in step.blocks_to_swap_out}
        written = {block for new in step.scheduled_cached_reqs.new_block_ids for block in new}
        reused_at_once += bool(swapped_out & written)
        harness.scheduler.preempt_requests([r.request_id for r in harness.scheduler.live.running][-1:])
        both_directions += bool(step.blocks_to_swap_out and step.blocks_to_swap_in)
    harness.check_outputs()
    assert reused_at_once
    assert harness.scheduler.stats().num_blocks_swapped_in > 20


def test_a_swapped_out_blocks_content_is_still_found_until_it_is_overwritten() -> None:
    harness = Harness(num_blocks=8, block_size=2, num_cpu_blocks=8, preemption_mode="swap")
    prompt = list(range(7))
    harness.add("a", prompt, 3)
    harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.add("b", prompt, 3)
    harness.step()
    assert harness.last_step.swapped_out_req_ids == ["a"]
    assert not harness.last_step.scheduled_new_reqs, "it waits behind the first"
    harness.abort("a")
    harness.step()
    assert harness.scheduled() == {"b": 1}
    harness.run()
    harness.check_outputs()


# ---- the cost estimate


def test_auto_takes_the_cheaper_way() -> None:
    def swaps(num_tokens: int, num_blocks: int) -> bool:
        return should_swap("auto", num_tokens_to_recompute=num_tokens, num_blocks_to_copy=num_blocks, block_size=16)

    assert not swaps(10, 1), "a short sequence is computed again"
    assert swaps(1000, 63), "a long one is copied"
    assert not swaps(3, 40), "one whose prompt others hold only computes its own end"
    assert swaps(1000, 0)


@pytest.mark.parametrize("num_tokens", [0, 10_000])
def test_a_forced_mode_is_obeyed(num_tokens: int) -> None:
    assert should_swap("swap", num_tokens_to_recompute=num_tokens, num_blocks_to_copy=1, block_size=16)
    assert not should_swap("recompute", num_tokens_to_recompute=num_tokens, num_blocks_to_copy=1, block_size=16)


def test_auto_decides_for_each_request() -> None:
    harness = Harness(num_blocks=200, block_size=4, num_cpu_blocks=200, preemption_mode="auto", max_num_batched_tokens=300)
    harness.add("short", 5, 4)
    harness.add("long", 200, 4)
    harness.step()
    harness.scheduler.preempt_requests(["short", "long"])
    harness.step()
    assert (harness.last_step.swapped_out_req_ids, harness.last_step.preempted_req_ids) == (["long"], ["short"])
    harness.run()
    harness.check_outputs()
