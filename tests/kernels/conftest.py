"""The backends that kernel tests run on: the CPU kernels of each instruction set, and the CUDA sources in emulation.

A test module's `ISAS` says which instruction sets, where they are not CPU_ISAS.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_backend import CPU_ISAS, QUANTIZED_ISAS, KernelBackend
from mirror import MirroredOps

from pyengine.ops import get_ops, load_core

#: What `--kernel-device` may name: the ops, and where the tests' tensors are mirrored to.
DEVICES = {"cuda": ("cuda", "cuda"), "mirror": ("emulated", "cpu")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-device", choices=list(DEVICES), help="run the tests of every backend on this one alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cpu_names = [f"cpu-{isa}" for isa in getattr(metafunc.module, "ISAS", CPU_ISAS)]
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--kernel-device", default=None)
        metafunc.parametrize("backend", [chosen] if chosen else [*cpu_names, "emulated"], indirect=True)
    if "cpu_backend" in metafunc.fixturenames:
        metafunc.parametrize("cpu_backend", cpu_names, indirect=True)


@pytest.fixture(scope="module", autouse=True)
def small_references(one_torch_thread: None) -> None:
    """References are small."""


def _use_backend(name: str) -> Iterator[KernelBackend]:
    if name == "emulated":
        yield KernelBackend(name, get_ops("emulated"), None)
        return
    if name in DEVICES:
        ops_name, device = DEVICES[name]
        yield KernelBackend(name, MirroredOps(get_ops(ops_name), torch.device(device)), None)
        return
    core, isa = load_core(), name.removeprefix("cpu-")
    if isa not in core.supported_isas():
        pytest.skip(f"this CPU lacks {isa}; it has {', '.join(core.supported_isas())}")
    previous = core.get_isa()
    core.set_isa(isa)
    yield KernelBackend(name, get_ops("cpu"), isa)
    core.set_isa(previous)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[KernelBackend]:
    yield from _use_backend(request.param)


@pytest.fixture
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[KernelBackend]:
    yield from _use_backend(request.param)


@pytest.fixture(params=[f"cpu-{isa}" for isa in QUANTIZED_ISAS])
def quantized_backend(request: pytest.FixtureRequest) -> Iterator[KernelBackend]:
    yield from _use_backend(request.param)


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the number of threads that a test changes."""
    core = load_core()
    previous = core.get_num_threads()
    yield
    core.set_num_threads(previous)
