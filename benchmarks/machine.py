"""What a report says of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from pyengine.ops import load_core


def describe() -> dict[str, str | int]:
    """Processor, cores that this process may use, and the instruction set that the kernels take."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "processor": ", ".join(dict.fromkeys(names)) or platform.processor() or platform.machine(),
        "cores": cores,
        "instruction_set": str(load_core().get_isa()),
    }


def cpu_flags() -> frozenset[str]:
    """What Linux says that the CPU can do; empty elsewhere."""
    return frozenset(flag for line in _cpuinfo() if line.startswith("flags") for flag in line.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
