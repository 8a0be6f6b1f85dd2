"""Puts a step's split-KV plan where the GPU kernels read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.worker.backends.attention_plan import plan_attention, workspace_size

# A workspace is asked for in pieces of this many floats, so that it seldom grows.
_WORKSPACE_STEP = 2**16


class AttentionPlanner:
    """Plans a step's attention and keeps the workspace for its partial results.

    Args:
        device: where the kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace = torch.empty(_WORKSPACE_STEP, dtype=torch.float32, device=device)

    def fill(
        self,
        metadata: AttentionMetadata,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """Set `metadata.plan` and `metadata.workspace`, unless every sequence goes to the prefill kernel."""
        plan = plan_attention(query_lens, seq_lens, num_heads, num_kv_heads)
        if not plan.work:
            return
        size = workspace_size(plan.num_slots, num_heads, head_dim)
        if size > len(self._workspace):
            # Steps follow each other on one stream: the last one's kernels are done with the old memory before it is reused.
            rounded = -(-size // _WORKSPACE_STEP) * _WORKSPACE_STEP
            self._workspace = torch.empty(rounded, dtype=torch.float32, device=self._device)
        metadata.plan = torch.tensor(plan.work, dtype=torch.int32).to(self._device)  # [num_work, 4]
        metadata.workspace = self._workspace
