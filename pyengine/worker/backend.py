"""What a device must offer to the worker: a KV pool, copies and swaps in it, streams and events, and the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache
from pyengine.ops import Ops


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Shape of the KV cache, the same on device and in the CPU pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # CacheConfig.kv_cache_dtype


class KVPool(Protocol):
    """A pool of KV blocks, block-major over layers: a block of all layers, K and V, is contiguous.

    `data` is [num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim]; with INT8, `scales` is fp32
    [num_blocks, num_layers, 2, num_kv_heads, block_size].
    """

    spec: KVCacheSpec
    num_blocks: int  # rows of `data`, the null block included on a device
    data: Tensor
    scales: Tensor | None

    def layer(self, index: int) -> LayerKVCache:
        """The views that layer `index` reads and writes."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether all work before the event is done."""

    def synchronize(self) -> None:
        """Block the caller until it is."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """Work queued from now on starts after `event`."""

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Work that was recorded once, to be queued again as it is: the same kernels over the same memory."""

    def replay(self) -> None:
        """Queue it on the compute stream."""


class GraphRecorder(Protocol):
    """Records work of the compute stream."""

    records_at_start: bool  # whether what most steps need is recorded before the first request

    def record(self, run: Callable[[], None]) -> Graph:
        """Record what `run` queues. It may be run before, and must not wait for the device."""


class Backend(Protocol):
    """One device. Chosen by name in `worker.backends.create_backend`, never by a failed import."""

    name: str  # cpu, cuda or emulated
    device: torch.device
    ops: Ops

    def available_memory(self) -> int:
        """Bytes that the KV pool may be cut from now."""

    def measure_peak_memory(self, run: Callable[[], None]) -> int | None:
        """Bytes of device memory that `run` needs beside what is in use; None, and it is not run, where that is no matter."""

    def graph_recorder(self) -> GraphRecorder | None:
        """For steps that are recorded and replayed; None where that is not this device's way."""

    def allocate_pool(self, spec: KVCacheSpec, num_blocks: int, *, host: bool) -> KVPool:
        """A pool on the device, or (host) in CPU memory that the device can copy from and to. Pages are untouched."""

    def compute_stream(self) -> Stream: ...

    def copy_stream(self) -> Stream:
        """The stream that swaps run on, beside the compute stream."""

    def copy_blocks(self, pool: KVPool, block_mapping: Sequence[tuple[int, int]]) -> None:
        """Copy blocks inside the pool, (source, destination), on the compute stream."""

    def swap_blocks(self, src: KVPool, dst: KVPool, block_mapping: Sequence[tuple[int, int]]) -> Event:
        """Copy blocks between device and CPU pool on the copy stream; the event fires when all have landed.

        The caller orders it: a source must be written, and a destination unread, before; neither is touched until the event.
        """

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
        """Fill `metadata.plan` and `metadata.workspace` where this device's kernels want them."""
