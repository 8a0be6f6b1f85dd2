"""Runs one step of the model, as a `SchedulerOutput` orders it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyengine.config import EngineConfig
from pyengine.errors import InvalidRequestError
from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.models.interfaces import CausalLM
from pyengine.sampling.logprobs import token_logprobs
from pyengine.sampling.row import Row, RowError
from pyengine.sampling.sampler import Sampler, SamplingState
from pyengine.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput, SwappedInRequestData
from pyengine.worker.backend import Backend, KVPool
from pyengine.worker.graph_runner import GraphStepRunner
from pyengine.worker.input_batch import InputBatch, IntArray, RequestInputError, StepInputs
from pyengine.worker.step_replay import (
    ReplayedStepRunner,
    StepLogits,
    StepRunner,
    create_step_runner,
    without_torch_threads,
)

# Prompt log-probabilities need logits for every prompt token; this many rows at a time keep them small.
_PROMPT_LOGITS_ROWS = 64


@dataclass(slots=True)
class RequestState:
    """What the worker keeps of a sequence besides its row in the batch."""

    sampling: SamplingState
    num_prompt_tokens: int
    num_prompt_logprobs: int | None
    swapped_token_ids: IntArray | None = None  # while swapped out: its tokens, for it has no row then


class ModelRunner:
    """Owns the batch and runs the model over it.

    Args:
        model: with its weights.
        backend: the device.
        config: resolved.
        pool: KV blocks on the device, the null block included.
        host_pool: blocks of swapped sequences; None without swap space.
    """

    def __init__(self, model: CausalLM, backend: Backend, config: EngineConfig, pool: KVPool, host_pool: KVPool | None) -> None:
        arch = self._arch = config.model.arch
        self._backend = backend
        self._pool = pool
        self._host_pool = host_pool
        max_num_seqs, max_num_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        self._step: StepRunner = create_step_runner(
            model,
            [pool.layer(i) for i in range(arch.num_layers)],
            replay=backend.name == "cpu" and not config.device.enforce_eager,
            max_num_tokens=max_num_tokens,
            max_num_rows=max_num_seqs,
        )
        recorder = None if config.device.enforce_eager else backend.graph_recorder()
        if recorder is not None:
            self._step = GraphStepRunner(self._step, recorder, config, backend.device)
        self._sampler = Sampler(arch.vocab_size)
        self._requests: dict[str, RequestState] = {}
        self._batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=config.model.max_model_len,
            max_num_batched_tokens=max_num_tokens,
            block_size=config.cache.block_size,
            vocab_size=arch.vocab_size,
            device=backend.device,
        )

    @property
    def num_requests(self) -> int:
        """Sequences that the worker knows, running and swapped out."""
        return len(self._requests)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. A sequence that cannot be run or sampled is in `failed_req_ids`; any exception means a broken step."""
        output = ModelRunnerOutput()
        self._drop(scheduler_output)
        self._move_blocks(scheduler_output)
        self._take_up(scheduler_output, output)
        scheduled = scheduler_output.num_scheduled_tokens
        if output.failed_req_ids:
            scheduled = {req_id: n for req_id, n in scheduled.items() if req_id not in output.failed_req_ids}
        if not scheduled:
            return output
        inputs = self._batch.prepare(scheduled)
        step = self._step
        scored = self._scored_prompts(inputs)
        if isinstance(step, ReplayedStepRunner) and not scored and step.covers(inputs):
            self._sample(inputs, step.run(inputs), output)
        else:
            self._run_by_parts(inputs, scored, output)
        return output

    def _scored_prompts(self, inputs: StepInputs) -> dict[int, int]:
        """By the place of their sequence: how many of the step's tokens precede a prompt token whose probability is asked."""
        scored = {}
        for i, req_id in enumerate(inputs.req_ids):
            state = self._requests[req_id]
            if state.num_prompt_logprobs is not None:
                # The hidden state of position p predicts token p + 1; the last prompt token predicts the first output.
                left = state.num_prompt_tokens - 1 - int(inputs.num_computed_tokens[i])
                if left > 0:
                    scored[i] = min(int(inputs.query_lens[i]), left)
        return scored

    @without_torch_threads
    def _run_by_parts(self, inputs: StepInputs, scored: dict[int, int], output: ModelRunnerOutput) -> None:
        """Run the layers, then what is asked of the prompt tokens, then the logits of the last tokens."""
        row_lens = inputs.samples.astype(np.int64)  # [num_seqs], of each sequence's last tokens
        for i in scored:
            row_lens[i] = inputs.query_lens[i]
        seq_lens = inputs.num_computed_tokens + inputs.query_lens
        rows = inputs.logits_rows(row_lens)
        self._plan_attention(inputs.metadata, inputs.query_lens, seq_lens)
        if rows is not None:
            self._plan_attention(rows.metadata, row_lens[row_lens > 0], seq_lens[row_lens > 0])
        hidden = self._step.forward(inputs.input_ids, inputs.positions, inputs.metadata, rows)  # [num_rows, hidden_size]
        ends = row_lens.cumsum()
        self._prompt_logprobs(inputs, scored, hidden, ends - row_lens, output)
        if inputs.num_samples:
            if inputs.num_samples != len(hidden):
                hidden = hidden.index_select(0, torch.from_numpy(ends[inputs.samples] - 1).to(hidden.device))
            self._sample(inputs, StepLogits(self._step.compute_logits(hidden)), output)

    def _plan_attention(self, metadata: AttentionMetadata, query_lens: IntArray, seq_lens: IntArray) -> None:
        arch = self._arch
        self._backend.plan_attention(
            metadata,
            query_lens.tolist(),
            seq_lens.tolist(),
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
        )

    def _drop(self, scheduler_output: SchedulerOutput) -> None:
        """Forget sequences that ended or lost their KV; park those that were swapped out."""
        for req_ids in (scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids):
            for req_id in req_ids:
                # One that was aborted before its first step, or failed on it, is not known here.
                self._requests.pop(req_id, None)
                if req_id in self._batch:
                    self._batch.remove(req_id)
        for req_id in scheduler_output.swapped_out_req_ids:
            self._requests[req_id].swapped_token_ids = self._batch.remove(req_id)

    def _move_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Swap out, swap in, copy: each sees the one before it done, and the forward pass sees all."""
        swaps_out, swaps_in = scheduler_output.blocks_to_swap_out, scheduler_output.blocks_to_swap_in
        if swaps_out or swaps_in:
            if self._host_pool is None:
                raise RuntimeError("blocks to swap, but there is no swap space")
            compute, copies = self._backend.compute_stream(), self._backend.copy_stream()
            # The last step may still write blocks that leave, or read those that are overwritten.
            copies.wait_event(compute.record_event())
            if swaps_out:
                event = self._backend.swap_blocks(self._pool, self._host_pool, swaps_out)
            if swaps_in:  # on the same stream, and so after the swaps out, whose blocks it may take
                event = self._backend.swap_blocks(self._host_pool, self._pool, swaps_in)
            compute.wait_event(event)
        if scheduler_output.blocks_to_copy:
            self._backend.copy_blocks(self._pool, scheduler_output.blocks_to_copy)

    def _take_up(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Bring the batch up to date with the scheduler."""
        for new in scheduler_output.scheduled_new_reqs:
            try:
                self._add(new)
            except (RequestInputError, InvalidRequestError) as error:
                output.failed_req_ids[new.req_id] = str(error)
        for back in scheduler_output.scheduled_swapped_in_reqs:
            self._bring_back(back)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.req_ids:
            self._batch.update(cached.req_ids, cached.new_block_ids, cached.replaced_block_ids, cached.num_computed_tokens)

    def _add(self, new: NewRequestData) -> None:
        token_ids = self._batch.check_tokens([*new.prompt_token_ids, *new.output_token_ids])
        state = SamplingState(
            new.sampling_params,
            seed=new.seed,
            prompt_token_ids=new.prompt_token_ids,
            output_token_ids=new.output_token_ids,
            stop_token_ids=new.stop_token_ids,
            bad_words_token_ids=new.bad_words_token_ids,
            vocab_size=self._arch.vocab_size,
        )
        self._batch.add(new.req_id, token_ids, new.block_ids, new.num_computed_tokens)
        self._requests[new.req_id] = RequestState(state, len(new.prompt_token_ids), new.num_prompt_logprobs)

    def _bring_back(self, back: SwappedInRequestData) -> None:
        state = self._requests[back.req_id]
        if state.swapped_token_ids is None:
            raise RuntimeError(f"sequence {back.req_id} is swapped in, but was not swapped out")
        self._batch.add(back.req_id, state.swapped_token_ids, back.block_ids, back.num_computed_tokens)
        state.swapped_token_ids = None

    def _sample(self, inputs: StepInputs, step: StepLogits, output: ModelRunnerOutput) -> None:
        """Sample the sequences that reached their last token; `step.logits` has a row for each."""
        if not inputs.num_samples:
            return
        req_ids = inputs.req_ids
        if inputs.num_samples != len(req_ids):
            req_ids = [req_id for req_id, samples in zip(req_ids, inputs.samples.tolist(), strict=True) if samples]
        states = [self._requests[req_id].sampling for req_id in req_ids]
        result = self._sampler.sample(step.logits, states, step.best)
        self._batch.append_sampled(result.token_ids)
        for i, req_id in enumerate(req_ids):
            if i in result.errors:
                output.failed_req_ids.setdefault(req_id, result.errors[i])
            elif req_id not in output.failed_req_ids:
                output.sampled_token_ids[req_id] = [result.token_ids[i]]
                logprobs = result.logprobs[i]
                if logprobs is not None:
                    output.logprobs[req_id] = [logprobs]

    def _prompt_logprobs(
        self, inputs: StepInputs, scored: dict[int, int], hidden: Tensor, starts: IntArray, output: ModelRunnerOutput
    ) -> None:
        """Log-probabilities of the prompt tokens that follow the tokens of this step; starts[i]: sequence i's first row."""
        for i, count in scored.items():
            req_id = inputs.req_ids[i]
            num_logprobs = self._requests[req_id].num_prompt_logprobs
            assert num_logprobs is not None
            computed, start = int(inputs.num_computed_tokens[i]), int(starts[i])
            targets = self._batch.token_ids(int(inputs.rows[i]))[computed + 1 : computed + 1 + count].tolist()
            try:
                entries = [
                    token_logprobs(row, target, num_logprobs)
                    for row, target in zip(self._logits_rows(hidden[start : start + count]), targets, strict=True)
                ]
            except RowError as error:
                output.failed_req_ids[req_id] = str(error)
            else:
                output.prompt_logprobs[req_id] = entries

    def _logits_rows(self, hidden: Tensor) -> Iterator[Row]:
        """Rows of logits, a few at a time; `hidden` is [num_rows, hidden_size]."""
        for part in hidden.split(_PROMPT_LOGITS_ROWS):
            yield from self._step.compute_logits(part).cpu().numpy()
