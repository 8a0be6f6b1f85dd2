"""One sequence, as the scheduler sees it: its tokens, how far its KV is computed, and where it stands."""

from __future__ import annotations

import sys
from enum import Enum, auto

from pyengine.engine.block_manager import BlockTable
from pyengine.outputs import FinishReason
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import TokenLogprobs


class RequestStatus(Enum):
    """Where a request stands. All but RUNNING and FINISHED wait in the scheduler's queue, or for a sibling's prompt."""

    WAITING = auto()  # never ran
    RUNNING = auto()  # holds device blocks
    PREEMPTED = auto()  # ran; its KV was dropped and will be computed again
    SWAPPED = auto()  # ran; its KV is in the CPU pool
    FINISHED = auto()


class Request:
    """A sequence with its own tokens, seed and blocks. A client's request with n > 1 is n of these, with one `parent_id`.

    What a caller passes stays as it is but for what the scheduler fits when the request is added: `max_total_tokens`, to the
    model and the pool, and with tenants `tenant` and `cache_salt`. The scheduler alone changes the rest.

    Args:
        request_id: the sequence's id, unique among live requests.
        prompt_token_ids: the client's prompt; shared, never changed.
        sampling_params: of the client's request.
        seed: resolved, the choice's index already added.
        arrival_time: seconds of `time.monotonic`.
        stop_token_ids: end-of-sequence ids (unless they are ignored) and the client's stop ids.
        max_total_tokens: prompt and output tokens at most; None: as many as `sampling_params.max_tokens`, model and pool allow.
        parent_id: the client's request, for the sequences of one with n > 1; all have the same prompt and salt.
        index: which of the n choices this is.
        priority: with the policy "priority", lower runs first.
        cache_salt: only requests of the same salt share cached prefixes.
        tenant: whom to account the request to; None: nobody in particular.
        bad_words_token_ids: `sampling_params.bad_words`, tokenised; for the worker.
    """

    __slots__ = (
        "arrival_time",
        "bad_words_token_ids",
        "block_table",
        "cache_salt",
        "finish_reason",
        "first_scheduled_time",
        "index",
        "is_padding",
        "is_protected",
        "max_total_tokens",
        "next_prompt_logprob",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "parent_id",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tenant",
        "turn",
        "urgency",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        seed: int = 0,
        arrival_time: float = 0.0,
        stop_token_ids: frozenset[int] = frozenset(),
        max_total_tokens: int | None = None,
        parent_id: str | None = None,
        index: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        bad_words_token_ids: list[list[int]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.seed = seed
        self.arrival_time = arrival_time
        self.stop_token_ids = stop_token_ids
        self.max_total_tokens = sys.maxsize if max_total_tokens is None else max_total_tokens
        self.parent_id = parent_id
        self.index = index
        self.priority = priority
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.bad_words_token_ids = bad_words_token_ids or []

        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens  # prompt and output; an attribute, because every step reads it
        self.num_computed_tokens = 0  # tokens whose KV is in the request's blocks, device or CPU
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when the request (or its sibling) first ran
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.first_scheduled_time: float | None = None  # seconds of time.monotonic

        self.block_table: BlockTable | None = None  # on the device, or in the CPU pool while SWAPPED
        self.urgency = (0, 0)  # lower runs first: (priority, under that policy; order of arrival)
        self.turn = 0.0  # among requests of one priority: how many its tenant runs before it, over the tenant's weight
        self.is_padding = False  # ended, but its row runs until the static batch ends
        self.is_protected = False  # resumed, and no token generated since: must not be preempted
        # Next prompt position to report logprobs of. The first position has none, and siblings leave it to choice 0.
        wants_prompt_logprobs = sampling_params.prompt_logprobs is not None and index == 0
        self.next_prompt_logprob = 1 if wants_prompt_logprobs else self.num_prompt_tokens

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def may_match_prefix(self) -> bool:
        """Whether cached blocks may stand in for computing: not while prompt logprobs are still to be reported."""
        return self.next_prompt_logprob >= self.num_prompt_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output together."""
        boundary = self.num_prompt_tokens
        if end <= boundary:
            return self.prompt_token_ids[start:end]
        if start >= boundary:
            return self.output_token_ids[start - boundary : end - boundary]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - boundary]

    def append_output_tokens(self, token_ids: list[int]) -> list[int]:
        """Append sampled tokens up to the one that ends the sequence, and set `finish_reason` where one does.

        Returns:
            The tokens that were appended: what follows a stop id or the length limit is dropped.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.output_token_ids.append(token_id)
            self.num_tokens += 1
            if token_id in self.stop_token_ids and len(self.output_token_ids) >= self.sampling_params.min_tokens:
                self.finish_reason = "stop"
                # An end-of-sequence id is the model's own end, and no stop that the client gave.
                self.stop_reason = token_id if token_id in self.sampling_params.stop_token_ids else None
            elif self.num_tokens >= self.max_total_tokens:
                self.finish_reason = "length"
            else:
                continue
            return token_ids[:count]
        return token_ids

    def take_prompt_logprobs(self, start: int, computed: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
        """Those prompt logprobs that were not reported before: after a preemption a worker computes some again.

        Args:
            start: the first position that the step computed.
            computed: entries of positions start + 1 and on.
        """
        new = computed[self.next_prompt_logprob - (start + 1) :]
        self.next_prompt_logprob += len(new)
        return new or None
