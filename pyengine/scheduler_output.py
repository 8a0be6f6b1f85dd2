"""What the scheduler tells a worker, and what the worker answers. The only thing that passes between them.

The scheduler owns requests and block ids; the worker owns tensors. They share ids, never objects. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyengine.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A sequence that the worker sees for the first time (or again, after preemption by recompute), whole."""

    req_id: str
    prompt_token_ids: list[int]  # the client's prompt
    output_token_ids: list[int]  # generated before a preemption; else empty
    sampling_params: SamplingParams
    seed: int  # resolved: the request's seed + choice index, or drawn at random when it was added
    block_ids: list[int]  # the block table, in order
    num_computed_tokens: int  # tokens whose KV is in those blocks already
    stop_token_ids: frozenset[int]  # end-of-sequence and stop ids; masked while fewer than min_tokens are generated
    bad_words_token_ids: list[list[int]] = field(default_factory=list)  # SamplingParams.bad_words, tokenised
    #: SamplingParams.prompt_logprobs while any are still to be reported; None: no more, or another choice reports them
    num_prompt_logprobs: int | None = None


@dataclass(slots=True)
class CachedRequestData:
    """Sequences that the worker knows, as differences. The lists run in parallel."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)  # appended to the block table ...
    replaced_block_ids: list[list[tuple[int, int]]] = field(default_factory=list)  # ... after (index, id): copy-on-write
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SwappedInRequestData:
    """A sequence back from the CPU pool. The worker kept its tokens; its whole block table is new."""

    req_id: str
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. Order of effects in the worker, which a later effect may rely on:

    1. drop `finished_req_ids` and `preempted_req_ids` (recompute: state dropped; swap: tokens kept, blocks forgotten);
    2. `blocks_to_swap_out`, then `blocks_to_swap_in`, then `blocks_to_copy` (each a list of (source, destination));
    3. the forward pass over `num_scheduled_tokens`.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    scheduled_swapped_in_reqs: list[SwappedInRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # req_id -> query tokens this step, in batch order
    total_num_scheduled_tokens: int = 0
    finished_req_ids: list[str] = field(default_factory=list)  # finished or aborted since the last step
    preempted_req_ids: list[str] = field(default_factory=list)  # preempted by recompute
    swapped_out_req_ids: list[str] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, CPU block)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)  # (CPU block, device block)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)  # (device block, device block)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the alternatives, most likely first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 is the most likely


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step produced. A sequence whose prompt is not finished yet has no tokens."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # one entry a sampled token, where asked for
    #: per sequence, the positions that this step computed (first entry belongs to token num_computed_tokens + 1)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    failed_req_ids: dict[str, str] = field(default_factory=dict)  # req_id -> why: this request fails, the others go on


@dataclass(slots=True)
class SequenceOutput:
    """What the scheduler reports of one sequence after a step, for detokenisation and streaming."""

    req_id: str  # the sequence's id
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # a pyengine.outputs.FinishReason
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
