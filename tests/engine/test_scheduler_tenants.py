"""Tenants: nobody waits for another's flood, quotas hold at every step (`Harness` checks), and nothing lies idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from scheduling import Harness

from pyengine.engine.request import Request
from pyengine.errors import InvalidRequestError
from pyengine.tenants import Tenant

MODES = [
    pytest.param({"preemption_mode": "recompute"}, id="recompute"),
    pytest.param({"preemption_mode": "swap", "num_cpu_blocks": 400}, id="swap"),
]


def tenants(*names: str, **terms: dict[str, Any]) -> tuple[Tenant, ...]:
    """Tenants by name, and `default`; `terms` by name."""
    return tuple(Tenant(name=name, **terms.get(name, {})) for name in (*names, "default"))


def steps_to_first_token(harness: Harness, request_id: str) -> int:
    for steps in range(1, 1000):
        harness.step()
        if harness.outputs[request_id]:
            return steps
    raise AssertionError("no token")


def num_running(harness: Harness, tenant: str) -> int:
    return sum(request.tenant == tenant for request in harness.scheduler.live.running)


@pytest.mark.parametrize("mode", MODES)
def test_a_flood_keeps_nobody_waiting(mode: dict[str, Any]) -> None:
    """A has 200 requests, which take all slots; B sends one at a time, and each has its first token within two steps."""
    harness = Harness(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, tenants=tenants("a", "b"), **mode)
    for i in range(200):
        harness.add(f"a{i}", 20, 40, tenant="a")
    for _ in range(10):
        harness.step()
    assert num_running(harness, "a") == 8
    waits = []
    for i in range(12):
        harness.add(f"b{i}", 24, 6, tenant="b")
        waits.append(steps_to_first_token(harness, f"b{i}"))
        while f"b{i}" not in harness.finish_reasons:
            harness.step()
    assert max(waits) <= 2
    harness.step()
    assert len(harness.scheduled()) == 8, "A has what B does not use"
    harness.abort(*(r.request_id for r in harness.scheduler.live.all.values() if r.first_scheduled_time is None))
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("prompt", [100, 400])
def test_a_flood_of_long_prompts_leaves_tokens_to_others(prompt: int) -> None:
    """The budget of a step is divided too: A's prompts alone would fill it for a hundred steps."""
    harness = Harness(num_blocks=2000, max_num_seqs=16, max_num_batched_tokens=64, tenants=tenants("a", "b"))
    for i in range(50):
        harness.add(f"a{i}", prompt, 4, tenant="a")
    for _ in range(3):
        harness.step()
    waits = []
    for i in range(10):
        harness.add(f"b{i}", 20, 4, tenant="b")
        waits.append(steps_to_first_token(harness, f"b{i}"))
    assert max(waits) <= 2
    harness.run()
    harness.check_outputs()


def test_two_floods_share_by_weight() -> None:
    """Of slots: in every step, from the moment on that both have enough to send."""
    harness = Harness(num_blocks=400, max_num_seqs=8, tenants=tenants("a", "b", a={"weight": 3}))
    for tenant in ("b", "a"):
        for i in range(60):
            harness.add(f"{tenant}{i}", 4, 20, tenant=tenant)
    for _ in range(100):
        harness.step()
        assert Counter(request_id[0] for request_id in harness.scheduled()) == {"a": 6, "b": 2}
    preemptions = sum(request.num_preemptions for request in harness.requests.values())
    assert preemptions == 0, "both were there from the start, so nobody had more than its share"


def test_two_floods_share_prompt_tokens_by_weight() -> None:
    """Where the step's budget is what is scarce: prompts of different lengths, and one token each to generate."""
    harness = Harness(
        num_blocks=4000,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        max_model_len=500,
        tenants=tenants("a", "b", a={"weight": 2}),
    )
    for i in range(400):
        harness.add(f"a{i}", 90, 1, tenant="a")
        harness.add(f"b{i}", 9, 1, tenant="b")
    for _ in range(120):
        harness.step()
    computed = {name: stats["computed_tokens"] for name, stats in harness.scheduler.tenant_stats().items()}
    assert computed["a"] + computed["b"] == 120 * 64, "no step leaves tokens unused"
    assert computed["a"] / computed["b"] == pytest.approx(2, rel=0.1)


def test_an_idle_tenant_saves_up_nothing_and_owes_nothing() -> None:
    harness = Harness(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=32, tenants=tenants("a", "b"))
    for i in range(40):
        harness.add(f"a{i}", 30, 2, tenant="a")
    harness.run()  # A had everything to itself
    for i in range(60):
        harness.add(f"c{i}", 30, 2, tenant="a")
        harness.add(f"b{i}", 30, 2, tenant="b")
    harness.scheduler.reset_stats()
    for _ in range(60):
        harness.step()
    stats = harness.scheduler.tenant_stats()
    assert stats["a"]["computed_tokens"] / stats["b"]["computed_tokens"] == pytest.approx(1, rel=0.1)


def test_one_tenant_has_all_that_nobody_else_wants() -> None:
    alone = Harness(num_blocks=100, max_num_seqs=6, max_num_batched_tokens=32)
    shared = Harness(num_blocks=100, max_num_seqs=6, max_num_batched_tokens=32, tenants=tenants("a", "b", "c"))
    for harness, tenant in ((alone, None), (shared, "a")):
        for i in range(30):
            harness.add(f"a{i}", 5 + i, 10, tenant=tenant)
        harness.run()
        harness.check_outputs()
    assert shared.num_steps == alone.num_steps


def test_nobody_is_preempted_to_and_fro() -> None:
    """Odd shares, more tenants than slots: once each has what is its own, nothing moves without a request ending."""
    for max_num_seqs, names in ((3, "ab"), (2, "abc"), (1, "ab"), (5, "abc"), (4, "abcdef")):
        harness = Harness(num_blocks=2000, max_num_seqs=max_num_seqs, tenants=tenants(*names))
        for name in names:
            for i in range(6):
                harness.add(f"{name}{i}", 4, 60, tenant=name)
            harness.step()
        before = sum(request.num_preemptions for request in harness.requests.values())
        assert before <= max_num_seqs
        for _ in range(40):
            harness.step()
        assert sum(request.num_preemptions for request in harness.requests.values()) == before
        harness.abort(*harness.requests)
        harness.run()


@pytest.mark.parametrize("mode", MODES)
def test_a_tenant_takes_its_share_of_blocks_back(mode: dict[str, Any]) -> None:
    """Slots are free, and A's long requests hold every block."""
    harness = Harness(num_blocks=40, block_size=4, max_num_seqs=16, tenants=tenants("a", "b"), **mode)
    for i in range(10):
        harness.add(f"a{i}", 30, 10, tenant="a")
    for _ in range(6):
        harness.step()
    assert harness.manager.num_free_blocks < 8
    harness.add("b", 30, 4, tenant="b")
    assert steps_to_first_token(harness, "b") <= 2
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("mode", MODES)
def test_quotas_are_never_exceeded(mode: dict[str, Any]) -> None:
    """Also while requests grow, are preempted and come back, with blocks to spare outside the quota."""
    terms = {"a": {"kv_quota": 0.25}}
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=16, tenants=tenants("a", "b", **terms), **mode)
    for i in range(12):
        harness.add(f"a{i}", 10, 30, tenant="a")
    most = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        most = max(most, harness.scheduler.tenant_stats()["a"]["num_kv_blocks"])
    assert 12 <= most <= 16
    harness.check_outputs()


def test_a_tenant_at_its_quota_holds_up_nobody() -> None:
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=16, tenants=tenants("a", "b", a={"kv_quota": 0.25}))
    for i in range(6):
        harness.add(f"a{i}", 30, 20, tenant="a")
    harness.step()
    harness.add("b", 30, 4, tenant="b")
    assert steps_to_first_token(harness, "b") == 1
    assert num_running(harness, "a") == 1
    harness.run()


def test_shared_blocks_count_once_against_a_quota() -> None:
    """Twelve requests of one long prompt fit where two of different prompts do."""
    harness = Harness(num_blocks=100, block_size=4, max_num_seqs=16, tenants=tenants("a", a={"kv_quota": 0.3}))
    prompt = list(range(80))
    harness.add("first", prompt, 4, tenant="a")
    harness.step()
    harness.step()
    for i in range(5):
        harness.add(f"a{i}", [*prompt, 1000 + i], 4, tenant="a")
    harness.step()
    assert num_running(harness, "a") == 6
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("is_shared", [False, True])
def test_shared_blocks_count_once_against_a_share(is_shared: bool) -> None:
    """B's requests hold a quarter of the pool, however often their common prompt is in their tables: a fourth one may start."""
    harness = Harness(num_blocks=100, max_num_seqs=20, max_num_batched_tokens=200, tenants=tenants("a", "b"))
    prompt = list(range(80 if is_shared else 4))
    harness.add("b0", prompt, 100, tenant="b")
    harness.step()
    for i in range(1, 3):
        harness.add(f"b{i}", [*prompt, 1000 + i], 100, tenant="b")
    for i in range(17):
        harness.add(f"a{i}", 2, 60, tenant="a")
    harness.step()
    assert (num_running(harness, "a"), num_running(harness, "b")) == (17, 3)
    harness.add("b3", [*prompt, 1003], 4, tenant="b")
    assert steps_to_first_token(harness, "b3") == 1
    harness.run()
    harness.check_outputs()


def test_a_tenants_shared_blocks_are_left_to_it_while_one_of_its_requests_holds_them() -> None:
    """A is above its share of blocks by one long prompt, and still is when it loses a request: B gets all it needs at once."""
    harness = Harness(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=200, tenants=tenants("a", "b"))
    prompt = list(range(96))
    harness.add("a0", prompt, 30, tenant="a")
    harness.step()
    for i in range(1, 6):
        harness.add(f"a{i}", [*prompt, 1000 + i], 30, tenant="a")
    harness.step()
    assert num_running(harness, "a") == 6
    assert harness.scheduler.tenant_stats()["a"]["num_kv_blocks"] == 24 + 6
    harness.add("b", 36, 4, tenant="b")
    assert steps_to_first_token(harness, "b") == 1
    assert (num_running(harness, "a"), harness.scheduler.tenant_stats()["a"]["num_kv_blocks"]) == (4, 24 + 4)
    harness.run()
    harness.check_outputs()


class CountedList(list[Request]):
    """A list that counts how often someone goes through it."""

    num_passes = 0

    def __iter__(self) -> Iterator[Request]:
        CountedList.num_passes += 1
        return super().__iter__()


def test_a_step_goes_through_the_running_requests_as_often_however_many_they_are() -> None:
    """With a quota too, within which every one of them must find its blocks."""
    passes = []
    for count in (4, 24):
        harness = Harness(num_blocks=400, max_num_seqs=32, tenants=tenants("a", a={"kv_quota": 0.9}))
        for i in range(count):
            harness.add(f"a{i}", 2, 10, tenant="a")
        harness.step()
        assert num_running(harness, "a") == count
        harness.scheduler.live.running = CountedList(harness.scheduler.live.running)
        CountedList.num_passes = 0
        harness.scheduler.schedule()
        passes.append(CountedList.num_passes)
    assert passes[0] == passes[1] > 0


def test_a_request_that_its_quota_could_never_hold_is_refused() -> None:
    harness = Harness(num_blocks=64, block_size=4, tenants=tenants("a", "b", a={"kv_quota": 0.25}))
    with pytest.raises(InvalidRequestError, match=r"^max_tokens: .*make 65, and the KV quota of tenant a holds 64$"):
        harness.add("long", 40, 25, tenant="a")
    with pytest.raises(InvalidRequestError, match=r"^prompt: has 64 tokens, and the KV quota of tenant a holds 64"):
        harness.add("longer", 64, None, tenant="a")
    assert not harness.scheduler.has_unfinished_requests()
    harness.add("other", 40, 25, tenant="b")
    harness.add("unlimited", 10, None, tenant="a")
    harness.run()
    assert len(harness.outputs["unlimited"]) == 54


def test_unknown_tenants_are_refused_and_nobodys_requests_are_the_defaults() -> None:
    harness = Harness(tenants=tenants("a"))
    with pytest.raises(InvalidRequestError, match=r"^tenant: 'b' is not"):
        harness.add("r", 4, tenant="b")
    assert harness.add("r", 4).tenant == "default"
    harness.run()


def test_max_concurrent() -> None:
    harness = Harness(max_num_seqs=8, tenants=tenants("a", "b", a={"max_concurrent": 2}))
    for i in range(6):
        harness.add(f"a{i}", 4, 6, tenant="a")
    harness.step()
    harness.add("b", 4, 6, tenant="b")
    harness.step()
    assert (num_running(harness, "a"), num_running(harness, "b")) == (2, 1)
    harness.run()
    harness.check_outputs()


def test_prefix_caches_are_apart_unless_shared_on_purpose() -> None:
    terms: dict[str, Any] = {"c": {"cache_group": "g"}, "d": {"cache_group": "g"}}
    harness = Harness(tenants=tenants("a", "b", "c", "d", **terms))
    prompt = list(range(20))
    cached = {}
    for request_id, tenant, salt in (
        *(("a1", "a", None), ("a2", "a", None), ("b1", "b", None), ("none", None, None)),
        *(("forged", "b", "tenant a"), ("c1", "c", None), ("d1", "d", None), ("d2", "d", "own"), ("forged2", "b", "group g")),
    ):
        request = harness.add(request_id, prompt, 2, tenant=tenant, cache_salt=salt)
        harness.run()
        cached[request_id] = request.num_cached_tokens
    assert {request_id for request_id, count in cached.items() if count} == {"a2", "d1"}


@pytest.mark.parametrize("mode", MODES)
def test_a_high_priority_request_starts_within_two_steps(mode: dict[str, Any]) -> None:
    """With all slots taken, by its own tenant's requests or by others'."""
    harness = Harness(num_blocks=400, max_num_seqs=4, policy="priority", tenants=tenants("a", "b"), **mode)
    for i in range(10):
        harness.add(f"a{i}", 10, 40, tenant="a")
        harness.add(f"b{i}", 10, 40, tenant="b")
    for _ in range(5):
        harness.step()
    harness.add("urgent", 20, 4, priority=-1, tenant="a")
    assert steps_to_first_token(harness, "urgent") <= 2
    harness.run()
    harness.check_outputs()


def test_priority_within_a_tenants_limits_preempts_its_own_requests() -> None:
    harness = Harness(
        num_blocks=64,
        max_num_seqs=8,
        policy="priority",
        tenants=tenants("a", "b", a={"max_concurrent": 2}, b={"kv_quota": 0.5}),
    )
    for i in range(3):
        harness.add(f"a{i}", 4, 30, tenant="a")
        harness.add(f"b{i}", 40, 20, tenant="b")
    harness.step()
    harness.step()
    harness.add("urgent a", 4, 4, priority=-1, tenant="a")
    assert steps_to_first_token(harness, "urgent a") == 1
    harness.add("urgent b", 60, 4, priority=-1, tenant="b")
    assert steps_to_first_token(harness, "urgent b") <= 2
    harness.run()
    harness.check_outputs()


def test_siblings_of_a_tenant_at_its_limit() -> None:
    harness = Harness(num_blocks=64, max_num_seqs=8, tenants=tenants("a", "b", a={"max_concurrent": 2, "kv_quota": 0.3}))
    harness.add_siblings("n", 12, 5, 8, tenant="a")
    harness.add("b", 20, 8, tenant="b")
    harness.run()
    harness.check_outputs()


def test_who_made_way_may_stand_first_in_the_queue_at_once() -> None:
    """A tenant loses two requests in a step for the sake of another's, and is itself short of slots afterwards."""
    harness = Harness(num_blocks=11, block_size=4, max_num_seqs=4, max_num_batched_tokens=18, tenants=tenants("a"))
    harness.add_siblings("first", 7, 4, 16)
    harness.add_siblings("second", 9, 3, 14)
    for _ in range(7):
        harness.step()
    harness.add("a", 17, 7, tenant="a")
    harness.run()
    harness.check_outputs()
