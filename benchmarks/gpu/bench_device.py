"""The device that a benchmark measures: a GPU, or the emulated one, where everything runs small and no time means a thing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pyengine.ops import Ops, get_ops
from pyengine.worker.backend import Backend
from pyengine.worker.backends import create_backend

_FLUSH_BYTES = 512 * 2**20  # written between two runs, so that none finds its inputs in the L2 cache


@dataclass(frozen=True)
class Result:
    """One measurement. `share` is achieved / ceiling, where the ceiling is the copy bandwidth or the bf16 matmul rate."""

    group: str
    name: str
    seconds: float
    bytes: int = 0  # that must move through device memory
    flops: int = 0
    share: float | None = None
    baseline: str = ""  # what `baseline_seconds` is of
    baseline_seconds: float | None = None
    error: float | None = None  # largest difference from the baseline's result
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class BenchDevice:
    """Times work on one device.

    Args:
        name: "cuda" or "emulated".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name == "cuda"
        self.device = torch.device("cuda" if self.is_gpu else "cpu")
        self.ops: Ops = get_ops(name)
        self.backend: Backend = create_backend("cuda" if self.is_gpu else "emulated", num_threads=2)
        self._flush = torch.empty(_FLUSH_BYTES if self.is_gpu else 8, dtype=torch.uint8, device=self.device)

    def pick(self, on_gpu: Any, emulated: Any) -> Any:
        """A size: the real one, or a tiny one for the rehearsal."""
        return on_gpu if self.is_gpu else emulated

    def describe(self) -> str:
        if not self.is_gpu:
            return "emulated device: a rehearsal, its times mean nothing"
        properties = torch.cuda.get_device_properties(self.device)
        gib = properties.total_memory / 2**30
        return f"{properties.name}, {properties.multi_processor_count} SMs, {gib:.0f} GiB, torch {torch.__version__}"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def time(self, run: Callable[[], object], repeat: int = 15) -> float:
        """Seconds of `run`, the median of `repeat` runs with cold caches, by the device's own clock."""
        if not self.is_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        events = []
        for _ in range(repeat):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()  # takes longer than the host needs to queue `run`, so the events measure the device alone
            begin.record()
            run()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) / 1000 for begin, end in events)

    def copy_bandwidth(self) -> float:
        """Bytes a second that a large copy inside the device's memory moves, read and written bytes counted."""
        source = torch.empty(self.pick(4 * 2**30, 2**20), dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * source.numel() / self.time(lambda: target.copy_(source))

    def matmul_rate(self) -> float:
        """Floating-point operations a second of a large bf16 product by torch."""
        n = self.pick(8192, 64)
        a, b = (torch.randn(n, n, device=self.device).to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * n**3 / self.time(lambda: torch.matmul(a, b, out=out))
