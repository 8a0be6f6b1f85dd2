"""`--static-batching`: what continuous batching is compared with."""

from __future__ import annotations

from pyengine.engine.live_requests import LiveRequests
from pyengine.engine.request import Request


class StaticBatch:
    """Requests that start together and run until the last one ends. Rows that have ended are computed on, as padding.

    Attributes:
        is_open: whether requests may still join. A batch may take several steps to fill.
    """

    def __init__(self, live: LiveRequests, max_model_len: int) -> None:
        self._live = live
        self._max_model_len = max_model_len
        self.is_open = True

    def start_step(self) -> None:
        """Make room for the rows that live: each may need a block."""
        self._end_padding(num_blocks_needed=len(self._live.running))

    def finish_step(self) -> None:
        """End the batch if no row lives any more."""
        self._end_padding(num_blocks_needed=0)

    def advance_padding(self, request: Request, num_tokens: int, token_ids: list[int] | None) -> None:
        """Take in a row that has ended. Its tokens are nobody's, and so is a failure."""
        if token_ids is None:
            self._live.end(request)
        else:
            self._live.advance(request, num_tokens, token_ids)

    def _end_padding(self, num_blocks_needed: int) -> None:
        """A row that has ended is computed on until its batch ends, but never at a live row's cost."""
        running = self._live.running
        is_over = all(request.is_padding for request in running)
        for request in running:
            is_full = request.num_tokens >= self._max_model_len
            may_end = request.is_padding and not request.is_finished
            if may_end and (is_over or is_full or self._live.block_manager.num_free_blocks < num_blocks_needed):
                self._live.end(request)
        self._live.drop_ended()
