"""Letting a waiting request run: whether it ever can, whether there is room now, and where its first blocks come from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pyengine.engine.block_manager import BlockManager, SharedPrefix
from pyengine.engine.block_usage import BlockUsage
from pyengine.engine.request import Request, RequestStatus
from pyengine.engine.scheduler_stats import SchedulerStats
from pyengine.engine.siblings import Siblings
from pyengine.engine.tenant_shares import TenantShares
from pyengine.errors import InvalidRequestError
from pyengine.scheduler_output import NewRequestData, SchedulerOutput, SwappedInRequestData


@dataclass(slots=True)
class AdmissionPlan:
    """How a waiting request would start. Good until blocks are allocated or freed for something else."""

    request: Request
    prefix: SharedPrefix | None  # None: it is swapped in
    source: Request | None  # the sibling that the prefix is a fork of; None: the prefix cache
    num_computed_tokens: int  # that it starts with
    num_tokens: int = 0  # to compute in this step; the scheduler grants them


class Admission:
    """Plans and starts waiting requests; which one, and when, is the scheduler's choice."""

    def __init__(
        self, block_manager: BlockManager, siblings: Siblings, stats: SchedulerStats, shares: TenantShares | None
    ) -> None:
        self._shares = shares
        self._block_manager = block_manager
        self._siblings = siblings
        self._stats = stats

    def fit_length(self, request: Request, max_model_len: int) -> None:
        """Refuse a request that could never finish, and set the length at which this one ends.

        Raises:
            InvalidRequestError: if the model, the whole pool or the tenant's quota holds fewer tokens than the request may
                need. Says both numbers.
        """
        num_prompt, max_tokens = request.num_prompt_tokens, request.sampling_params.max_tokens
        if num_prompt == 0:
            raise InvalidRequestError("prompt", "must not be empty")
        pool = self._block_manager.pool
        limits = [(max_model_len, "max_model_len is"), (pool.num_blocks * pool.block_size, "the KV pool holds")]
        if self._shares is not None:
            quota = self._shares.of(request).usage.quota
            limits.append((quota * pool.block_size, f"the KV quota of tenant {request.tenant} holds"))
        limit, name = min(limits, key=lambda entry: entry[0])
        if num_prompt + 1 > limit:
            raise InvalidRequestError("prompt", f"has {num_prompt} tokens, and {name} {limit}, which must hold one more")
        if max_tokens is None:
            request.max_total_tokens = min(request.max_total_tokens, limit)
            return
        total = num_prompt + max_tokens
        if total > limit:
            message = f"{num_prompt} prompt tokens and max_tokens={max_tokens} make {total}, and {name} {limit}"
            raise InvalidRequestError("max_tokens", message)
        request.max_total_tokens = min(request.max_total_tokens, total)

    def plan(self, request: Request) -> AdmissionPlan:
        """The way to start that leaves least to compute: the CPU pool, a fork of a sibling, or the prefix cache."""
        manager = self._block_manager
        if request.status is RequestStatus.SWAPPED:
            return AdmissionPlan(request, None, None, request.num_computed_tokens)
        if not request.may_match_prefix:
            return AdmissionPlan(request, SharedPrefix([], 0, None), None, 0)
        prefix = manager.match_prefix(request.cache_salt, request.token_ids, request.num_tokens)
        source = self._siblings.source(request)
        if source is None or prefix.num_tokens >= request.num_prompt_tokens - 1:
            return AdmissionPlan(request, prefix, None, prefix.num_tokens)
        assert source.block_table is not None
        fork = manager.fork_prefix(source.block_table, request.num_prompt_tokens - 1)
        return AdmissionPlan(request, fork, source, fork.num_tokens)

    def headroom(self, request: Request, num_running: int, num_steps: int) -> int:
        """Free blocks to leave for the running requests to grow into, so that the new one is not soon in their way.

        A block for every second one. (Simulated on mixed lengths with a pool that holds a fifth of them, this lost least:
        without it a tenth of all computing was repeated, and a whole block each kept the batch smaller.) A request that was
        preempted before has more to lose, and is not preempted again at once: a block for every one, and what they all fill
        while it catches up.

        Args:
            num_steps: steps that the request takes to catch up.
        """
        if not request.num_preemptions:
            return (num_running + 1) // 2
        return num_running * (1 + num_steps // self._block_manager.block_size)

    def has_room(self, plan: AdmissionPlan, num_running: int, num_owed_blocks: int) -> bool:
        """Whether the request may start now, with all tokens it has.

        Args:
            num_running: running requests; 0: every block is free, so there is room.
            num_owed_blocks: blocks that they still lack for the tokens they have.
        """
        if num_running == 0:
            return True
        headroom = self.headroom(plan.request, num_running, _num_steps(plan))
        return self.num_blocks(plan) + headroom <= self._block_manager.num_free_blocks - num_owed_blocks

    def has_quota(self, plan: AdmissionPlan, usage: BlockUsage, num_running: int, num_owed_blocks: int) -> bool:
        """As `has_room`, within what the request's tenant may hold; the running and owed are its own."""
        if num_running == 0:
            return True
        headroom = self.headroom(plan.request, num_running, _num_steps(plan))
        return self.num_held_blocks(plan, usage) + headroom <= usage.num_free_blocks - num_owed_blocks

    def fits_tenant(self, plan: AdmissionPlan, running: Sequence[Request]) -> bool:
        """Whether the limits of the request's tenant let it run beside those that run."""
        request = plan.request
        if self._shares is None:
            return True
        if not self._shares.has_free_slot(request):
            return False
        share = self._shares.of(request)
        if not share.tenant.is_rationed:
            return True
        own = [r for r in running if r.tenant == request.tenant]
        return self.has_quota(plan, share.usage, len(own), sum(map(self.num_owed_blocks, own)))

    def num_owed_blocks(self, request: Request) -> int:
        """Blocks that a running request lacks for the tokens it has."""
        assert request.block_table is not None
        return self._block_manager.num_blocks_for(request.num_tokens) - len(request.block_table.block_ids)

    def num_blocks(self, plan: AdmissionPlan) -> int:
        """Free blocks that the request takes for all tokens that it has; at least 1."""
        request, manager = plan.request, self._block_manager
        if plan.prefix is not None:
            return manager.num_new_blocks(plan.prefix, request.num_tokens)
        assert request.block_table is not None
        return manager.num_swap_in_blocks(request.block_table, request.num_tokens)

    def num_held_blocks(self, plan: AdmissionPlan, usage: BlockUsage) -> int:
        """Blocks by which the request, with all tokens that it has, raises what its tenant holds; at least 1."""
        request, manager = plan.request, self._block_manager
        if plan.prefix is not None:
            return manager.num_new_held_blocks(usage, plan.prefix, request.num_tokens)
        assert request.block_table is not None
        return manager.num_swap_in_held_blocks(usage, request.block_table, request.num_tokens)

    def start(self, plan: AdmissionPlan, output: SchedulerOutput) -> None:
        """Give the request blocks for its first tokens, and write it into the step."""
        request = plan.request
        if plan.prefix is None:
            self._swap_in(request, output)
        else:
            self._open_table(plan, plan.prefix)
        self._grow(request, plan.num_tokens, output)
        if request.status is RequestStatus.SWAPPED:
            self._tell_swapped_in(request, output)
        else:
            self._tell_new(request, output)
        output.num_scheduled_tokens[request.request_id] = plan.num_tokens
        request.is_protected = request.num_preemptions > 0
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()

    def _open_table(self, plan: AdmissionPlan, prefix: SharedPrefix) -> None:
        request, stats = plan.request, self._stats
        if request.first_scheduled_time is None:
            request.num_cached_tokens = prefix.num_tokens if plan.source is None else plan.source.num_cached_tokens
            if plan.source is None and request.may_match_prefix and self._block_manager.prefix_cache is not None:
                stats.prefix_cache_queries += request.num_tokens
                stats.prefix_cache_hits += prefix.num_tokens
        if plan.source is None:
            stats.num_cached_tokens += prefix.num_tokens
        usage = None if self._shares is None else self._shares.of(request).usage
        request.block_table = self._block_manager.open_table(prefix, request.cache_salt, usage)
        request.num_computed_tokens = prefix.num_tokens
        self._siblings.started(request)

    def _swap_in(self, request: Request, output: SchedulerOutput) -> None:
        assert request.block_table is not None
        copies = self._block_manager.swap_in(request.block_table)
        output.blocks_to_swap_in += copies
        self._stats.num_blocks_swapped_in += len(copies)
        self._stats.num_swapped -= 1
        self._siblings.started(request)

    def _grow(self, request: Request, num_tokens: int, output: SchedulerOutput) -> None:
        assert request.block_table is not None
        slots = self._block_manager.append_slots(request.block_table, num_tokens, self._block_manager.num_free_blocks)
        if slots is None:
            raise RuntimeError(f"no blocks for {request!r}, which was admitted: has_room and append_slots disagree")
        if slots.copied is not None:
            _, source, destination = slots.copied
            output.blocks_to_copy.append((source, destination))

    def _tell_swapped_in(self, request: Request, output: SchedulerOutput) -> None:
        assert request.block_table is not None
        output.scheduled_swapped_in_reqs.append(
            SwappedInRequestData(
                req_id=request.request_id,
                block_ids=list(request.block_table.block_ids),
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    def _tell_new(self, request: Request, output: SchedulerOutput) -> None:
        assert request.block_table is not None
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=list(request.output_token_ids),
                sampling_params=request.sampling_params,
                seed=request.seed,
                block_ids=list(request.block_table.block_ids),
                num_computed_tokens=request.num_computed_tokens,
                stop_token_ids=request.stop_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                num_prompt_logprobs=None if request.may_match_prefix else request.sampling_params.prompt_logprobs,
            )
        )


def _num_steps(plan: AdmissionPlan) -> int:
    """Steps that the request takes to catch up, at this one's pace."""
    return -(-(plan.request.num_tokens - plan.num_computed_tokens) // plan.num_tokens)
