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

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from pyengine.config import CacheConfig, SchedulerConfig
from pyengine.engine.live_requests import LiveRequests
from pyengine.engine.pace import StepLimits
from pyengine.engine.pending_prefixes import MIN_SHARED_TOKENS
from pyengine.engine.prefix_cache import HashFunction, hash_block
from pyengine.engine.request import Request, RequestStatus
from pyengine.engine.scheduler_stats import SchedulerStats
from pyengine.engine.static_batch import StaticBatch
from pyengine.engine.step_builder import StepBuilder
from pyengine.outputs import FinishReason
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput, SequenceOutput


class Scheduler:
    """Owns the requests and their blocks. Not thread-safe: the step thread alone calls it."""

    def __init__(
        self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, *, hash_function: HashFunction = hash_block
    ) -> None:
        self.config = scheduler_config
        self.live = LiveRequests(scheduler_config, cache_config, hash_function)
        self.block_manager = self.live.block_manager
        self._batch = StaticBatch(self.live, scheduler_config.max_model_len) if scheduler_config.static_batching else None
        self._to_preempt: set[str] = set()
        self.min_shared_tokens = MIN_SHARED_TOKENS
        self._utilisation_sum = 0.0

    # ---- requests in and out

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: see `LiveRequests.add`.
        """
        self.live.add(request)

    def finish_requests(self, request_ids: Iterable[str], finish_reason: FinishReason) -> list[str]:
        """End requests, in whatever state they are; their blocks are free on return. Ids that are unknown or ended are skipped.

        Returns:
            The ids that this call ended.
        """
        ended = []
        for request_id in request_ids:
            request = self.live.all.get(request_id)
            if request is None or request.is_padding:
                continue
            if request.status is RequestStatus.RUNNING:
                self.live.running.remove(request)
            request.finish_reason = finish_reason
            self.live.end(request)
            ended.append(request_id)
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.live.all)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Live requests go on; what they compute is not cached until they are admitted anew."""
        if self.block_manager.prefix_cache is None:
            return
        self.block_manager.prefix_cache.reset()
        for request in self.live.all.values():
            if request.block_table is not None:
                self.block_manager.stop_caching(request.block_table)

    def preempt_requests(self, request_ids: Iterable[str]) -> None:
        """Preempt running requests at the start of the next step, except those that are protected then.

        Nothing here calls it: tests do, to have a certain request preempted at a moment of their choice, which scarce memory
        alone, with its rules of who makes way, rarely or never brings about.
        """
        self._to_preempt.update(request_ids)

    def stats(self) -> SchedulerStats:
        """A snapshot of counters and gauges."""
        live, stats, manager = self.live, self.live.stats, self.block_manager
        return replace(
            stats,
            num_running=len(live.running),
            num_waiting=len(live.all) - len(live.running) - stats.num_swapped,
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
                setattr(self.live.stats, counter.name, counter.default)
        self._utilisation_sum = 0.0
        self.block_manager.pool.num_allocations = 0
        if self.live.shares is not None:
            self.live.shares.reset_counters()

    def tenant_stats(self) -> dict[str, dict[str, Any]]:
        """Counters and gauges by tenant; empty without tenants."""
        return {} if self.live.shares is None else self.live.shares.stats(self.live.running)

    # ---- a step

    @property
    def num_streams(self) -> int:
        """Running requests that are due one token."""
        return sum(request.num_tokens - request.num_computed_tokens == 1 for request in self.live.running)

    def schedule(self, limits: StepLimits | None = None) -> SchedulerOutput:
        """Decide one step: running requests first, then those that wait, most urgent first.

        An output without tokens still carries what the worker must forget.

        Args:
            limits: of this step, within the configuration's; None: those.
        """
        if limits is None:
            limits = StepLimits(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self.block_manager.swap_space.start_step()
        step = StepBuilder(self.live, self.config, limits, self.min_shared_tokens, self._batch)
        output = step.build(self._to_preempt)
        self._to_preempt.clear()
        if output.total_num_scheduled_tokens:
            self.live.stats.num_steps += 1
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
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.live.all.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            if self._batch is not None and request.is_padding:
                self._batch.advance_padding(request, num_tokens, model_runner_output.sampled_token_ids.get(request_id))
                continue
            output = self._take_in(request, num_tokens, model_runner_output)
            if output is None:
                continue
            outputs.append(output)
            if request.finish_reason is None:
                continue
            if self._batch is not None and request.finish_reason != "error":
                request.is_padding = True
            else:
                self.live.end(request)
        if self._batch is not None:
            self._batch.finish_step()
        if any(output.finish_reason is not None for output in outputs):
            self.live.drop_ended()
        return outputs

    def _take_in(self, request: Request, num_tokens: int, result: ModelRunnerOutput) -> SequenceOutput | None:
        """Take in what the step computed of one request; None: nothing that anybody must be told."""
        request_id = request.request_id
        if request_id in result.failed_req_ids:
            request.finish_reason = "error"
            return SequenceOutput(request_id, [], finish_reason="error", error=result.failed_req_ids[request_id])
        first_position = request.num_computed_tokens
        new_token_ids = self.live.advance(request, num_tokens, result.sampled_token_ids.get(request_id))
        if self.live.shares is not None:
            self.live.shares.of(request).num_generated_tokens += len(new_token_ids)
        prompt_logprobs = None
        if not request.may_match_prefix:
            prompt_logprobs = request.take_prompt_logprobs(first_position, result.prompt_logprobs.get(request_id, []))
        if not new_token_ids and prompt_logprobs is None:
            return None
        logprobs = result.logprobs.get(request_id)
        return SequenceOutput(
            request_id,
            new_token_ids,
            logprobs=logprobs[: len(new_token_ids)] if logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
        )
