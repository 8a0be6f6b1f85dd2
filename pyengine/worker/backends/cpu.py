"""The CPU. Every op is done when its call returns, so streams and events have nothing to order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.ops import get_ops, load_core
from pyengine.worker.backend import Event, GraphRecorder, KVCacheSpec, KVPool, Stream
from pyengine.worker.backends.blocks import copy_in_pool, swap_between_pools
from pyengine.worker.hardware import available_host_memory
from pyengine.worker.kv_pool import BlockPool


class DoneEvent:
    """The event of work that was done before it was asked about."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SynchronousStream:
    """A stream whose work is done as soon as it is queued."""

    def record_event(self) -> Event:
        return DoneEvent()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        pass


class CpuBackend:
    """A `Backend`.

    Args:
        num_threads: of the kernels' thread pool, which is the process's.

    Raises:
        ConfigError: the extension was not built.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, num_threads: int) -> None:
        self.ops = get_ops("cpu")
        load_core().set_num_threads(num_threads)
        self._stream = SynchronousStream()

    def available_memory(self) -> int:
        return available_host_memory()

    def measure_peak_memory(self, run: Callable[[], None]) -> int | None:
        return None  # the pool's pages are taken as they are used, and so are activations'

    def graph_recorder(self) -> GraphRecorder | None:
        return None

    def allocate_pool(self, spec: KVCacheSpec, num_blocks: int, *, host: bool) -> KVPool:
        return BlockPool(spec, num_blocks, device=self.device, k_dim_major=True)

    def compute_stream(self) -> Stream:
        return self._stream

    def copy_stream(self) -> Stream:
        return self._stream

    def copy_blocks(self, pool: KVPool, block_mapping: Sequence[tuple[int, int]]) -> None:
        copy_in_pool(self.ops, pool, block_mapping)

    def swap_blocks(self, src: KVPool, dst: KVPool, block_mapping: Sequence[tuple[int, int]]) -> Event:
        swap_between_pools(self.ops, src, dst, block_mapping)
        return DoneEvent()

    def plan_attention(
        self,
        metadata: AttentionMetadata,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """The CPU kernels divide their work themselves."""
