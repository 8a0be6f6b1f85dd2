"""A worker without a model, that knows exactly what every KV slot must hold.

The KV of a token depends on all tokens before it, so a slot's content is modelled as a hash of the sequence up to its token
(and of the sequence's cache salt, across which nothing may be shared). Before a token is computed, every earlier slot of its
sequence must hold that sequence's own hashes. A block that was shared, matched, copied or swapped wrongly shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs


def extend_hash(prefix_hash: int, token_id: int) -> int:
    """The content of the slot of `token_id` after a prefix."""
    return hash((prefix_hash, token_id))


def sample(prefix_hash: int, seed: int, vocab_size: int) -> int:
    """The token that follows a prefix: any function of what was computed."""
    return hash((prefix_hash, seed, "sample")) % vocab_size


def expected_output(
    prompt: list[int], num_tokens: int, *, salt: str | None = None, seed: int = 0, vocab_size: int
) -> list[int]:
    """What a sequence generates when it runs alone."""
    prefix_hash = hash(salt)
    for token_id in prompt:
        prefix_hash = extend_hash(prefix_hash, token_id)
    output = []
    for _ in range(num_tokens):
        output.append(sample(prefix_hash, seed, vocab_size))
        prefix_hash = extend_hash(prefix_hash, output[-1])
    return output


@dataclass
class WorkerSequence:
    """What a worker keeps of a sequence."""

    salt: str | None
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    wants_prompt_logprobs: bool
    num_computed_tokens: int
    block_ids: list[int] | None  # None while it is swapped out

    def __post_init__(self) -> None:
        self._hashes = [hash(self.salt)]

    def hash_of(self, num_tokens: int) -> int:
        """Hash of the first `num_tokens` tokens."""
        while len(self._hashes) <= num_tokens:
            self._hashes.append(extend_hash(self._hashes[-1], self.token_ids[len(self._hashes) - 1]))
        return self._hashes[num_tokens]


class DummyWorker:
    """Runs `SchedulerOutput`s as documented, and asserts everything that it may rely on."""

    def __init__(
        self, num_blocks: int, num_cpu_blocks: int, block_size: int, *, max_num_seqs: int, vocab_size: int = 1000
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = [[0] * block_size for _ in range(num_blocks + 1)]  # [block][offset] -> content; block 0 is the null block
        self.cpu = [[0] * block_size for _ in range(num_cpu_blocks)]
        self.sequences: dict[str, WorkerSequence] = {}
        self.salts: dict[str, str | None] = {}  # by request id; set by the test that adds the request
        self.fail: dict[str, str] = {}  # requests to fail in the next step in which they run
        self.tokens_per_step = 1
        self.num_computed_tokens = 0  # total over all steps

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """One step."""
        self._drop(step)
        self._move_blocks(step)
        self._take_in(step)
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        output = ModelRunnerOutput()
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            if req_id in self.fail:
                output.failed_req_ids[req_id] = self.fail.pop(req_id)
            else:
                self._read_and_write(req_id, num_tokens)
        # Writes come before any later step's reads, and no step may overwrite what another of its own sequences reads.
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            if req_id not in output.failed_req_ids:
                self._check(req_id, self.sequences[req_id].num_computed_tokens + num_tokens)
                self._sample(req_id, num_tokens, output)
        return output

    def _drop(self, step: SchedulerOutput) -> None:
        for req_id in [*step.finished_req_ids, *step.preempted_req_ids]:
            assert req_id in self.sequences, f"{req_id} dropped, but unknown"
            del self.sequences[req_id]
        for req_id in step.swapped_out_req_ids:
            sequence = self.sequences[req_id]
            assert sequence.block_ids is not None
            sequence.block_ids = None
        left = [*step.finished_req_ids, *step.preempted_req_ids, *step.swapped_out_req_ids]
        assert len(set(left)) == len(left)

    def _move_blocks(self, step: SchedulerOutput) -> None:
        # Each list may be carried out in any order, in parallel.
        for pairs in (step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy):
            destinations = [destination for _, destination in pairs]
            assert len(set(destinations)) == len(destinations)
        assert not {source for source, _ in step.blocks_to_copy} & {dst for _, dst in step.blocks_to_copy}
        # A CPU block is not filled again in the step that empties it, nor read in the step that fills it.
        assert not {cpu for _, cpu in step.blocks_to_swap_out} & {cpu for cpu, _ in step.blocks_to_swap_in}
        for device, cpu in step.blocks_to_swap_out:
            self.cpu[cpu] = list(self.device[device])
        for cpu, device in step.blocks_to_swap_in:
            self.device[device] = list(self.cpu[cpu])
        for source, destination in step.blocks_to_copy:
            self.device[destination] = list(self.device[source])

    def _take_in(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.sequences, f"{new.req_id} is known already"
            self.sequences[new.req_id] = WorkerSequence(
                salt=self.salts.get(new.req_id),
                seed=new.seed,
                token_ids=new.prompt_token_ids + new.output_token_ids,
                num_prompt_tokens=len(new.prompt_token_ids),
                wants_prompt_logprobs=new.num_prompt_logprobs is not None,
                num_computed_tokens=new.num_computed_tokens,
                block_ids=list(new.block_ids),
            )
        for back in step.scheduled_swapped_in_reqs:
            sequence = self.sequences[back.req_id]
            assert sequence.block_ids is None
            assert sequence.num_computed_tokens == back.num_computed_tokens
            sequence.block_ids = list(back.block_ids)
        num_rows = sum(sequence.block_ids is not None for sequence in self.sequences.values())
        assert num_rows <= self.max_num_seqs, f"{num_rows} sequences, and {self.max_num_seqs} rows"
        cached = step.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.replaced_block_ids, cached.num_computed_tokens, strict=True)
        for req_id, new_block_ids, replaced, num_computed_tokens in rows:
            sequence = self.sequences[req_id]
            assert sequence.block_ids is not None
            assert sequence.num_computed_tokens == num_computed_tokens
            for index, block_id in replaced:
                sequence.block_ids[index] = block_id
            sequence.block_ids += new_block_ids
        scheduled = [new.req_id for new in step.scheduled_new_reqs] + [back.req_id for back in step.scheduled_swapped_in_reqs]
        assert sorted(scheduled + cached.req_ids) == sorted(step.num_scheduled_tokens)

    def _read_and_write(self, req_id: str, num_tokens: int) -> None:
        sequence = self.sequences[req_id]
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        assert num_tokens > 0
        assert end <= len(sequence.token_ids)
        assert sequence.block_ids is not None
        assert len(sequence.block_ids) == -(-end // self.block_size), "blocks for the tokens of this step, and no more"
        assert 0 not in sequence.block_ids
        self._check(req_id, start)
        for position in range(start, end):
            block_id, offset = sequence.block_ids[position // self.block_size], position % self.block_size
            self.device[block_id][offset] = sequence.hash_of(position + 1)
        self.num_computed_tokens += num_tokens

    def _check(self, req_id: str, num_tokens: int) -> None:
        """Every slot of the first tokens holds what this sequence would have written there."""
        sequence = self.sequences[req_id]
        assert sequence.block_ids is not None
        for position in range(num_tokens):
            block_id, offset = sequence.block_ids[position // self.block_size], position % self.block_size
            assert self.device[block_id][offset] == sequence.hash_of(position + 1), (
                f"{req_id}: block {block_id}, slot {offset} does not hold token {position}"
            )

    def _sample(self, req_id: str, num_tokens: int, output: ModelRunnerOutput) -> None:
        sequence = self.sequences[req_id]
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        sequence.num_computed_tokens = end
        if sequence.wants_prompt_logprobs and start + 1 < sequence.num_prompt_tokens:
            positions = range(start + 1, min(end + 1, sequence.num_prompt_tokens))
            output.prompt_logprobs[req_id] = [TokenLogprobs([sequence.token_ids[p]], [-float(p)], [1]) for p in positions]
        if end < len(sequence.token_ids):
            return
        sampled = []
        for _ in range(self.tokens_per_step):
            sampled.append(sample(sequence.hash_of(len(sequence.token_ids)), sequence.seed, self.vocab_size))
            sequence.token_ids.append(sampled[-1])
        output.sampled_token_ids[req_id] = sampled
        output.logprobs[req_id] = [TokenLogprobs([token_id], [-1.0], [1]) for token_id in sampled]
