"""Which tokens run in the next step, and where their KV goes.

There is no prefill phase and no decode phase: a request has `num_tokens` tokens, `num_computed_tokens` of them have their KV in
its blocks, and every step moves the second number towards the first. A request that has caught up samples a token.

Memory. Blocks are allocated for the tokens of one step. A request is admitted when free blocks hold all tokens that it and the
running ones have now; what they will generate is not counted. When blocks run out, a request takes them from less urgent ones:
the least urgent running request is preempted. These rules keep that fair and finite:

- Urgency is (priority, order of arrival). A request never preempts a more urgent one. One that finds nobody to preempt waits,
  holding what it has. So the most urgent request gets on, and every request is the most urgent one some day.
- A preempted request comes back when there is room for all its tokens, and for the others to grow until it has caught up. The
  blocks that it still lacks are then reserved for it, and it is protected: it is not preempted before it has generated a
  token. So no request is preempted more often than it generates tokens, plus one.
- A request whose prefix another one computes in this step waits for the next one. Those behind it do not wait for it.
- A request that could not finish with the whole pool to itself is refused when it is added. So one that was admitted finishes.

With tenants (`tenant_shares.py`) each has a queue of its own, and running requests are put in order at every step, in turns.
A tenant that is short of slots is admitted before those that run get their tokens, as a request of a higher priority is. Blocks
within a quota follow the same rules as blocks within the pool: running requests of the same tenant make way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pyengine.config import CacheConfig, SchedulerConfig
from pyengine.engine.admission import Admission, AdmissionPlan
from pyengine.engine.block_manager import AppendedSlots, BlockManager
from pyengine.engine.pace import StepLimits
from pyengine.engine.pending_prefixes import MIN_SHARED_TOKENS, PendingPrefixes
from pyengine.engine.preemption import Preempter
from pyengine.engine.prefix_cache import HashFunction, hash_block
from pyengine.engine.request import Request, RequestStatus
from pyengine.engine.request_queue import FairQueue, RequestQueue
from pyengine.engine.scheduler_stats import SchedulerStats
from pyengine.engine.siblings import Siblings
from pyengine.engine.tenant_shares import TenantShares, precedence
from pyengine.errors import InvalidRequestError
from pyengine.outputs import FinishReason
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput, SequenceOutput


@dataclass(slots=True)
class _Step:
    """A step in the making."""

    output: SchedulerOutput
    token_budget: int  # tokens that may still be scheduled
    max_num_seqs: int  # beyond which requests that wait for nobody to make way are not admitted
    num_owed_blocks: int = 0  # blocks that running requests lack for the tokens they have
    admitted: list[Request] = field(default_factory=list)
    pending: PendingPrefixes | None = None  # None: nobody waits for a prefix
    deferred: list[Request] = field(default_factory=list)  # that wait for one, out of the queue until the step is made
    portions: dict[str, int] | None = None  # with tenants: prompt tokens that each may still have; None: any number


class Scheduler:
    """Owns the requests and their blocks. Not thread-safe: the step thread alone calls it."""

    def __init__(
        self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, *, hash_function: HashFunction = hash_block
    ) -> None:
        self.config = scheduler_config
        self.block_manager = BlockManager(
            cache_config.num_blocks,
            cache_config.block_size,
            num_cpu_blocks=cache_config.num_cpu_blocks,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            hash_function=hash_function,
        )
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # most urgent first
        self._shares: TenantShares | None = None  # both of these, or none
        self._fair_queue: FairQueue | None = None
        if scheduler_config.tenants:
            self._shares = TenantShares(scheduler_config.tenants, scheduler_config.max_num_seqs, cache_config.num_blocks)
            self._fair_queue = FairQueue(self._shares)
        # Those that may be admitted.
        self.waiting: RequestQueue | FairQueue = RequestQueue() if self._fair_queue is None else self._fair_queue
        self._stats = SchedulerStats()
        self._siblings = Siblings(self.waiting)
        self._admission = Admission(self.block_manager, self._siblings, self._stats, self._shares)
        self._preempter = Preempter(
            scheduler_config.preemption_mode, self.block_manager, self.waiting, self._siblings, self._stats
        )
        self._finished_req_ids: list[str] = []  # to tell the worker with the next step
        self._to_preempt: set[str] = set()
        self._batch_is_open = True  # with static batching: whether requests may still join
        self.min_shared_tokens = MIN_SHARED_TOKENS
        self._num_added = 0
        self._utilisation_sum = 0.0

    # ---- requests in and out

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: if its id is in use, its tenant unknown, or if it could never finish, being longer than model,
                pool or quota allow.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in use")
        if self._shares is not None:
            tenant = self._shares.resolve(request.tenant).tenant
            request.tenant, request.cache_salt = tenant.name, tenant.cache_salt(request.cache_salt)
        self._admission.fit_length(request, self.config.max_model_len)
        self._siblings.add(request)
        priority = request.priority if self.config.policy == "priority" else 0
        request.urgency = (priority, self._num_added)
        self._num_added += 1
        self.requests[request.request_id] = request
        if self._shares is not None:
            self._shares.added(request)
        self.waiting.push(request)

    def finish_requests(self, request_ids: Iterable[str], finish_reason: FinishReason) -> list[str]:
        """End requests, in whatever state they are; their blocks are free on return. Ids that are unknown or ended are skipped.

        Returns:
            The ids that this call ended.
        """
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.is_padding:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            request.finish_reason = finish_reason
            self._end(request)
            ended.append(request_id)
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Live requests go on; what they compute is not cached until they are admitted anew."""
        if self.block_manager.prefix_cache is None:
            return
        self.block_manager.prefix_cache.reset()
        for request in self.requests.values():
            if request.block_table is not None:
                self.block_manager.stop_caching(request.block_table)

    def preempt_requests(self, request_ids: Iterable[str]) -> None:
        """Preempt running requests at the start of the next step, except those that are protected then."""
        self._to_preempt.update(request_ids)

    def stats(self) -> SchedulerStats:
        """A snapshot of counters and gauges."""
        stats, manager = self._stats, self.block_manager
        return replace(
            stats,
            num_running=len(self.running),
            num_waiting=len(self.requests) - len(self.running) - stats.num_swapped,
            num_blocks=manager.pool.num_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_cpu_blocks=manager.swap_space.num_blocks,
            num_free_cpu_blocks=manager.swap_space.num_free_blocks,
            num_blocks_allocated=manager.pool.num_allocations,
            kv_utilisation_now=manager.kv_utilisation,
            kv_utilisation=self._utilisation_sum / stats.num_steps if stats.num_steps else 0.0,
        )

    def reset_stats(self) -> None:
        """Count from zero again. Gauges stay what they are."""
        for counter in fields(SchedulerStats):
            if counter.name != "num_swapped":
                setattr(self._stats, counter.name, counter.default)
        self._utilisation_sum = 0.0
        self.block_manager.pool.num_allocations = 0
        if self._shares is not None:
            self._shares.reset_counters()

    def tenant_stats(self) -> dict[str, dict[str, Any]]:
        """Counters and gauges by tenant; empty without tenants."""
        return {} if self._shares is None else self._shares.stats(self.running)

    # ---- a step

    @property
    def num_streams(self) -> int:
        """Running requests that are due one token."""
        return sum(request.num_tokens - request.num_computed_tokens == 1 for request in self.running)

    def schedule(self, limits: StepLimits | None = None) -> SchedulerOutput:
        """Decide one step: running requests first, then those that wait, most urgent first.

        An output without tokens still carries what the worker must forget.

        Args:
            limits: of this step, within the configuration's; None: those.
        """
        if limits is None:
            limits = StepLimits(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self.block_manager.swap_space.start_step()
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = []
        step = _Step(output, limits.num_tokens, limits.num_seqs)
        if self.config.static_batching:
            self._end_padding(num_blocks_needed=len(self.running))
        if self._shares is not None and self._fair_queue is not None:
            self._shares.start_step(self.running)
            self._fair_queue.start_step()
        if self._to_preempt:
            self._preempt_as_asked(step)
        if (self.config.policy == "priority" or self._shares is not None) and not self.config.static_batching:
            self._admit_urgent(step)
        self._schedule_running(step)
        self._admit_waiting(step)
        for request in step.admitted:
            insort(self.running, request, key=precedence)
        output.total_num_scheduled_tokens = limits.num_tokens - step.token_budget
        if output.total_num_scheduled_tokens:
            self._stats.num_steps += 1
            self._utilisation_sum += self.block_manager.kv_utilisation
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[SequenceOutput]:
        """Take in what the step computed.

        Returns:
            What is new, for sequences that have anything new, in batch order. Sequences that ended are freed.

        Raises:
            RuntimeError: if the worker's answer does not fit the step, a bug.
        """
        outputs = []
        sampled, failed, has_ended = model_runner_output.sampled_token_ids, model_runner_output.failed_req_ids, False
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            if request.is_padding:
                self._advance_padding(request, num_tokens, sampled.get(request_id))
                continue
            if request_id in failed:
                request.finish_reason = "error"
                output = SequenceOutput(request_id, [], finish_reason="error", error=failed[request_id])
            else:
                first_position = request.num_computed_tokens
                self._advance(request, num_tokens)
                new_token_ids = self._append_sampled(request, sampled.get(request_id))
                if self._shares is not None:
                    self._shares.of(request).num_generated_tokens += len(new_token_ids)
                prompt_logprobs = None
                if not request.may_match_prefix:
                    computed = model_runner_output.prompt_logprobs.get(request_id, [])
                    prompt_logprobs = request.take_prompt_logprobs(first_position, computed)
                if not new_token_ids and prompt_logprobs is None:
                    continue
                logprobs = model_runner_output.logprobs.get(request_id)
                output = SequenceOutput(
                    request_id,
                    new_token_ids,
                    logprobs=logprobs[: len(new_token_ids)] if logprobs is not None else None,
                    prompt_logprobs=prompt_logprobs,
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason,
                    num_cached_tokens=request.num_cached_tokens,
                )
            outputs.append(output)
            if request.finish_reason is not None:
                has_ended = True
                if self.config.static_batching and request.finish_reason != "error":
                    request.is_padding = True
                else:
                    self._end(request)
        if self.config.static_batching:
            self._end_padding(num_blocks_needed=0)
        if has_ended:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return outputs

    # ---- scheduling, in the order in which it happens

    def _preempt_as_asked(self, step: _Step) -> None:
        for request in reversed(self.running.copy()):
            if request.request_id in self._to_preempt and not (request.is_protected or request.is_padding):
                self._preempt(request, step)
        self._to_preempt.clear()

    def _preempt(self, request: Request, step: _Step) -> None:
        self.running.remove(request)
        self._preempter.preempt(request, step.output)
        if self._shares is not None:
            self._shares.preempted(request)

    def _admit_urgent(self, step: _Step) -> None:
        """Let in requests that outrank a running one, or whose tenant is short of slots; running ones may have to make way.

        This comes before any running request is scheduled, so that no decision must be undone.
        """
        if not self._goes_first(self.waiting.peek()):
            return
        if self._shares is not None and self._fair_queue is not None and self.config.enable_chunked_prefill:
            wanted = self._shares.wanted_chunks(self.running, self._chunk) | dict.fromkeys(
                self._fair_queue.tenants, step.token_budget
            )
            step.portions = self._shares.divide(step.token_budget - len(self.running), wanted)
        step.num_owed_blocks = sum(map(self._num_owed_blocks, self.running))
        num_held_tokens = len(self.running)  # every running request can still decode
        step.token_budget -= num_held_tokens
        while (request := self.waiting.peek()) is not None and self._goes_first(request):
            if self._siblings.park_first():
                continue
            if self._has_just_left(request, step):
                break
            plan = self._plan(request, step)
            if plan is None:
                break
            if self._make_way(plan, step):
                self._admit(plan, step)
            elif not self._pass_over(plan, step):
                break
        step.token_budget += num_held_tokens
        step.portions = None

    def _schedule_running(self, step: _Step) -> None:
        """One token for each request that has caught up, then chunks for the others, as far as the budget goes."""
        num_decodes = num_reserved_blocks = 0
        for request in self.running:
            num_decodes += request.num_tokens - request.num_computed_tokens == 1
            if request.is_protected:
                num_reserved_blocks += self._num_owed_blocks(request)
        chunk_budget = step.token_budget - num_decodes
        portions = (
            None
            if self._shares is None
            else self._shares.divide(chunk_budget, self._shares.wanted_chunks(self.running, self._chunk))
        )
        cached_reqs = step.output.scheduled_cached_reqs
        index = 0
        while index < len(self.running):  # a request may preempt others behind it
            request = self.running[index]
            index += 1
            num_tokens = request.num_tokens - request.num_computed_tokens
            is_chunk = num_tokens > 1
            if is_chunk:
                num_tokens = self._chunk(num_tokens, chunk_budget if portions is None else portions[str(request.tenant)])
            table = request.block_table
            assert table is not None
            owed = self._num_owed_blocks(request) if request.is_protected else 0
            slots = self._append_slots(request, num_tokens, index, num_reserved_blocks - owed, step) if num_tokens else None
            if slots is None:
                continue
            num_tokens = table.num_tokens - request.num_computed_tokens
            if is_chunk:
                chunk_budget -= num_tokens
                if portions is not None:
                    portions[str(request.tenant)] -= num_tokens
            if self._shares is not None:
                self._shares.charge(request, num_tokens)
            if owed:
                num_reserved_blocks -= owed - self._num_owed_blocks(request)
            step.token_budget -= num_tokens
            step.output.num_scheduled_tokens[request.request_id] = num_tokens
            cached_reqs.req_ids.append(request.request_id)
            cached_reqs.num_computed_tokens.append(request.num_computed_tokens)
            cached_reqs.new_block_ids.append(slots.new_block_ids)
            cached_reqs.replaced_block_ids.append([])
            if slots.copied is not None:
                position, source, destination = slots.copied
                cached_reqs.replaced_block_ids[-1].append((position, destination))
                step.output.blocks_to_copy.append((source, destination))

    def _append_slots(
        self, request: Request, num_tokens: int, behind: int, num_reserved_blocks: int, step: _Step
    ) -> AppendedSlots | None:
        """Make room for a running request's next tokens, or for some of them, preempting requests from index `behind` on.

        None: no room, and nobody to preempt. The request waits for a step, holding what it has.
        """
        manager, table = self.block_manager, request.block_table
        assert table is not None
        while True:
            num_available = manager.num_free_blocks - num_reserved_blocks
            num_allowed = (
                num_available if table.usage is None else self._admission.num_allowed_blocks(request, table.usage, self.running)
            )
            slots = manager.append_slots(table, num_tokens, min(num_available, num_allowed))
            if slots is not None:
                return slots
            # A shorter chunk is better than another request's work undone.
            num_fitting = manager.num_slots_within(table, min(num_available, num_allowed))
            if num_fitting > 0:
                num_tokens = num_fitting
            elif not self._preempt_behind(behind, step, request.tenant if num_allowed < num_available else None):
                return None

    def _preempt_behind(self, index: int, step: _Step, tenant: str | None) -> bool:
        """Preempt the least urgent running request from `index` on, of one tenant if it is given; say whether there was one."""
        for request in reversed(self.running[index:]):
            if request.is_padding:
                self.running.remove(request)
                self._end(request)
                return True
            if not request.is_protected and tenant in (None, request.tenant):
                self._preempt(request, step)
                return True
        return False

    def _admit_waiting(self, step: _Step) -> None:
        """Admit the most urgent request as long as there are tokens, slots and blocks. Nobody overtakes it."""
        if self.config.static_batching and self.running and not self._batch_is_open:
            return
        if self.waiting and step.token_budget and len(self.running) < step.max_num_seqs:
            step.num_owed_blocks = sum(map(self._num_owed_blocks, self.running))
            step.num_owed_blocks += sum(map(self._num_owed_blocks, step.admitted))
            if self.block_manager.prefix_cache is not None and not self.config.static_batching:
                step.pending = PendingPrefixes(self.block_manager)
                step.pending.add_scheduled(step.output.num_scheduled_tokens, self.requests)
            while (request := self.waiting.peek()) is not None and self._admit_next(request, step):
                pass
            for request in step.deferred:
                self.waiting.push(request)
        # A static batch may take several steps to fill: its prompts exceed the token budget, or siblings wait for a prompt.
        self._batch_is_open = step.token_budget == 0 or self._siblings.num_parked > 0

    def _admit_next(self, request: Request, step: _Step) -> bool:
        """Admit the queue's first request, or park it; False: it must wait, and all behind it."""
        if self._siblings.park_first():
            return True
        num_running = len(self.running) + len(step.admitted)
        if not step.token_budget or num_running >= step.max_num_seqs or self._has_just_left(request, step):
            return False
        # It takes a block at least. To know more, its prefix must be looked up, which is not to happen in vain at every step.
        num_available = self.block_manager.num_free_blocks - step.num_owed_blocks
        if num_running and 1 + self._admission.headroom(request, num_running, 1) > num_available:
            return False
        plan = self._plan(request, step)
        if plan is None or not self._fits(plan, step):
            return plan is not None and self._pass_over(plan, step)
        if step.pending is not None and step.pending.num_shared_tokens(plan) >= self.min_shared_tokens:
            step.deferred.append(self.waiting.pop())
            return True
        self._admit(plan, step)
        return True

    def _has_just_left(self, request: Request, step: _Step) -> bool:
        """Whether this step preempts the request; it cannot start in the same one, its blocks being on their way."""
        return request.request_id in step.output.preempted_req_ids or request.request_id in step.output.swapped_out_req_ids

    def _goes_first(self, request: Request | None) -> bool:
        """Whether a waiting request is to be admitted before the running ones are scheduled."""
        if request is None or not self.running:
            return False
        return self._outranks_running(request) or (
            self._shares is not None and self._shares.is_short(request, len(self.running))
        )

    def _outranks_running(self, request: Request) -> bool:
        return request.urgency[0] < self.running[-1].urgency[0]

    def _pass_over(self, plan: AdmissionPlan, step: _Step) -> bool:
        """Let other tenants' requests go before this one if it waits for its own tenant's; say whether that is so."""
        if self._fair_queue is None or self._fits_tenant(plan, step):
            return False
        self._fair_queue.pass_over(plan.request)
        return True

    def _plan(self, request: Request, step: _Step) -> AdmissionPlan | None:
        """How the request would start, or None if no tokens can be granted."""
        plan = self._admission.plan(request)
        num_remaining = request.num_tokens - plan.num_computed_tokens
        budget = step.token_budget
        if step.portions is not None and not self._outranks_running(request):
            budget = min(budget, step.portions[str(request.tenant)])
        plan.num_tokens = self._chunk(num_remaining, budget)
        may_run = plan.num_tokens == num_remaining or (self.config.enable_chunked_prefill and plan.num_tokens > 0)
        return plan if may_run else None

    def _make_way(self, plan: AdmissionPlan, step: _Step) -> bool:
        """Preempt running requests that must make way until the plan fits, if that is enough; say whether it fits."""
        if self._fits(plan, step):
            return True
        victims = self._victims(plan)
        num_kept = len(self.running) + len(step.admitted) - len(victims)
        # At most: blocks that a victim shares with others do not become free.
        num_freed = sum(len(r.block_table.block_ids) + self._num_owed_blocks(r) for r in victims if r.block_table)
        if num_kept >= self.config.max_num_seqs:
            return False
        if not self._admission.has_room(plan, num_kept, step.num_owed_blocks - num_freed):
            return False
        while victims and not self._fits(plan, step):
            # The least urgent; one of the same tenant, if it is the tenant's limits that stand in the way.
            own = [r for r in victims if r.tenant == plan.request.tenant]
            if not own and not self._fits_tenant(plan, step):
                break
            victim = victims[-1] if self._fits_tenant(plan, step) else own[-1]
            victims.remove(victim)
            step.num_owed_blocks -= self._num_owed_blocks(victim)
            self._preempt(victim, step)
        return self._fits(plan, step)

    def _victims(self, plan: AdmissionPlan) -> list[Request]:
        """Running requests that may be preempted for the plan's, least urgent last."""
        request = plan.request
        lower = [r for r in self.running if r.urgency[0] > request.urgency[0] and not r.is_protected]
        if self._shares is None or not self._shares.is_short(request, len(self.running)):
            return lower
        chosen = {id(r) for r in lower + self._shares.displaceable(request, self._admission.num_blocks(plan), self.running)}
        return [r for r in self.running if id(r) in chosen]

    def _fits(self, plan: AdmissionPlan, step: _Step) -> bool:
        num_running = len(self.running) + len(step.admitted)
        if num_running >= self.config.max_num_seqs or not self._fits_tenant(plan, step):
            return False
        return self._admission.has_room(plan, num_running, step.num_owed_blocks)

    def _fits_tenant(self, plan: AdmissionPlan, step: _Step) -> bool:
        return self._admission.fits_tenant(plan, [*self.running, *step.admitted])

    def _admit(self, plan: AdmissionPlan, step: _Step) -> None:
        request = plan.request
        self.waiting.remove(request)  # those that made way for it may stand before it now
        self._admission.start(plan, step.output)
        if self._shares is not None:
            self._shares.admitted(request)
            self._shares.charge(request, plan.num_tokens)
            if step.portions is not None:
                step.portions[str(request.tenant)] -= plan.num_tokens
        if step.pending is not None:
            step.pending.add(request, plan.num_tokens)
        step.token_budget -= plan.num_tokens
        step.num_owed_blocks += self._num_owed_blocks(request)
        step.admitted.append(request)

    def _chunk(self, num_tokens: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.config.enable_chunked_prefill:
            num_tokens = min(num_tokens, threshold)
        return max(0, min(num_tokens, budget))

    def _num_owed_blocks(self, request: Request) -> int:
        return self._admission.num_owed_blocks(request)

    # ---- after a step

    def _advance(self, request: Request, num_tokens: int) -> None:
        start, table = request.num_computed_tokens, request.block_table
        assert table is not None
        request.num_computed_tokens = start + num_tokens
        if request.num_computed_tokens >= table.cache_at:
            self.block_manager.cache_full_blocks(table, request.token_ids, request.num_computed_tokens)
        if start < request.num_prompt_tokens:
            self._siblings.advanced(request)

    def _append_sampled(self, request: Request, token_ids: list[int] | None) -> list[int]:
        has_caught_up = request.num_computed_tokens == request.num_tokens
        if has_caught_up != bool(token_ids):
            raise RuntimeError(f"the worker sampled {token_ids} for {request!r}")
        if not token_ids:
            return []
        request.is_protected = False
        return request.append_output_tokens(token_ids)

    def _advance_padding(self, request: Request, num_tokens: int, token_ids: list[int] | None) -> None:
        """Static batching: take in a row that has ended. Its tokens are nobody's, and so is a failure."""
        if token_ids is None:
            self._end(request)
        else:
            self._advance(request, num_tokens)
            self._append_sampled(request, token_ids)

    def _end_padding(self, num_blocks_needed: int) -> None:
        """Static batching: a row that has ended is computed on until its batch ends, but never at a live row's cost."""
        is_over = all(request.is_padding for request in self.running)
        for request in self.running:
            is_full = request.num_tokens >= self.config.max_model_len
            may_end = request.is_padding and not request.is_finished
            if may_end and (is_over or is_full or self.block_manager.num_free_blocks < num_blocks_needed):
                self._end(request)
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _end(self, request: Request) -> None:
        if request.block_table is not None:
            self.block_manager.free(request.block_table)
            request.block_table = None
        if request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPED):
            self._finished_req_ids.append(request.request_id)  # the worker knows it
        if request.request_id in self.waiting:
            self.waiting.remove(request)
        self._stats.num_swapped -= request.status is RequestStatus.SWAPPED
        self._siblings.remove(request)
        request.status = RequestStatus.FINISHED
        if self._shares is not None:
            self._shares.ended(request)
        del self.requests[request.request_id]
