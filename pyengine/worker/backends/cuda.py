"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.ops import get_ops, load_core
from pyengine.worker.backend import Event, Graph, GraphRecorder, KVCacheSpec, KVPool, Stream
from pyengine.worker.backends.attention_planner import AttentionPlanner
from pyengine.worker.backends.blocks import copy_in_pool, swap_between_pools
from pyengine.worker.kv_pool import BlockPool


class CudaStream:
    """A torch stream behind the `Stream` protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record_event(self) -> Event:
        return self.stream.record_event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaGraphRecorder:
    """A `GraphRecorder`: CUDA graphs that share one memory pool, for one at a time runs.

    Args:
        device: the GPU.
    """

    records_at_start = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # libraries set themselves up on first use, which cannot be recorded
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Calls that other threads make meanwhile (pinned memory, say) must not end the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph


class CudaBackend:
    """A `Backend`. The compute stream is torch's current one; swaps run on a stream of their own.

    Args:
        num_threads: of what runs on the host.

    Raises:
        ConfigError: this build has no CUDA kernels.
    """

    name = "cuda"

    def __init__(self, num_threads: int) -> None:
        self.ops = get_ops("cuda")
        load_core().set_num_threads(num_threads)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._compute = CudaStream(torch.cuda.current_stream(self.device))
        self._copy = CudaStream(torch.cuda.Stream(self.device))
        self._planner = AttentionPlanner(self.device)
        self._recorder = CudaGraphRecorder(self.device)

    def available_memory(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def measure_peak_memory(self, run: Callable[[], None]) -> int | None:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def graph_recorder(self) -> GraphRecorder | None:
        return self._recorder

    def allocate_pool(self, spec: KVCacheSpec, num_blocks: int, *, host: bool) -> KVPool:
        if host:
            return BlockPool(spec, num_blocks, device=torch.device("cpu"), pin_memory=True)
        return BlockPool(spec, num_blocks, device=self.device)

    def compute_stream(self) -> Stream:
        return self._compute

    def copy_stream(self) -> Stream:
        return self._copy

    def copy_blocks(self, pool: KVPool, block_mapping: Sequence[tuple[int, int]]) -> None:
        copy_in_pool(self.ops, pool, block_mapping)

    def swap_blocks(self, src: KVPool, dst: KVPool, block_mapping: Sequence[tuple[int, int]]) -> Event:
        with torch.cuda.stream(self._copy.stream):
            swap_between_pools(self.ops, src, dst, block_mapping)
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
