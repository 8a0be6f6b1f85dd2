"""The CPU kernels' thread pool: correct whatever the number of threads and callers, after a fork, and at exit."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from native import ROOT, compile_cpp, run_program

from pyengine.config import MAX_NUM_THREADS
from pyengine.ops import get_ops, load_core

SOURCES = [
    ROOT / "tests" / "csrc" / "thread_pool_test.cpp",
    ROOT / "csrc" / "cpu" / "thread_pool.cpp",
    ROOT / "csrc" / "cpu" / "scratch.cpp",
]


def test_pool_under_stress(tmp_path: Path) -> None:
    run_program(compile_cpp(tmp_path / "thread_pool_test", SOURCES))


def test_pool_has_no_data_race(tmp_path: Path) -> None:
    program = compile_cpp(tmp_path / "thread_pool_test", SOURCES, ["-fsanitize=thread"])
    run_program(program, "no-fork")


def test_the_configuration_knows_the_limit() -> None:
    with pytest.raises(ValueError, match=f"between 1 and {MAX_NUM_THREADS}, not {MAX_NUM_THREADS + 1}"):
        load_core().set_num_threads(MAX_NUM_THREADS + 1)


def results(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A few ops that share tiles among threads; x [tokens, 64], weight packed [32, 64, 16]."""
    ops = get_ops("cpu")
    linear, norm, act = torch.empty(x.shape[0], 512), torch.empty_like(x), torch.empty(x.shape[0], 256)
    ops.linear(linear, x, weight)
    ops.rms_norm(norm, x, torch.ones(64), 1e-5)
    ops.silu_and_mul(act, linear)
    return [linear, norm, act]


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_results_do_not_depend_on_the_number_of_threads(threads: int, num_threads: None) -> None:
    x, weight = torch.randn(67, 64), torch.randn(32, 64, 16)
    load_core().set_num_threads(1)
    expected = results(x, weight)
    load_core().set_num_threads(threads)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(expected, results(x, weight), strict=True))


def test_concurrent_callers(num_threads: None) -> None:
    load_core().set_num_threads(3)
    inputs = [(torch.randn(20 + i, 64), torch.randn(32, 64, 16)) for i in range(6)]
    expected = [results(*args) for args in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(30):
            if not all(torch.equal(a, b) for a, b in zip(expected[i], results(*inputs[i]), strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_bad_number_of_threads(count: int) -> None:
    with pytest.raises(ValueError, match=rf"num_threads must be between 1 and 1024, not {count}"):
        load_core().set_num_threads(count)


def test_number_of_threads_round_trips(num_threads: None) -> None:
    for count in (1, 5, 2):
        load_core().set_num_threads(count)
        assert load_core().get_num_threads() == count


PROGRAM = """
import os, sys
import torch
from pyengine.ops import get_ops, load_core
load_core().set_num_threads(4)
x, y = torch.randn(64, 64), torch.empty(64, 64)
def work():
    get_ops("cpu").rms_norm(y, x, torch.ones(64), 1e-5)
    return torch.allclose(y, torch.nn.functional.rms_norm(x, (64,), eps=1e-5), atol=1e-5)
assert work()
child = os.fork()
if child == 0:
    os._exit(0 if work() and load_core().get_num_threads() == 4 else 1)
assert os.waitpid(child, 0)[1] == 0
assert work()
print("done")
"""


def test_fork_and_exit() -> None:
    """A forked child computes, and neither it nor the parent, whose workers still sleep, hangs at exit."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
