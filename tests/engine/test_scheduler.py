"""The scheduler's plain course: budget, chunks, slots, order, limits, ends."""

from __future__ import annotations

import pytest
from dummy_worker import expected_output
from scheduling import Harness

from pyengine.errors import InvalidRequestError
from pyengine.scheduler_output import ModelRunnerOutput

# ---- what runs in a step


def test_a_request_computes_its_prompt_and_then_one_token_a_step() -> None:
    harness = Harness()
    request = harness.add("a", 10, 3)
    harness.step()
    assert harness.scheduled() == {"a": 10}
    assert (request.num_computed_tokens, request.num_tokens) == (10, 11)
    harness.step()
    assert harness.scheduled() == {"a": 1}
    harness.run()
    assert harness.finish_reasons == {"a": "length"}
    harness.check_outputs()


def test_new_requests_are_sent_whole_and_running_ones_as_differences() -> None:
    harness = Harness(block_size=4)
    harness.add("a", [1, 2, 3], 3, seed=7)
    harness.step()
    new = harness.last_step.scheduled_new_reqs[0]
    assert (new.req_id, new.prompt_token_ids, new.output_token_ids, new.seed) == ("a", [1, 2, 3], [], 7)
    assert (new.block_ids, new.num_computed_tokens) == ([1], 0)
    blocks = []
    for _ in range(2):
        harness.step()
        cached = harness.last_step.scheduled_cached_reqs
        assert not harness.last_step.scheduled_new_reqs
        blocks.append((cached.req_ids, cached.new_block_ids, cached.replaced_block_ids, cached.num_computed_tokens))
    assert blocks == [(["a"], [[]], [[]], [3]), (["a"], [[2]], [[]], [4])]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add("a", 20, 2)
    chunks = []
    for _ in range(4):
        harness.step()
        chunks.append(harness.scheduled())
    assert chunks == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    """Behaviour 12, the scheduler's side: a prompt takes what decodes leave."""
    harness = Harness(max_num_batched_tokens=8)
    for request_id in ("a", "b"):
        harness.add(request_id, 2, 20)
    harness.step()
    harness.add("long", 40, 2)
    chunks = []
    while len(harness.outputs["long"]) == 0:
        harness.step()
        assert harness.scheduled()["a"] == harness.scheduled()["b"] == 1
        chunks.append(harness.scheduled()["long"])
    assert chunks == [6] * 6 + [4]


def test_the_threshold_limits_a_prompts_share() -> None:
    harness = Harness(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    harness.add("a", 14, 2)
    harness.add("b", 14, 2)
    harness.add("c", 14, 2)
    chunks = []
    for _ in range(3):
        harness.step()
        chunks.append(harness.scheduled())
    assert chunks[0] == {"a": 6, "b": 6, "c": 6}
    assert chunks[2] == {"a": 2, "b": 2, "c": 2}
    harness.run()
    harness.check_outputs()


def test_without_chunks_a_prompt_runs_whole_or_waits() -> None:
    harness = Harness(max_num_batched_tokens=12, enable_chunked_prefill=False, long_prefill_token_threshold=3)
    harness.add("a", 8, 2)
    harness.add("b", 8, 2)
    harness.step()
    assert harness.scheduled() == {"a": 8}
    harness.step()
    assert harness.scheduled() == {"a": 1, "b": 8}
    harness.run()


def test_without_chunks_a_prompt_of_the_whole_budget_gets_its_turn() -> None:
    harness = Harness(max_num_batched_tokens=12, enable_chunked_prefill=False)
    harness.add("a", 2, 5)
    harness.step()
    harness.add("whole", 12, 2)
    harness.add("behind", 1, 2)
    for _ in range(4):
        harness.step()
        assert harness.scheduled() == {"a": 1}, "nobody overtakes it, so that it cannot starve"
    harness.step()
    assert harness.scheduled() == {"whole": 12}


def test_no_more_than_max_num_seqs_run() -> None:
    harness = Harness(max_num_seqs=2)
    for i in range(5):
        harness.add(f"r{i}", 3, 3)
    harness.step()
    assert list(harness.scheduled()) == ["r0", "r1"]
    assert (harness.scheduler.stats().num_running, harness.scheduler.stats().num_waiting) == (2, 3)
    harness.run()
    harness.check_outputs()


def test_requests_start_in_order_of_arrival() -> None:
    harness = Harness(max_num_seqs=1, enable_prefix_caching=False)
    started = []
    for i in range(6):
        harness.add(f"r{i}", 3, 2, priority=-i)
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        started += [new.req_id for new in harness.last_step.scheduled_new_reqs]
    assert started == [f"r{i}" for i in range(6)], "priorities play no part under first-come"


def test_requests_join_and_leave_between_steps() -> None:
    harness = Harness()
    harness.add("long", 4, 12)
    for i in range(6):
        harness.step()
        harness.add(f"short{i}", 4, 2)
    harness.run()
    assert harness.num_steps <= 14, "short requests run beside the long one"
    harness.check_outputs()


def test_several_tokens_a_step_are_taken_in() -> None:
    harness = Harness()
    harness.worker.tokens_per_step = 3
    request = harness.add("a", 5, 8)
    harness.step()
    assert len(harness.outputs["a"]) == 3
    harness.step()
    assert harness.scheduled() == {"a": 3}, "their KV is computed in one go"
    harness.run()
    assert len(request.output_token_ids) == 8, "what goes beyond the limit is dropped"
    harness.check_outputs()


def test_an_empty_scheduler_has_nothing_to_do() -> None:
    harness = Harness()
    assert not harness.scheduler.has_unfinished_requests()
    assert harness.scheduler.schedule().total_num_scheduled_tokens == 0


def test_a_static_batch_runs_to_its_end_before_the_next() -> None:
    harness = Harness(static_batching=True, max_num_seqs=3)
    for i, length in enumerate((2, 6, 2, 2, 2)):
        harness.add(f"r{i}", 3, length)
    members = []
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        members.append(list(harness.scheduled()))
    assert members == [["r0", "r1", "r2"]] * 6 + [["r3", "r4"]] * 2, "rows that ended are computed on"
    harness.check_outputs()


def test_a_static_batch_gives_up_ended_rows_when_memory_is_short() -> None:
    harness = Harness(static_batching=True, num_blocks=4, block_size=4, max_num_seqs=3)
    for i, length in enumerate((1, 11, 1)):
        harness.add(f"r{i}", 4, length)
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().num_preemptions_recompute == 0


def test_a_static_batch_fills_the_rows_of_padding_that_it_gives_up() -> None:
    """Padding ends for want of blocks in a step that admits others: the worker must drop its rows before it adds theirs."""
    harness = Harness(
        static_batching=True,
        num_blocks=21,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    for i in range(7):
        harness.add(f"short{i}", 4, 1)
    harness.add("long", 160, 4)
    for i in range(4):
        harness.add(f"next{i}", 4, 4)
    joined = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        dropped = harness.last_step.finished_req_ids
        joined += bool(dropped and harness.last_step.scheduled_new_reqs)
    assert joined, "a step that both ends padding and admits"
    harness.run()
    harness.check_outputs()


def test_a_static_batch_may_take_several_steps_to_fill() -> None:
    harness = Harness(static_batching=True, max_num_batched_tokens=8)
    for i in range(3):
        harness.add(f"r{i}", 6, 4)
    harness.step()
    harness.step()
    harness.step()
    assert set(harness.scheduled()) == {"r0", "r1", "r2"}
    harness.add("late", 3, 2)
    harness.step()
    assert "late" not in harness.scheduled()
    harness.add_siblings("n", 6, 3)
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_only_the_first_waiting_request_is_looked_at(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a step does not depend on how many requests wait."""

    def num_looks(num_waiting: int) -> int:
        harness = Harness(max_num_seqs=4, policy=policy, num_blocks=1000)
        for i in range(4 + num_waiting):
            harness.add(f"r{i}", 6, 200, priority=i % 3)
        harness.step()
        queue, looks = harness.scheduler.live.waiting, []
        heap = list(queue._heap)
        look = queue.peek
        with monkeypatch.context() as patch:
            patch.setattr(queue, "peek", lambda: looks.append(look()))
            for _ in range(20):
                step = harness.scheduler.schedule()
                harness.scheduler.update_from_output(step, harness.worker.execute_model(step))
        assert queue._heap == heap, "nothing was taken out and put back either"
        return len(looks)

    assert num_looks(8) == num_looks(1024) <= 20


# ---- ends


def test_a_stop_token_ends_a_sequence_and_is_reported() -> None:
    alone = expected_output([1, 2, 3], 6, vocab_size=1000)
    harness = Harness()
    harness.add("stop", [1, 2, 3], 6, stop_token_ids=(alone[2],))
    harness.add("eos", [1, 2, 3], 6, eos=(alone[3],))
    harness.run()
    assert harness.outputs == {"stop": alone[:3], "eos": alone[:4]}
    assert harness.finish_reasons == {"stop": "stop", "eos": "stop"}
    assert harness.requests["stop"].stop_reason == alone[2]
    assert harness.requests["eos"].stop_reason is None


def test_a_stop_token_before_min_tokens_does_not_end_a_sequence() -> None:
    alone = expected_output([1, 2, 3], 6, vocab_size=1000)
    harness = Harness()
    harness.add("a", [1, 2, 3], 6, min_tokens=4, stop_token_ids=(alone[1],))
    harness.run()
    assert harness.outputs["a"] == alone


def test_a_stop_token_among_several_drops_the_rest() -> None:
    alone = expected_output([1, 2, 3], 6, vocab_size=1000)
    harness = Harness()
    harness.worker.tokens_per_step = 3
    harness.add("a", [1, 2, 3], 6, stop_token_ids=(alone[1],))
    (output,) = harness.step()
    assert output.new_token_ids == alone[:2]
    assert output.logprobs is not None
    assert len(output.logprobs) == 2
    assert (output.finish_reason, output.stop_reason) == ("stop", alone[1])


def test_max_total_tokens_and_no_max_tokens_at_all() -> None:
    harness = Harness(max_model_len=20)
    harness.add("model", 15, None)
    harness.add("own", 15, None, max_total_tokens=17)
    harness.run()
    assert {request_id: len(output) for request_id, output in harness.outputs.items()} == {"model": 5, "own": 2}
    assert set(harness.finish_reasons.values()) == {"length"}


def test_a_failed_request_fails_alone() -> None:
    harness = Harness()
    harness.add("good", 6, 4)
    harness.add("bad", 6, 4)
    harness.step()
    harness.worker.fail["bad"] = "the device says no"
    harness.run()
    assert harness.finish_reasons == {"good": "length", "bad": "error"}
    assert harness.errors["bad"] == "the device says no"
    harness.check_outputs()


def test_what_a_failed_step_computed_is_not_cached() -> None:
    harness = Harness(block_size=4)
    harness.add("bad", list(range(9)), 2)
    harness.worker.fail["bad"] = "no"
    harness.step()
    harness.add("next", list(range(9)), 2)
    harness.step()
    assert harness.scheduled() == {"next": 9}


def test_a_worker_that_samples_at_the_wrong_time_is_a_bug() -> None:
    harness = Harness()
    harness.add("a", 5, 3)
    step = harness.scheduler.schedule()
    with pytest.raises(RuntimeError, match="sampled None"):
        harness.scheduler.update_from_output(step, ModelRunnerOutput())


def test_an_id_may_be_used_again_after_its_request_has_ended() -> None:
    harness = Harness()
    harness.add("a", 5, 1)
    with pytest.raises(InvalidRequestError, match="request_id"):
        harness.add("a", 5, 1)
    harness.step()
    assert harness.finish_reasons.pop("a") == "length"
    harness.add("a", 5, 1)
    harness.step()
    assert harness.last_step.finished_req_ids == ["a"]
    harness.run()


# ---- limits


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field", "numbers"),
    [
        (32, 1, "prompt", ("32", "32")),
        (40, None, "prompt", ("40", "32")),
        (20, 13, "max_tokens", ("33", "32", "20", "13")),
        (0, 4, "prompt", ()),
    ],
)
def test_rule_13_a_request_too_long_for_the_pool_is_refused_at_once_with_both_numbers(
    num_prompt: int, max_tokens: int | None, field: str, numbers: tuple[str, ...]
) -> None:
    """Behaviour 13: it fails alone, and says what it needs and what there is."""
    harness = Harness(num_blocks=8, block_size=4)
    harness.add("other", 4, 2)
    with pytest.raises(InvalidRequestError) as error:
        harness.add("a", num_prompt, max_tokens)
    assert error.value.field == field
    assert all(number in error.value.message for number in numbers)
    assert bool(numbers) == ("KV pool" in error.value.message)
    harness.run()
    assert harness.finish_reasons == {"other": "length"}


def test_rule_13_a_request_too_long_for_the_model_is_refused_and_never_cut() -> None:
    """Behaviour 13: the model's limit, with both numbers."""
    harness = Harness(max_model_len=16)
    with pytest.raises(InvalidRequestError, match=r"max_tokens: 10 prompt tokens and max_tokens=7 make 17, .* 16"):
        harness.add("a", 10, 7)
    with pytest.raises(InvalidRequestError, match=r"prompt: has 16 tokens, .* 16"):
        harness.add("a", 16, 1)
    assert not harness.scheduler.has_unfinished_requests()
    harness.add("a", 10, 6)
    harness.run()
    assert len(harness.outputs["a"]) == 6


def test_rule_15_a_pool_smaller_than_the_model_serves_what_fits() -> None:
    """Behaviour 15: only a request that cannot fit fails, and an open end means as much as fits."""
    harness = Harness(num_blocks=4, block_size=4, max_model_len=10_000)
    harness.add("exact", 10, 6)
    harness.add("open", 10, None)
    with pytest.raises(InvalidRequestError):
        harness.add("too long", 10, 7)
    harness.run()
    assert {request_id: len(output) for request_id, output in harness.outputs.items()} == {"exact": 6, "open": 6}


# ---- prefix caching


def test_rule_03_a_warm_prefix_is_not_computed_again_and_gives_the_same_tokens() -> None:
    """Behaviour 3: cold and warm cache give identical tokens."""
    harness = Harness(block_size=4)
    prompt = list(range(18))
    cold = harness.add("cold", prompt, 5)
    harness.run()
    warm = harness.add("warm", prompt, 5)
    harness.step()
    assert harness.scheduled() == {"warm": 2}
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    harness.run()
    assert harness.outputs["warm"] == harness.outputs["cold"]
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_cached_tokens) == (36, 16, 16)


def test_rule_03_the_last_prompt_token_is_always_computed() -> None:
    """Behaviour 3: a prompt of whole cached blocks still gets its logits."""
    harness = Harness(block_size=4)
    for request_id in ("cold", "warm"):
        harness.add(request_id, list(range(8)), 3)
        harness.step()
    assert harness.scheduled()["warm"] == 4
    harness.run()
    harness.check_outputs()


def test_rule_03_generated_tokens_are_cached_too() -> None:
    """Behaviour 3: the next turn of a chat starts with prompt and answer."""
    harness = Harness(block_size=4)
    harness.add("first", 6, 7)
    harness.run()
    turn = harness.requests["first"].prompt_token_ids + harness.outputs["first"]
    second = harness.add("second", [*turn, 1, 2], 3)
    harness.run()
    assert second.num_cached_tokens == 12
    harness.check_outputs()


def test_a_block_is_shared_only_after_the_step_that_computes_it() -> None:
    harness = Harness(block_size=4)
    for request_id in ("a", "b"):
        harness.add(request_id, list(range(9)), 3)
    harness.step()
    assert harness.scheduled() == {"a": 9, "b": 9}
    harness.add("c", list(range(9)), 3)
    harness.step()
    assert harness.scheduled()["c"] == 1
    harness.run()
    harness.check_outputs()


def test_rule_03_salts_do_not_share() -> None:
    """Behaviour 3: requests of different salts share nothing, and none leaks to another tenant."""
    harness = Harness(block_size=4)
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        harness.add(request_id, list(range(9)), 3, cache_salt=salt)
        harness.run()
    cached = {request_id: request.num_cached_tokens for request_id, request in harness.requests.items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 8}
    harness.check_outputs()


def test_rule_03_a_colliding_hash_never_gives_a_wrong_hit() -> None:
    """Behaviour 3: with the worst of hash functions all tokens are right."""
    harness = Harness(block_size=2, hash_function=lambda parent_hash, token_ids: 1, vocab_size=2)
    for i in range(16):
        harness.add(f"r{i}", [i % 2, i // 2 % 2, i // 4 % 2, i // 8 % 2, 0, 0, 0], 3)
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().prefix_cache_hits > 0


def test_requests_with_prompt_logprobs_compute_their_whole_prompt() -> None:
    harness = Harness(block_size=4)
    harness.add("a", list(range(10)), 3)
    harness.run()
    wants = harness.add("b", list(range(10)), 3, prompt_logprobs=0)
    harness.step()
    assert harness.scheduled() == {"b": 10}
    assert wants.num_cached_tokens == 0
    assert harness.prompt_logprobs["b"] == list(range(1, 10))
    harness.run()


def test_prompt_logprobs_are_reported_once_although_a_preemption_computes_them_again() -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=6)
    harness.add("a", list(range(20)), 3, prompt_logprobs=0)
    harness.step()
    harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.run()
    assert harness.requests["a"].num_preemptions == 1
    assert harness.prompt_logprobs["a"] == list(range(1, 20))
    harness.check_outputs()


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_prompt_logprobs_that_are_reported_are_not_computed_again(enable_prefix_caching: bool) -> None:
    harness = Harness(block_size=4, enable_prefix_caching=enable_prefix_caching)
    harness.add("a", list(range(20)), 4, prompt_logprobs=3)
    harness.step()
    assert [new.num_prompt_logprobs for new in harness.last_step.scheduled_new_reqs] == [3]
    assert harness.prompt_logprobs["a"] == list(range(1, 20))
    harness.scheduler.preempt_requests(["a"])
    harness.step()
    harness.step()
    assert [new.num_prompt_logprobs for new in harness.last_step.scheduled_new_reqs] == [None]
    harness.run()
    harness.check_outputs()


def test_reset_forgets_prefixes_and_disturbs_nobody() -> None:
    harness = Harness(block_size=4)
    harness.add("done", list(range(9)), 2)
    harness.run()
    harness.add("running", list(range(9)), 9)
    harness.step()
    harness.reset_prefix_cache()
    harness.add("next", list(range(9)), 2)
    harness.step()
    assert harness.scheduled() == {"running": 1, "next": 9}
    harness.run()
    harness.check_outputs()
    Harness(enable_prefix_caching=False).scheduler.reset_prefix_cache()  # nothing to forget


def test_no_prefix_caching_means_none() -> None:
    harness = Harness(block_size=4, enable_prefix_caching=False)
    for request_id in ("a", "b"):
        harness.add(request_id, list(range(9)), 2)
        harness.run()
    assert harness.requests["b"].num_cached_tokens == 0
    assert harness.scheduler.stats().prefix_cache_queries == 0


# ---- figures


def test_utilisation_of_many_lengths_is_what_the_lengths_allow() -> None:
    harness = Harness(num_blocks=400, block_size=16, max_num_seqs=32, max_num_batched_tokens=2000)
    for i in range(32):
        harness.add(f"r{i}", 40 + 5 * i, 20)
    harness.run()
    stats = harness.scheduler.stats()
    assert 0.9 < stats.kv_utilisation <= 1.0
    assert stats.num_steps == harness.num_steps - 1
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.kv_utilisation_now) == (0, 0, 0, 0.0)


def test_counters_start_again_and_gauges_stay() -> None:
    harness = Harness(block_size=4, num_cpu_blocks=8, preemption_mode="swap")
    harness.add("a", 9, 6)
    harness.step()
    harness.scheduler.preempt_requests(["a"])
    harness.step()
    before = harness.scheduler.stats()
    assert (before.num_swapped, before.num_preemptions_swap, before.num_blocks_allocated, before.num_steps) == (1, 1, 3, 1)
    harness.scheduler.reset_stats()
    after = harness.scheduler.stats()
    assert (after.num_swapped, after.num_preemptions_swap, after.num_blocks_allocated, after.num_steps) == (1, 0, 0, 0)
    harness.run()
    assert harness.scheduler.stats().num_swapped == 0
