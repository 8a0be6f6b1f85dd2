"""The requests that have not ended: which run, which wait, what they hold, and how they pass from one to the other."""

from __future__ import annotations

from pyengine.config import CacheConfig, SchedulerConfig
from pyengine.engine.admission import Admission
from pyengine.engine.block_manager import BlockManager
from pyengine.engine.preemption import Preempter
from pyengine.engine.prefix_cache import HashFunction
from pyengine.engine.request import Request, RequestStatus
from pyengine.engine.request_queue import FairQueue, RequestQueue
from pyengine.engine.scheduler_stats import SchedulerStats
from pyengine.engine.siblings import Siblings
from pyengine.engine.tenant_shares import TenantShares
from pyengine.errors import InvalidRequestError
from pyengine.scheduler_output import SchedulerOutput


class LiveRequests:
    """Everything that one request's start, progress, preemption or end must leave consistent.

    Attributes:
        all: by request id.
        running: most urgent first. One list for good, changed in place.
        waiting: those that may be admitted. Siblings that wait for a prompt are in neither.
        shares, fair_queue: with tenants; without, None.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, hash_function: HashFunction) -> None:
        self._config = scheduler_config
        self.block_manager = BlockManager(
            cache_config.num_blocks,
            cache_config.block_size,
            num_cpu_blocks=cache_config.num_cpu_blocks,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            hash_function=hash_function,
        )
        self.all: dict[str, Request] = {}
        self.running: list[Request] = []
        self.shares: TenantShares | None = None
        self.fair_queue: FairQueue | None = None
        if scheduler_config.tenants:
            self.shares = TenantShares(scheduler_config.tenants, scheduler_config.max_num_seqs, cache_config.num_blocks)
            self.fair_queue = FairQueue(self.shares)
        self.waiting: RequestQueue | FairQueue = RequestQueue() if self.fair_queue is None else self.fair_queue
        self.stats = SchedulerStats()
        self.siblings = Siblings(self.waiting)
        self.admission = Admission(self.block_manager, self.siblings, self.stats, self.shares)
        self._preempter = Preempter(
            scheduler_config.preemption_mode, self.block_manager, self.waiting, self.siblings, self.stats
        )
        self._finished_req_ids: list[str] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: if its id is in use, its tenant unknown, or if it could never finish, being longer than model,
                pool or quota allow.
        """
        if request.request_id in self.all:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in use")
        if self.shares is not None:
            tenant = self.shares.resolve(request.tenant).tenant
            request.tenant, request.cache_salt = tenant.name, tenant.cache_salt(request.cache_salt)
        self.admission.fit_length(request, self._config.max_model_len)
        self.siblings.add(request)
        priority = request.priority if self._config.policy == "priority" else 0
        request.urgency = (priority, self._num_added)
        self._num_added += 1
        self.all[request.request_id] = request
        if self.shares is not None:
            self.shares.added(request)
        self.waiting.push(request)

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take a running request's blocks and queue it again. It must not have been scheduled in this step."""
        self.running.remove(request)
        self._preempter.preempt(request, output)
        if self.shares is not None:
            self.shares.preempted(request)

    def advance(self, request: Request, num_tokens: int, sampled_token_ids: list[int] | None) -> list[int]:
        """A step has computed that many tokens of a running request, and may have sampled new ones.

        Returns:
            The new tokens, up to the one that ends the request.

        Raises:
            RuntimeError: if tokens were sampled and should not have been, or the other way round; a bug of the worker.
        """
        start, table = request.num_computed_tokens, request.block_table
        assert table is not None
        request.num_computed_tokens = start + num_tokens
        if request.num_computed_tokens >= table.cache_at:
            self.block_manager.cache_full_blocks(table, request.token_ids, request.num_computed_tokens)
        if start < request.num_prompt_tokens:
            self.siblings.advanced(request)
        has_caught_up = request.num_computed_tokens == request.num_tokens
        if has_caught_up != bool(sampled_token_ids):
            raise RuntimeError(f"the worker sampled {sampled_token_ids} for {request!r}")
        if not sampled_token_ids:
            return []
        request.is_protected = False
        return request.append_output_tokens(sampled_token_ids)

    def end(self, request: Request) -> None:
        """Free what a request holds. One that ran stays among the running until it is removed, or until `drop_ended`."""
        if request.block_table is not None:
            self.block_manager.free(request.block_table)
            request.block_table = None
        if request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPED):
            self._finished_req_ids.append(request.request_id)  # the worker knows it
        if request.request_id in self.waiting:
            self.waiting.remove(request)
        self.stats.num_swapped -= request.status is RequestStatus.SWAPPED
        self.siblings.remove(request)
        request.status = RequestStatus.FINISHED
        if self.shares is not None:
            self.shares.ended(request)
        del self.all[request.request_id]

    def drop_ended(self) -> None:
        """Take those that have ended out of the running ones."""
        self.running[:] = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def take_finished_req_ids(self) -> list[str]:
        """Ended requests that the worker knows and has not been told of yet."""
        finished, self._finished_req_ids = self._finished_req_ids, []
        return finished

    def num_owed_blocks(self) -> int:
        """Blocks that the running requests lack for the tokens they have."""
        return sum(map(self.admission.num_owed_blocks, self.running))
