"""Moving blocks with a device's ops: the scales of an INT8 cache travel with the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyengine.ops import Ops
from pyengine.worker.backend import KVPool


def copy_in_pool(ops: Ops, pool: KVPool, block_mapping: Sequence[tuple[int, int]]) -> None:
    """Copy blocks inside `pool`, (source, destination); no block may be both."""
    mapping = torch.tensor(block_mapping, dtype=torch.int64, device=pool.data.device)  # [num_pairs, 2]
    ops.copy_blocks(pool.data, mapping)
    if pool.scales is not None:
        ops.copy_blocks(pool.scales, mapping)


def swap_between_pools(ops: Ops, src: KVPool, dst: KVPool, block_mapping: Sequence[tuple[int, int]]) -> None:
    """Queue copies of blocks from `src` to `dst`, (source, destination), on the current stream."""
    mapping = torch.tensor(block_mapping, dtype=torch.int64)  # [num_pairs, 2], in host memory
    ops.swap_blocks(src.data, dst.data, mapping)
    if src.scales is not None and dst.scales is not None:
        ops.swap_blocks(src.scales, dst.scales, mapping)
