"""What the machine offers to this process: memory and cores, as cgroups and affinity limit them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from pyengine.config import HardwareInfo
from pyengine.ops import load_core

# A memory limit of cgroup v1 that means none is a number near 2**63.
_NO_LIMIT = 2**62


def detect_hardware() -> HardwareInfo:
    """Measure the machine: device memory where torch has CUDA, else what this process may still take of the host's."""
    has_cuda, core = torch.cuda.is_available(), load_core()
    memory = torch.cuda.mem_get_info()[0] if has_cuda else available_host_memory()
    return HardwareInfo(
        has_cuda=has_cuda,
        has_cuda_kernels=core.has_cuda,
        available_memory=memory,
        num_cores=available_cores(),
        has_amx=core.get_isa() == "amx",
    )


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can take before the kernel's or its control group's limit.

    Args:
        root: where /proc and /sys are found.
    """
    available = _meminfo_available(root)
    for directory in _cgroup_directories(root, "memory"):
        limit = _read_int(directory / "memory.max", directory / "memory.limit_in_bytes")
        used = _read_int(directory / "memory.current", directory / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            # Page cache that is not in active use is given back before anything is killed.
            available = min(available, limit - used + _inactive_file(directory))
    return max(available, 0)


def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on: its affinity mask, and the whole cores of its CPU quota.

    Args:
        root: where /proc and /sys are found.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in _cgroup_directories(root, "cpu"):
        quota = _cpu_quota(directory)
        if quota is not None:
            cores = min(cores, int(quota))
    return max(cores, 1)


def _meminfo_available(root: Path) -> int:
    for line in (root / "proc" / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root / 'proc' / 'meminfo'} has no MemAvailable")


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """This process's control group for `controller` and every group above it: each may have a limit of its own.

    In a container the path that the kernel names may lie outside the mount; the mount's top is the container's own group then.
    """
    listing = root / "proc" / "self" / "cgroup"
    if not listing.exists():
        return
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys" / "fs" / "cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys" / "fs" / "cgroup" / controller
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            if ".." not in part.parts and (mount / part).is_dir():
                yield mount / part


def _inactive_file(directory: Path) -> int:
    statistics = directory / "memory.stat"
    if statistics.exists():
        for line in statistics.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _cpu_quota(directory: Path) -> float | None:
    """Cores' worth of time that the group may use; None: no limit."""
    file = directory / "cpu.max"
    if file.exists():
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    limit = _read_int(directory / "cpu.cfs_quota_us")
    whole = _read_int(directory / "cpu.cfs_period_us")
    return limit / whole if limit is not None and whole is not None and limit > 0 else None


def _read_int(*files: Path) -> int | None:
    """The number in the first of `files` that exists; None where there is none, or it says "max"."""
    for file in files:
        if file.exists():
            text = file.read_text().strip()
            return None if text == "max" else int(text)
    return None
