"""The CUDA kernels run on the CPU, with streams that are late on purpose: a missing wait shows in the data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.ops import get_ops, load_core, load_emulated
from pyengine.worker.backend import Event, GraphRecorder, KVCacheSpec, KVPool, Stream
from pyengine.worker.backends.attention_planner import AttentionPlanner
from pyengine.worker.backends.blocks import copy_in_pool, swap_between_pools
from pyengine.worker.backends.emulated_graph import EmulatedGraphRecorder
from pyengine.worker.backends.emulated_memory import measure_peak_bytes
from pyengine.worker.hardware import available_host_memory
from pyengine.worker.kv_pool import BlockPool

_COMPUTE_STREAM = 0


class EmulatedEvent:
    """A point in an emulated stream."""

    def __init__(self, module: ModuleType, event_id: int) -> None:
        self._module = module
        self.event_id = event_id
        weakref.finalize(self, module.emulated_event_release, event_id)

    def query(self) -> bool:
        return bool(self._module.emulated_event_query(self.event_id))

    def synchronize(self) -> None:
        self._module.emulated_event_synchronize(self.event_id)


class EmulatedStream:
    """A queue of emulated device work."""

    def __init__(self, module: ModuleType, stream_id: int) -> None:
        self._module = module
        self.stream_id = stream_id

    def record_event(self) -> EmulatedEvent:
        return EmulatedEvent(self._module, self._module.emulated_event_record(self.stream_id))

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        self._module.emulated_stream_wait_event(self.stream_id, event.event_id)

    def synchronize(self) -> None:
        self._module.emulated_stream_synchronize(self.stream_id)


class EmulatedBackend:
    """A `Backend`.

    Args:
        num_threads: of the matrix products, which run on the CPU's own kernels.

    Raises:
        ConfigError: an extension was not built.
    """

    name = "emulated"
    device = torch.device("cpu")
    #: A profiling run takes long where threads are emulated; a test that is about it sets this.
    measures_memory = False

    def __init__(self, num_threads: int) -> None:
        self.ops = get_ops("emulated")
        load_core().set_num_threads(num_threads)
        self._module = load_emulated()
        self._compute = EmulatedStream(self._module, _COMPUTE_STREAM)
        self._copy = EmulatedStream(self._module, self._module.emulated_stream_create())
        self._planner = AttentionPlanner(self.device)

    def available_memory(self) -> int:
        return available_host_memory()

    def measure_peak_memory(self, run: Callable[[], None]) -> int | None:
        return measure_peak_bytes(run) if self.measures_memory else None

    def graph_recorder(self) -> GraphRecorder | None:
        return EmulatedGraphRecorder()

    def allocate_pool(self, spec: KVCacheSpec, num_blocks: int, *, host: bool) -> KVPool:
        return BlockPool(spec, num_blocks, device=self.device)

    def compute_stream(self) -> Stream:
        return self._compute

    def copy_stream(self) -> Stream:
        return self._copy

    def copy_blocks(self, pool: KVPool, block_mapping: Sequence[tuple[int, int]]) -> None:
        copy_in_pool(self.ops, pool, block_mapping)

    def swap_blocks(self, src: KVPool, dst: KVPool, block_mapping: Sequence[tuple[int, int]]) -> Event:
        previous = self._module.emulated_set_stream(self._copy.stream_id)
        try:
            swap_between_pools(self.ops, src, dst, block_mapping)
        finally:
            self._module.emulated_set_stream(previous)
        return self._copy.record_event()

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
        self._planner.fill(metadata, query_lens, seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
