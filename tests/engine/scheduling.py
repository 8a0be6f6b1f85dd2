"""A scheduler with a dummy worker, and the invariants that must hold after every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dummy_worker import DummyWorker, expected_output

from pyengine.config import CacheConfig, SchedulerConfig
from pyengine.engine.prefix_cache import HashFunction, hash_block
from pyengine.engine.request import Request, RequestStatus
from pyengine.engine.scheduler import Scheduler
from pyengine.engine.tenant_shares import precedence
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import SchedulerOutput, SequenceOutput

_SCHEDULER_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "policy",
    "preemption_mode",
    "static_batching",
    "tenants",
)


class Harness:
    """Runs steps, collects what each request reports, and checks every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_cpu_blocks: int = 0,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
        vocab_size: int = 1000,
        headroom: bool = True,
        min_shared_tokens: int | None = None,
        **scheduler: Any,
    ) -> None:
        config: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 10_000,
            "long_prefill_token_threshold": 0,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "preemption_mode": "recompute",
        }
        assert set(scheduler) <= set(_SCHEDULER_FIELDS)
        self.config = SchedulerConfig(**{**config, **scheduler})
        cache_config = CacheConfig(
            block_size=block_size,
            kv_cache_dtype="float32",
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler = Scheduler(self.config, cache_config, hash_function=hash_function)
        if not headroom:  # saves preemptions, and nothing may depend on it
            self.scheduler.live.admission.headroom = lambda *args: 0  # type: ignore[method-assign]
        if min_shared_tokens is not None:
            self.scheduler.min_shared_tokens = min_shared_tokens
        self.manager = self.scheduler.block_manager
        self.worker = DummyWorker(
            num_blocks, num_cpu_blocks, block_size, max_num_seqs=self.config.max_num_seqs, vocab_size=vocab_size
        )
        self.vocab_size = vocab_size
        self.requests: dict[str, Request] = {}  # every one ever added
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.errors: dict[str, str | None] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.last_step = SchedulerOutput()
        self.num_steps = 0
        self.num_resets = 0
        self.is_broken = False  # a step failed
        self.abort_in_next_step: list[str] = []  # between schedule and update

    # ---- requests

    def add(self, request_id: str, prompt: list[int] | int, max_tokens: int | None = 4, **fields: Any) -> Request:
        """Add a request. A prompt given as a number is that many tokens that no other request has; `eos` ends it, too."""
        eos = fields.pop("eos", ())
        params = {
            name: fields.pop(name) for name in list(fields) if name in SamplingParams.__dataclass_fields__ and name != "seed"
        }
        if isinstance(prompt, int):
            prompt = [hash((request_id, i)) % 100_000 for i in range(prompt)]
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, **params),
            stop_token_ids=frozenset(params.get("stop_token_ids", ())) | frozenset(eos),
            **fields,
        )
        self.scheduler.add_request(request)
        self.worker.salts[request_id] = request.cache_salt
        self.requests[request_id] = request
        self.outputs[request_id] = []
        return request

    def add_siblings(
        self, parent_id: str, prompt: list[int] | int, n: int, max_tokens: int = 4, **fields: Any
    ) -> list[Request]:
        """Add the sequences of one request with n > 1."""
        if isinstance(prompt, int):
            prompt = [hash((parent_id, i)) % 100_000 for i in range(prompt)]
        seed = fields.pop("seed", 0)
        return [
            self.add(
                f"{index}_{parent_id}", prompt, max_tokens, n=n, parent_id=parent_id, index=index, seed=seed + index, **fields
            )
            for index in range(n)
        ]

    def abort(self, *request_ids: str) -> list[str]:
        """Abort, and check that blocks are free at once."""
        ended = self.scheduler.finish_requests(request_ids, "abort")
        for request_id in ended:
            self.finish_reasons[request_id] = "abort"
        self.check_invariants()
        return ended

    # ---- steps

    def step(self) -> list[SequenceOutput]:
        """One step, checked."""
        self.is_broken = True
        expected_preemptions = {r.request_id: r.num_preemptions for r in self.scheduler.live.running}
        was_protected = {r.request_id for r in self.scheduler.live.running if r.is_protected}
        step = self.last_step = self.scheduler.schedule()
        self.num_steps += 1
        self.check_invariants()
        self._check_utilisation(step)
        for request_id in [*step.preempted_req_ids, *step.swapped_out_req_ids]:
            assert request_id not in was_protected, f"{request_id} was preempted without progress"
            assert self.requests[request_id].num_preemptions == expected_preemptions[request_id] + 1
        if self.scheduler.live.running:
            assert step.total_num_scheduled_tokens > 0, "something runs, and nothing gets on"
        assert step.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.live.running) <= self.config.max_num_seqs
        self.abort(*self.abort_in_next_step)
        self.abort_in_next_step = []
        result = self.worker.execute_model(step)
        for request_id in result.prompt_logprobs:
            assert not self.requests[request_id].may_match_prefix, f"prompt logprobs of {request_id}, for nobody"
        outputs = self.scheduler.update_from_output(step, result)
        self.check_invariants()
        self._collect(outputs)
        self.is_broken = False
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Run until everything has ended and nothing is left behind."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), f"not done after {max_steps} steps: livelock"
        self.step()  # tells the worker what ended last
        self.check_all_free()

    def scheduled(self) -> dict[str, int]:
        """Tokens of the last step, by request."""
        return self.last_step.num_scheduled_tokens

    def _collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.req_id not in self.finish_reasons, "output of a request that has ended"
            self.outputs[output.req_id] += output.new_token_ids
            assert output.logprobs is None or len(output.logprobs) == len(output.new_token_ids)
            for entry in output.prompt_logprobs or []:
                self.prompt_logprobs.setdefault(output.req_id, []).append(entry.token_ids[0])
            if output.finish_reason is not None:
                self.finish_reasons[output.req_id] = output.finish_reason
                self.errors[output.req_id] = output.error

    # ---- checks

    def check_outputs(self) -> None:
        """Every request has generated what it generates alone, as far as it got."""
        for request_id, request in self.requests.items():
            output = self.outputs[request_id]
            alone = expected_output(
                request.prompt_token_ids,
                len(output),
                salt=request.cache_salt,
                seed=request.seed,
                vocab_size=self.vocab_size,
            )
            assert output == alone, request_id
            if self.finish_reasons.get(request_id) == "length":
                assert len(output) == request.sampling_params.max_tokens

    def check_all_free(self) -> None:
        """Nothing leaked, here or in the worker."""
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_cpu_blocks == stats.num_cpu_blocks
        assert self.manager.pool.num_used_slots == 0
        assert not self.worker.sequences
        assert not self.scheduler.live.waiting
        assert not self.scheduler.live.siblings._groups
        cache = self.manager.prefix_cache
        if cache is not None:
            assert all(block_id in cache for block_id in cache._by_block)
            assert len(cache._roots) <= len(cache._entries), "a salt without blocks is remembered"

    def check_invariants(self) -> None:
        """Reference counts, the free lists, fill and the prefix cache agree with the tables."""
        on_device = [r for r in self.scheduler.live.all.values() if r.status is RequestStatus.RUNNING]
        on_cpu = [r for r in self.scheduler.live.all.values() if r.status is RequestStatus.SWAPPED]
        assert {r.request_id for r in on_device} == {r.request_id for r in self.scheduler.live.running}
        assert self.scheduler.live.running == sorted(self.scheduler.live.running, key=precedence)
        self._check_pool(on_device)
        self._check_swap_space(on_cpu)
        self._check_prefix_cache()
        for request in self.scheduler.live.all.values():
            holds_blocks = request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPED)
            assert (request.block_table is not None) == holds_blocks
            assert holds_blocks or request.num_computed_tokens == 0
            generated = request.num_tokens - request.num_prompt_tokens
            assert request.num_preemptions <= generated + 1

        reserved = sum(self.scheduler.live.admission.num_owed_blocks(r) for r in on_device if r.is_protected)
        assert reserved <= self.manager.num_free_blocks, "a protected request may find no block"
        self._check_tenants(on_device)

    def _check_tenants(self, on_device: list[Request]) -> None:
        """No quota or limit is exceeded, by a count of their own blocks, and no request is forgotten."""
        num_blocks = self.manager.pool.num_blocks
        for tenant in self.config.tenants:
            own = [r for r in on_device if r.tenant == tenant.name]
            held = {block_id for r in own if r.block_table is not None for block_id in r.block_table.block_ids}
            assert len(held) <= int(tenant.kv_quota * num_blocks), f"{tenant.name} is above its quota"
            assert tenant.max_concurrent is None or len(own) <= tenant.max_concurrent
            stats = self.scheduler.tenant_stats()[tenant.name]
            live = [r for r in self.scheduler.live.all.values() if r.tenant == tenant.name]
            assert (stats["num_running"], stats["num_waiting"]) == (len(own), len(live) - len(own))
            assert stats["num_kv_blocks"] == len(held)
            owed = sum(self.scheduler.live.admission.num_owed_blocks(r) for r in own if r.is_protected)
            assert len(held) + owed <= stats["kv_quota_blocks"], "a protected request may find no block in its quota"

    def _check_pool(self, on_device: list[Request]) -> None:
        pool, size = self.manager.pool, self.manager.block_size
        holders: Counter[int] = Counter()
        fill: dict[int, int] = {}
        for request in on_device:
            table = request.block_table
            assert table is not None
            assert not table.is_swapped
            assert len(set(table.block_ids)) == len(table.block_ids)
            assert len(table.block_ids) == -(-table.num_tokens // size)
            for index, block_id in enumerate(table.block_ids):
                holders[block_id] += 1
                fill[block_id] = max(fill.get(block_id, 0), min(size, table.num_tokens - index * size))
        free = pool.free_block_ids()
        assert len(free) == len(set(free)) == pool.num_free_blocks
        assert set(free) | set(holders) == set(range(1, pool.num_blocks + 1))
        assert not set(free) & set(holders)
        assert all(pool.ref_counts[block_id] == holders[block_id] for block_id in range(1, pool.num_blocks + 1))
        assert pool.num_used_slots == sum(fill.values())

    def _check_swap_space(self, on_cpu: list[Request]) -> None:
        swap_space = self.manager.swap_space
        holders: Counter[int] = Counter()
        for request in on_cpu:
            table = request.block_table
            assert table is not None
            assert table.is_swapped
            assert len(set(table.block_ids)) == len(table.block_ids)
            holders.update(table.block_ids)
        assert all(swap_space.ref_counts[block_id] == holders[block_id] for block_id in range(swap_space.num_blocks))
        assert swap_space.num_free_blocks == swap_space.num_blocks - len(holders)
        for cpu_block, device_block in swap_space._device_twin.items():
            assert swap_space._cpu_twin[device_block] == cpu_block
            assert swap_space.ref_counts[cpu_block] > 0
            assert self.manager.pool.ref_counts[device_block] > 0
        assert len(swap_space._cpu_twin) == len(swap_space._device_twin)

    def _check_prefix_cache(self) -> None:
        cache = self.manager.prefix_cache
        if cache is None:
            return
        tables = [r.block_table for r in self.scheduler.live.all.values() if r.block_table is not None]
        refs: Counter[int] = Counter(id(table.tip) for table in tables if table.tip is not None)
        for block_hash, entry in cache._entries.items():
            assert entry.block_hash == block_hash
            assert entry.parent is not None
            refs[id(entry.parent)] += 1
        for entry in [*cache._entries.values(), *cache._roots.values()]:
            assert entry.num_refs == refs[id(entry)]
            assert entry.num_refs or entry.block_id is not None, "an entry that nothing needs"
            assert entry.block_id is None or cache._by_block[entry.block_id] is entry
        assert all(entry.block_id == block_id for block_id, entry in cache._by_block.items())
        # Free blocks without content are used before any cached one is evicted.
        is_cached = [block_id in cache for block_id in self.manager.pool.free_block_ids()]
        assert is_cached == sorted(is_cached) or self.num_resets

    def reset_prefix_cache(self) -> None:
        """Reset, after which free blocks keep their order though they have lost their content."""
        self.scheduler.reset_prefix_cache()
        self.num_resets += 1
        self.check_invariants()

    def _check_utilisation(self, step: SchedulerOutput) -> None:
        pool, size = self.manager.pool, self.manager.block_size
        wasted = pool.num_allocated_blocks * size - pool.num_used_slots
        num_running = len(self.scheduler.live.running)
        assert wasted < size * num_running if num_running else wasted == 0
