"""One step in the making: which requests run in it, and how many tokens of each. `scheduler.py` has the rules."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Set

from pyengine.config import SchedulerConfig
from pyengine.engine.admission import AdmissionPlan
from pyengine.engine.block_manager import AppendedSlots
from pyengine.engine.live_requests import LiveRequests
from pyengine.engine.pace import StepLimits
from pyengine.engine.pending_prefixes import PendingPrefixes
from pyengine.engine.request import Request
from pyengine.engine.static_batch import StaticBatch
from pyengine.engine.tenant_shares import precedence
from pyengine.scheduler_output import SchedulerOutput


class StepBuilder:
    """Fills one `SchedulerOutput`. Used once: `build`, or the methods that it calls, in its order.

    Args:
        live: the requests, which it starts and preempts.
        config: the scheduler's.
        limits: of this step.
        min_shared_tokens: of a prefix that another request computes in this step, for a request to wait for it.
        batch: with static batching.
    """

    def __init__(
        self,
        live: LiveRequests,
        config: SchedulerConfig,
        limits: StepLimits,
        min_shared_tokens: int,
        batch: StaticBatch | None,
    ) -> None:
        self._live = live
        self._config = config
        self._limits = limits
        self._min_shared_tokens = min_shared_tokens
        self._batch = batch
        self._admission = live.admission
        self._shares = live.shares
        self._output = SchedulerOutput()
        self._token_budget = limits.num_tokens  # tokens that may still be scheduled
        self._num_owed_blocks = 0  # blocks that running requests lack for the tokens they have
        self._num_reserved_blocks = 0  # those that protected ones lack, which no other gets
        self._num_reserved_by_tenant: Counter[str | None] = Counter()
        self._admitted: list[Request] = []
        self._pending: PendingPrefixes | None = None  # None: nobody waits for a prefix
        self._deferred: list[Request] = []  # that wait for one, out of the queue until the step is made
        self._portions: dict[str, int] | None = None  # with tenants: prompt tokens that each may still have; None: any number

    def build(self, to_preempt: Set[str] = frozenset()) -> SchedulerOutput:
        """Make the step.

        Args:
            to_preempt: requests to preempt first, except those that are protected.
        """
        live, shares = self._live, self._shares
        if self._batch is not None:
            self._batch.start_step()
        if shares is not None and live.fair_queue is not None:
            shares.start_step(live.running)
            live.fair_queue.start_step()
        if to_preempt:
            self._preempt_as_asked(to_preempt)
        if (self._config.policy == "priority" or shares is not None) and self._batch is None:
            self._admit_urgent()
        self._schedule_running()
        self._admit_waiting()
        for request in self._admitted:
            insort(live.running, request, key=precedence)
        self._output.total_num_scheduled_tokens = self._limits.num_tokens - self._token_budget
        # Last: padding that this step has ended is among them, whose rows in the worker the admitted requests take.
        self._output.finished_req_ids = live.take_finished_req_ids()
        return self._output

    def _preempt_as_asked(self, request_ids: Set[str]) -> None:
        for request in reversed(self._live.running.copy()):
            if request.request_id in request_ids and not (request.is_protected or request.is_padding):
                self._live.preempt(request, self._output)

    # ---- running requests

    def _schedule_running(self) -> None:
        """One token for each request that has caught up, then chunks for the others, as far as the budget goes."""
        running = self._live.running
        num_decodes = 0
        for request in running:
            num_decodes += request.num_tokens - request.num_computed_tokens == 1
            if request.is_protected:
                self._reserve(request, self._admission.num_owed_blocks(request))
        chunk_budget = self._token_budget - num_decodes
        portions = (
            None
            if self._shares is None
            else self._shares.divide(chunk_budget, self._shares.wanted_chunks(running, self._chunk))
        )
        index = 0
        while index < len(running):  # a request may preempt others behind it
            request = running[index]
            index += 1
            num_tokens = request.num_tokens - request.num_computed_tokens
            is_chunk = num_tokens > 1
            if is_chunk:
                num_tokens = self._chunk(num_tokens, chunk_budget if portions is None else portions[str(request.tenant)])
            table = request.block_table
            assert table is not None
            owed = self._admission.num_owed_blocks(request) if request.is_protected else 0
            self._reserve(request, -owed)  # its own are not reserved from it
            slots = self._append_slots(request, num_tokens, index) if num_tokens else None
            if owed:
                self._reserve(request, self._admission.num_owed_blocks(request))
            if slots is None:
                continue
            num_tokens = table.num_tokens - request.num_computed_tokens
            if is_chunk:
                chunk_budget -= num_tokens
                if portions is not None:
                    portions[str(request.tenant)] -= num_tokens
            self._schedule(request, num_tokens, slots)

    def _reserve(self, request: Request, num_blocks: int) -> None:
        """Keep that many blocks more for a protected request."""
        self._num_reserved_blocks += num_blocks
        self._num_reserved_by_tenant[request.tenant] += num_blocks

    def _schedule(self, request: Request, num_tokens: int, slots: AppendedSlots) -> None:
        """Write a running request's tokens into the step."""
        if self._shares is not None:
            self._shares.charge(request, num_tokens)
        self._token_budget -= num_tokens
        cached_reqs = self._output.scheduled_cached_reqs
        self._output.num_scheduled_tokens[request.request_id] = num_tokens
        cached_reqs.req_ids.append(request.request_id)
        cached_reqs.num_computed_tokens.append(request.num_computed_tokens)
        cached_reqs.new_block_ids.append(slots.new_block_ids)
        cached_reqs.replaced_block_ids.append([])
        if slots.copied is not None:
            position, source, destination = slots.copied
            cached_reqs.replaced_block_ids[-1].append((position, destination))
            self._output.blocks_to_copy.append((source, destination))

    def _append_slots(self, request: Request, num_tokens: int, behind: int) -> AppendedSlots | None:
        """Make room for a running request's next tokens, or for some of them, preempting requests from index `behind` on.

        None: no room, and nobody to preempt. The request waits for a step, holding what it has.
        """
        manager, table = self._live.block_manager, request.block_table
        assert table is not None
        while True:
            num_available = num_allowed = manager.num_free_blocks - self._num_reserved_blocks
            if table.usage is not None:
                num_allowed = table.usage.num_free_blocks - self._num_reserved_by_tenant[request.tenant]
            slots = manager.append_slots(table, num_tokens, min(num_available, num_allowed))
            if slots is not None:
                return slots
            # A shorter chunk is better than another request's work undone.
            num_fitting = manager.num_slots_within(table, min(num_available, num_allowed))
            if num_fitting > 0:
                num_tokens = num_fitting
            elif not self._preempt_behind(behind, request.tenant if num_allowed < num_available else None):
                return None

    def _preempt_behind(self, index: int, tenant: str | None) -> bool:
        """Preempt the least urgent running request from `index` on, of one tenant if it is given; say whether there was one."""
        live = self._live
        for request in reversed(live.running[index:]):
            if request.is_padding:
                live.running.remove(request)
                live.end(request)
                return True
            if not request.is_protected and tenant in (None, request.tenant):
                live.preempt(request, self._output)
                return True
        return False

    # ---- waiting requests that go before the running ones

    def _admit_urgent(self) -> None:
        """Let in requests that outrank a running one, or whose tenant is short of slots; running ones may have to make way.

        This comes before any running request is scheduled, so that no decision must be undone.
        """
        live = self._live
        if not self._goes_first(live.waiting.peek()):
            return
        num_held_tokens = len(live.running)  # every running request can still decode
        if self._shares is not None and live.fair_queue is not None and self._config.enable_chunked_prefill:
            wanted = self._shares.wanted_chunks(live.running, self._chunk)
            wanted |= dict.fromkeys(live.fair_queue.tenants, self._token_budget)
            self._portions = self._shares.divide(self._token_budget - num_held_tokens, wanted)
        self._num_owed_blocks = live.num_owed_blocks()
        self._token_budget -= num_held_tokens
        while (request := live.waiting.peek()) is not None and self._goes_first(request):
            if live.siblings.park_first():
                continue
            if self._has_just_left(request):
                break
            plan = self._plan(request)
            if plan is None:
                break
            if self._make_way(plan):
                self._admit(plan)
            elif not self._pass_over(plan):
                break
        self._token_budget += num_held_tokens
        self._portions = None

    def _goes_first(self, request: Request | None) -> bool:
        """Whether a waiting request is to be admitted before the running ones are scheduled."""
        if request is None or not self._live.running:
            return False
        return self._outranks_running(request) or self._is_short(request)

    def _outranks_running(self, request: Request) -> bool:
        return request.urgency[0] < self._live.running[-1].urgency[0]

    def _is_short(self, request: Request) -> bool:
        """Whether the request's tenant is short of slots while others run."""
        return self._shares is not None and self._shares.is_short(request, len(self._live.running))

    def _make_way(self, plan: AdmissionPlan) -> bool:
        """Preempt running requests that must make way until the plan fits, if that is enough; say whether it fits."""
        if self._fits(plan):
            return True
        victims = self._victims(plan)
        num_kept = self._num_running - len(victims)
        # At most: blocks that a victim shares with others do not become free.
        num_freed = sum(len(r.block_table.block_ids) + self._admission.num_owed_blocks(r) for r in victims if r.block_table)
        if num_kept >= self._config.max_num_seqs:
            return False
        if not self._admission.has_room(plan, num_kept, self._num_owed_blocks - num_freed):
            return False
        while victims and not self._fits(plan):
            # The least urgent; one of the same tenant, if it is the tenant's limits that stand in the way.
            own = [r for r in victims if r.tenant == plan.request.tenant]
            if not own and not self._fits_tenant(plan):
                break
            victim = victims[-1] if self._fits_tenant(plan) else own[-1]
            victims.remove(victim)
            self._num_owed_blocks -= self._admission.num_owed_blocks(victim)
            self._live.preempt(victim, self._output)
        return self._fits(plan)

    def _victims(self, plan: AdmissionPlan) -> list[Request]:
        """Running requests that may be preempted for the plan's, least urgent last."""
        request, running = plan.request, self._live.running
        lower = [r for r in running if r.urgency[0] > request.urgency[0] and not r.is_protected]
        if self._shares is None or not self._is_short(request):
            return lower
        num_blocks = self._admission.num_held_blocks(plan, self._shares.of(request).usage)
        chosen = {id(r) for r in lower + self._shares.displaceable(request, num_blocks, running)}
        return [r for r in running if id(r) in chosen]

    # ---- waiting requests

    def _admit_waiting(self) -> None:
        """Admit the most urgent request as long as there are tokens, slots and blocks. Nobody overtakes it."""
        live = self._live
        if self._batch is not None and live.running and not self._batch.is_open:
            return
        if live.waiting and self._token_budget and len(live.running) < self._limits.num_seqs:
            self._num_owed_blocks = live.num_owed_blocks() + sum(map(self._admission.num_owed_blocks, self._admitted))
            if live.block_manager.prefix_cache is not None and self._batch is None:
                self._pending = PendingPrefixes(live.block_manager)
                self._pending.add_scheduled(self._output.num_scheduled_tokens, live.all)
            while (request := live.waiting.peek()) is not None and self._admit_next(request):
                pass
            for request in self._deferred:
                live.waiting.push(request)
        if self._batch is not None:
            # It takes several steps to fill if its prompts exceed the token budget, or if siblings wait for a prompt.
            self._batch.is_open = self._token_budget == 0 or live.siblings.num_parked > 0

    def _admit_next(self, request: Request) -> bool:
        """Admit the queue's first request, or park it; False: it must wait, and all behind it."""
        if self._live.siblings.park_first():
            return True
        num_running = self._num_running
        if not self._token_budget or num_running >= self._limits.num_seqs or self._has_just_left(request):
            return False
        # It takes a block at least. To know more, its prefix must be looked up, which is not to happen in vain at every step.
        num_available = self._live.block_manager.num_free_blocks - self._num_owed_blocks
        if num_running and 1 + self._admission.headroom(request, num_running, 1) > num_available:
            return False
        plan = self._plan(request)
        if plan is None or not self._fits(plan):
            return plan is not None and self._pass_over(plan)
        if self._pending is not None and self._pending.num_shared_tokens(plan) >= self._min_shared_tokens:
            self._deferred.append(self._live.waiting.pop())
            return True
        self._admit(plan)
        return True

    # ---- what both kinds of admission need

    @property
    def _num_running(self) -> int:
        return len(self._live.running) + len(self._admitted)

    def _has_just_left(self, request: Request) -> bool:
        """Whether this step preempts the request; it cannot start in the same one, its blocks being on their way."""
        return request.request_id in self._output.preempted_req_ids or request.request_id in self._output.swapped_out_req_ids

    def _pass_over(self, plan: AdmissionPlan) -> bool:
        """Let other tenants' requests go before this one if it waits for its own tenant's; say whether that is so."""
        if self._live.fair_queue is None or self._fits_tenant(plan):
            return False
        self._live.fair_queue.pass_over(plan.request)
        return True

    def _plan(self, request: Request) -> AdmissionPlan | None:
        """How the request would start, or None if no tokens can be granted."""
        plan = self._admission.plan(request)
        num_remaining = request.num_tokens - plan.num_computed_tokens
        budget = self._token_budget
        if self._portions is not None and not self._outranks_running(request):
            budget = min(budget, self._portions[str(request.tenant)])
        plan.num_tokens = self._chunk(num_remaining, budget)
        may_run = plan.num_tokens == num_remaining or (self._config.enable_chunked_prefill and plan.num_tokens > 0)
        return plan if may_run else None

    def _chunk(self, num_tokens: int, budget: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        if threshold and self._config.enable_chunked_prefill:
            num_tokens = min(num_tokens, threshold)
        return max(0, min(num_tokens, budget))

    def _fits(self, plan: AdmissionPlan) -> bool:
        if self._num_running >= self._config.max_num_seqs or not self._fits_tenant(plan):
            return False
        return self._admission.has_room(plan, self._num_running, self._num_owed_blocks)

    def _fits_tenant(self, plan: AdmissionPlan) -> bool:
        return self._admission.fits_tenant(plan, [*self._live.running, *self._admitted])

    def _admit(self, plan: AdmissionPlan) -> None:
        request = plan.request
        self._live.waiting.remove(request)  # those that made way for it may stand before it now
        self._admission.start(plan, self._output)
        if self._shares is not None:
            self._shares.admitted(request)
            self._shares.charge(request, plan.num_tokens)
            if self._portions is not None:
                self._portions[str(request.tenant)] -= plan.num_tokens
        if self._pending is not None:
            self._pending.add(request, plan.num_tokens)
        self._token_budget -= plan.num_tokens
        self._num_owed_blocks += self._admission.num_owed_blocks(request)
        self._admitted.append(request)
