"""Bugs planted in the thread pool: its stress test must notice each."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from native import ROOT, compile_cpp
from planting import plant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_POOL, _PLACE, _SCRATCH = "thread_pool.cpp", "worker_place.h", "scratch.cpp"


@dataclass(frozen=True)
class Mutant:
    """`old`, found once in `file` of csrc/cpu, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant("a core is never lent", _POOL, "owner->place.bring_here(allowed_);", ""),
    Mutant("a core is lent to a worker that has one", _POOL, "owner->place.age() == age", "true"),
    Mutant("a worker stays on the lent core", _POOL, "if (lent) owner->place.keep_away(allowed_);", ""),
    Mutant("a worker that was lent a core is not sent away", _PLACE, "move(here);\n    avoided_cpu_ = -1;", "move(here);"),
    Mutant(
        "a nap ends the wait",
        _POOL,
        "if ((lent || waited >= kSpinNanoseconds) && sleep_until(done, kLongestNap)) break;",
        "if (lent || waited >= kSpinNanoseconds) {\n        sleep_until(done, kLongestNap);\n        break;\n      }",
    ),
    Mutant(
        "a tile that was taken over is written",
        _POOL,
        "return owner_->compare_exchange_strong(expected, ",
        "return owner_->load() != 0 || owner_->compare_exchange_strong(expected, ",
    ),
    Mutant("late workers are not waited for", _POOL, "== kTaken) sched_yield();", "== kWriting) sched_yield();"),
    Mutant("what tiles share is freed with its thread", _SCRATCH, "if (shared_) wait_for_late_workers();", ""),
    Mutant("a worker's end waits for who joins it", _POOL, "inside_tile = true;  // for good", "// for good"),
    Mutant("threads that nobody woke are moved", _POOL, "num_tiles >= num_threads();", "num_tiles > 0;"),
    Mutant(
        "threads that have just been woken are moved",
        _POOL,
        "owner.is_absent()",
        "epoch - owner.seen.load(std::memory_order_relaxed) >= kAbsentJobs",
    ),
]


def build(folder: Path, mutant: Mutant | None) -> Path:
    """The stress test of a copy of the sources."""
    for part in ("csrc/cpu", "tests/csrc"):
        shutil.copytree(ROOT / part, folder / part)
    if mutant is not None:
        plant(folder / "csrc" / "cpu" / mutant.file, mutant.old, mutant.new)
    sources = ["tests/csrc/thread_pool_test.cpp", "csrc/cpu/thread_pool.cpp", "csrc/cpu/scratch.cpp"]
    return compile_cpp(folder / "thread_pool_test", [folder / source for source in sources])


def passes(program: Path) -> bool:
    try:
        result = subprocess.run([str(program)], capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0


def test_unchanged_sources_pass(tmp_path: Path) -> None:
    assert passes(build(tmp_path, None))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_caught(tmp_path: Path, mutant: Mutant) -> None:
    assert not passes(build(tmp_path, mutant))
