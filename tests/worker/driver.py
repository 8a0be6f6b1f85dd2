"""A scheduler for tests: it does by chance, and often, what the real one does when it must."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from pyengine.config import EngineArgs, EngineConfig, HardwareInfo
from pyengine.config_resolution import resolve, resolve_load
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import (
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SwappedInRequestData,
    TokenLogprobs,
)
from pyengine.worker.executor import UniprocExecutor

MACHINE = HardwareInfo(has_cuda=False, available_memory=2**32, num_cores=2)


def make_executor(model: Path, args: EngineArgs) -> tuple[UniprocExecutor, EngineConfig]:
    """A worker with weights and pools."""
    checkpoint = open_checkpoint(str(model))
    executor = UniprocExecutor(checkpoint, resolve_load(args, checkpoint.arch, MACHINE))
    executor.load_model()
    config = resolve(args, checkpoint.name, checkpoint.arch, MACHINE)
    executor.initialize_kv_cache(config)
    return executor, config


@dataclass
class Sequence:
    """One request and what became of it."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by the position of the token
    error: str | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    status: str = "waiting"  # waiting, running, swapped, done

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def wants_more(self) -> bool:
        assert self.params.max_tokens is not None
        return self.error is None and len(self.output) < self.params.max_tokens


@dataclass(frozen=True)
class Chances:
    """Of what happens to a sequence in a step."""

    idle: float = 0.0
    swap_out: float = 0.0
    swap_in: float = 1.0
    recompute: float = 0.0
    copy: float = 0.0
    whole_prompt: float = 1.0  # else a chunk of random length


class Driver:
    """Runs sequences to their end on an executor. Blocks are used again as soon as they are free, the last freed first."""

    def __init__(self, executor: UniprocExecutor, config: EngineConfig, chances: Chances | None = None, seed: int = 0) -> None:
        self.executor = executor
        self.block_size = config.cache.block_size
        self.free = list(range(1, config.cache.num_blocks + 1))
        self.free_host = list(range(config.cache.num_cpu_blocks))
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.chances = chances or Chances()
        self.random = random.Random(seed)
        self.finished: list[str] = []
        self.counts = dict.fromkeys(("swap_out", "swap_in", "recompute", "copy", "chunk", "steps"), 0)

    def run(self, sequences: list[Sequence]) -> list[Sequence]:
        """Step until every sequence is done."""
        live = list(sequences)
        while live:
            self.step(live)
            live = [sequence for sequence in live if sequence.status != "done"]
            self.counts["steps"] += 1
            assert self.counts["steps"] < 2000, "no progress"
        self.executor.execute_model(SchedulerOutput(finished_req_ids=self.finished))
        self.finished = []
        return sequences

    def step(self, live: list[Sequence]) -> None:
        out = SchedulerOutput(finished_req_ids=self.finished)
        self.finished = []
        for sequence in live:
            if sequence.status == "running":
                self._maybe_preempt(sequence, out)
        copied: list[int] = []
        for sequence in self.random.sample(live, len(live)):
            if sequence.status != "running" or not self._happens("idle"):
                self._schedule(sequence, out, copied)
        out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())
        result = self.executor.execute_model(out)
        self.free += copied
        by_id = {sequence.req_id: sequence for sequence in live}
        assert set(result.sampled_token_ids) | set(result.failed_req_ids) <= set(out.num_scheduled_tokens)
        for req_id, count in out.num_scheduled_tokens.items():
            self._take_result(by_id[req_id], count, result)

    def _happens(self, what: str) -> bool:
        return self.random.random() < getattr(self.chances, what)

    def _maybe_preempt(self, sequence: Sequence, out: SchedulerOutput) -> None:
        if self._happens("swap_out") and len(self.free_host) >= len(sequence.blocks):
            sequence.host_blocks = [self.free_host.pop() for _ in sequence.blocks]
            out.blocks_to_swap_out += zip(sequence.blocks, sequence.host_blocks, strict=True)
            out.swapped_out_req_ids.append(sequence.req_id)
            sequence.status = "swapped"
            self.counts["swap_out"] += 1
        elif self._happens("recompute"):
            out.preempted_req_ids.append(sequence.req_id)
            sequence.status, sequence.computed = "waiting", 0
            self.counts["recompute"] += 1
        else:
            return
        self.free += sequence.blocks
        sequence.blocks = []

    def _schedule(self, sequence: Sequence, out: SchedulerOutput, copied: list[int]) -> None:
        missing = sequence.num_tokens - sequence.computed
        count = missing
        if missing > 1 and not self._happens("whole_prompt"):
            count = self.random.randint(1, missing)
            self.counts["chunk"] += 1
        if len(out.num_scheduled_tokens) == self.max_num_seqs:
            return
        if sequence.status == "swapped":
            if not self._happens("swap_in") or len(self.free) < len(sequence.host_blocks) + 1:
                return
            sequence.blocks = [self.free.pop() for _ in sequence.host_blocks]
            # Host blocks of this step's swaps out cannot be swapped in before they are there: the order of effects says so.
            out.blocks_to_swap_in += zip(sequence.host_blocks, sequence.blocks, strict=True)
            self.free_host += sequence.host_blocks
            new = self._grow(sequence, count)
            out.scheduled_swapped_in_reqs.append(
                SwappedInRequestData(sequence.req_id, list(sequence.blocks), sequence.computed)
            )
            self.counts["swap_in"] += 1
        else:
            needed = -(-(sequence.computed + count) // self.block_size)
            if len(self.free) < needed - len(sequence.blocks) + 1:
                return
            replaced = self._maybe_copy(sequence, out, copied) if sequence.status == "running" else []
            new = self._grow(sequence, count)
            if sequence.status == "waiting":
                out.scheduled_new_reqs.append(self._new_data(sequence))
            else:
                cached = out.scheduled_cached_reqs
                cached.req_ids.append(sequence.req_id)
                cached.new_block_ids.append(new)
                cached.replaced_block_ids.append(replaced)
                cached.num_computed_tokens.append(sequence.computed)
        sequence.status = "running"
        out.num_scheduled_tokens[sequence.req_id] = count

    def _new_data(self, sequence: Sequence) -> NewRequestData:
        has_all = len(sequence.prompt_logprobs) == len(sequence.prompt) - 1
        return NewRequestData(
            req_id=sequence.req_id,
            prompt_token_ids=list(sequence.prompt),
            output_token_ids=list(sequence.output),
            sampling_params=sequence.params,
            seed=sequence.seed,
            block_ids=list(sequence.blocks),
            num_computed_tokens=sequence.computed,
            stop_token_ids=sequence.stop_token_ids,
            bad_words_token_ids=sequence.bad_words,
            num_prompt_logprobs=None if has_all else sequence.params.prompt_logprobs,
        )

    def _grow(self, sequence: Sequence, count: int) -> list[int]:
        new = []
        while len(sequence.blocks) * self.block_size < sequence.computed + count:
            new.append(self.free.pop())
            sequence.blocks.append(new[-1])
        return new

    def _maybe_copy(self, sequence: Sequence, out: SchedulerOutput, copied: list[int]) -> list[tuple[int, int]]:
        """Move a block that is in use to another one, as copy-on-write does."""
        used = -(-sequence.computed // self.block_size)
        if used == 0 or len(self.free) < 3 or not self._happens("copy"):
            return []
        index = self.random.randrange(used)
        source, target = sequence.blocks[index], self.free.pop(0)
        out.blocks_to_copy.append((source, target))
        sequence.blocks[index] = target
        copied.append(source)
        self.counts["copy"] += 1
        return [(index, target)]

    def _take_result(self, sequence: Sequence, count: int, result: ModelRunnerOutput) -> None:
        req_id = sequence.req_id
        samples = sequence.computed + count == sequence.num_tokens
        for i, entry in enumerate(result.prompt_logprobs.get(req_id, [])):
            sequence.prompt_logprobs[sequence.computed + 1 + i] = entry
        sequence.computed += count
        if req_id in result.failed_req_ids:
            sequence.error = result.failed_req_ids[req_id]
            assert req_id not in result.sampled_token_ids
        else:
            assert (req_id in result.sampled_token_ids) == samples
            if samples:
                sequence.output += result.sampled_token_ids[req_id]
                sequence.logprobs += result.logprobs.get(req_id, [])
        if not sequence.wants_more:
            sequence.status = "done"
            self.finished.append(req_id)
            self.free += sequence.blocks
            sequence.blocks = []
