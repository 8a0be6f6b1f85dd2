"""Taking a running request's blocks away, by recompute or by swap."""

from __future__ import annotations

from pyengine.config import PreemptionMode
from pyengine.engine.block_manager import BlockManager
from pyengine.engine.request import Request, RequestStatus
from pyengine.engine.request_queue import FairQueue, RequestQueue
from pyengine.engine.scheduler_stats import SchedulerStats
from pyengine.engine.siblings import Siblings
from pyengine.scheduler_output import SchedulerOutput

# Costs, estimated in units of one token's computing in a batch. Moving a token's KV reads and writes a few kilobytes a layer;
# computing it takes two operations for each weight of the model, so that moving is the cheaper one by far on every device. 1/8
# a direction is on the safe side for PCIe and more so for a CPU's own memory. What a swap costs at any size (its copies must
# land before the blocks are written again, and before the sequence runs again) decides for short sequences only.
SWAP_COST = 16.0
COPY_COST_PER_TOKEN = 1 / 8


def should_swap(mode: PreemptionMode, *, num_tokens_to_recompute: int, num_blocks_to_copy: int, block_size: int) -> bool:
    """Whether to preempt by swap rather than by recompute.

    Args:
        mode: "recompute" or "swap" decide; "auto" takes the cheaper by estimate.
        num_tokens_to_recompute: the sequence's computed tokens, less those in blocks that others hold and would share again.
        num_blocks_to_copy: blocks that have no copy in the CPU pool. Each moves out and back, whole.
        block_size: tokens in a block.
    """
    if mode != "auto":
        return mode == "swap"
    copied_tokens = 2 * num_blocks_to_copy * block_size
    return SWAP_COST + COPY_COST_PER_TOKEN * copied_tokens < num_tokens_to_recompute


class Preempter:
    """Moves a request from running to waiting; which one is the scheduler's choice."""

    def __init__(
        self,
        mode: PreemptionMode,
        block_manager: BlockManager,
        waiting: RequestQueue | FairQueue,
        siblings: Siblings,
        stats: SchedulerStats,
    ) -> None:
        self._mode = mode
        self._block_manager = block_manager
        self._waiting = waiting
        self._siblings = siblings
        self._stats = stats

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Free a request's blocks and queue it where its urgency puts it. It must not have been scheduled in this step.

        A CPU pool without room turns a swap into a recompute.
        """
        copies = self._swap_out(request)
        if copies is not None:
            output.swapped_out_req_ids.append(request.request_id)
            output.blocks_to_swap_out += copies
            request.status = RequestStatus.SWAPPED
            self._stats.num_swapped += 1
            self._stats.num_preemptions_swap += 1
            self._stats.num_blocks_swapped_out += len(copies)
        else:
            assert request.block_table is not None
            self._block_manager.free(request.block_table)
            request.block_table = None
            request.num_computed_tokens = 0
            output.preempted_req_ids.append(request.request_id)
            request.status = RequestStatus.PREEMPTED
            self._stats.num_preemptions_recompute += 1
        request.num_preemptions += 1
        self._siblings.stopped(request)
        self._waiting.push(request)

    def _swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        manager, table = self._block_manager, request.block_table
        assert table is not None
        if manager.swap_space.num_blocks == 0:
            return None
        wants_swap = should_swap(
            self._mode,
            num_tokens_to_recompute=request.num_computed_tokens - manager.num_shared_tokens(table),
            num_blocks_to_copy=manager.swap_space.num_copies_out(table.block_ids),
            block_size=manager.block_size,
        )
        if not wants_swap:
            return None
        copies = manager.swap_out(table)
        if copies is None:
            self._stats.num_swap_fallbacks += 1
        return copies
