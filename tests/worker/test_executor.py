"""The executor's life: load, pools, steps, shutdown, and what goes wrong on the way."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from driver import MACHINE, Driver, Sequence, make_executor

from pyengine.config import EngineArgs
from pyengine.config_resolution import resolve, resolve_load
from pyengine.errors import ConfigError
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pyengine.worker.backends import create_backend
from pyengine.worker.executor import UniprocExecutor

ARGS = EngineArgs(device="cpu", max_model_len=128, max_num_seqs=2, num_kv_blocks=20, swap_space=0)


def test_an_empty_step_does_nothing(tiny_llama: Path) -> None:
    executor, _ = make_executor(tiny_llama, ARGS)
    assert executor.execute_model(SchedulerOutput()) == ModelRunnerOutput()


def test_shutdown_releases_everything_and_may_be_repeated(tiny_llama: Path) -> None:
    executor, config = make_executor(tiny_llama, ARGS)
    Driver(executor, config).run([Sequence("a", [5, 6, 7], SamplingParams(max_tokens=2))])
    worker = executor._worker
    assert worker._runner is not None
    pool, model = weakref.ref(worker._runner._pool), weakref.ref(worker._model)  # type: ignore[type-var]
    executor.shutdown()
    executor.shutdown()
    gc.collect()
    assert pool() is None
    assert model() is None
    with pytest.raises(RuntimeError, match="before initialize_kv_cache"):
        executor.execute_model(SchedulerOutput())


def test_calls_out_of_order_are_errors(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_llama))
    executor = UniprocExecutor(checkpoint, resolve_load(ARGS, checkpoint.arch, MACHINE))
    with pytest.raises(RuntimeError, match="before load_model"):
        executor.initialize_kv_cache(resolve(ARGS, checkpoint.name, checkpoint.arch, MACHINE))
    assert executor.available_memory() > 2**20
    executor.shutdown()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_kv_blocks": 2**40}, "num_kv_blocks: .* GiB are available, for at most "),
        ({"swap_space": 2.0**19}, "swap_space: .* cannot be allocated"),
    ],
)
def test_a_pool_that_memory_cannot_hold_names_its_flag(tiny_llama: Path, flags: dict[str, float], message: str) -> None:
    args = EngineArgs(**({"device": "cpu", "max_model_len": 128, "num_kv_blocks": 20} | flags))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_executor(tiny_llama, args)


def test_a_pool_that_the_system_refuses_names_its_flag(tiny_llama: Path) -> None:
    """Although the machine was said to have the memory."""
    checkpoint = open_checkpoint(str(tiny_llama))
    args = EngineArgs(device="cpu", max_model_len=128, num_kv_blocks=2**40)
    machine = replace(MACHINE, available_memory=2**62)
    executor = UniprocExecutor(checkpoint, resolve_load(args, checkpoint.arch, machine))
    executor.load_model()
    with pytest.raises(ConfigError, match=r"^num_kv_blocks: .* cannot be allocated"):
        executor.initialize_kv_cache(resolve(args, checkpoint.name, checkpoint.arch, machine))
    executor.shutdown()


def test_a_build_without_cuda_says_so() -> None:
    from pyengine.ops import load_core

    if load_core().has_cuda:
        pytest.skip("this build has CUDA kernels")
    with pytest.raises(ConfigError, match="no CUDA kernels"):
        create_backend("cuda", 1)


def test_swaps_without_swap_space_are_an_error(tiny_llama: Path) -> None:
    executor, _ = make_executor(tiny_llama, ARGS)
    with pytest.raises(RuntimeError, match="no swap space"):
        executor.execute_model(SchedulerOutput(blocks_to_swap_out=[(1, 0)]))
