"""Memory and cores under control groups: rule 15, default flags start on any machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pyengine.worker.hardware import available_cores, available_host_memory, detect_hardware

GIB = 2**30


def make_machine(root: Path, groups: str, files: dict[str, str], available: int = 8 * GIB) -> Path:
    files = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert available_host_memory(root) == 8 * GIB


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "", {})
    (root / "proc/self/cgroup").unlink()
    assert available_host_memory(root) == 8 * GIB
    assert available_cores(root) == len(os.sched_getaffinity(0))


def test_version_2_limits_of_every_level_count(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/outer/memory.stat": f"anon 7\nactive_file 3\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "1\n",
        "sys/fs/cgroup/outer/cpu.max": "max 100000\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "150000 100000\n",
    }
    root = make_machine(tmp_path, "0::/outer/inner\n", files)
    assert available_host_memory(root) == GIB + GIB // 2
    assert available_cores(root) == 1


def test_a_container_whose_path_is_not_mounted(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": "0\n"}
    root = make_machine(tmp_path, "0::/../../pod/container\n", files)
    assert available_host_memory(root) == GIB


def test_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "4096\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    root = make_machine(tmp_path, "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/x\n", files)
    assert available_host_memory(root) == GIB - 4096
    assert available_cores(root) == 1


def test_an_exhausted_group_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}
    assert available_host_memory(make_machine(tmp_path, "0::/\n", files)) == 0


def test_a_broken_meminfo_is_an_error(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "0::/\n", {"proc/meminfo": "MemTotal: 5 kB\n"})
    with pytest.raises(OSError, match="MemAvailable"):
        available_host_memory(root)


def test_this_machine() -> None:
    hardware = detect_hardware()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 <= hardware.num_cores <= (os.cpu_count() or 1)
    assert hardware.has_cuda == torch.cuda.is_available()
    if not hardware.has_cuda:
        assert 2**20 < hardware.available_memory <= total
