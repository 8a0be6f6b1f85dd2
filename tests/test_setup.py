"""setup.py: which kernels are built on which machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
import torch

SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.fixture
def setup_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in ("PYENGINE_CUDA", "CUDACXX"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("pyengine_setup", SETUP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cuda", [None, "13.0"])
@pytest.mark.parametrize("nvcc", [None, "/opt/cuda/bin/nvcc"])
def test_cuda_kernels_need_torchs_cuda_and_a_compiler(
    setup_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    nvcc: str | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """PyPI's torch is a CUDA build on any machine: without nvcc the build is for the CPU, and says so."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(setup_module, "find_nvcc", lambda: nvcc)
    assert setup_module.want_cuda() == (cuda is not None and nvcc is not None)
    assert ("no nvcc" in capfd.readouterr().err) == (cuda is not None and nvcc is None)


@pytest.mark.parametrize(("choice", "wanted"), [("0", False), ("1", True)])
def test_the_environment_decides(setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch, choice: str, wanted: bool) -> None:
    monkeypatch.setenv("PYENGINE_CUDA", choice)
    monkeypatch.setattr(setup_module, "find_nvcc", lambda: None)
    assert setup_module.want_cuda() is wanted


def test_a_compiler_named_by_the_environment_is_taken(setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDACXX", "/opt/cuda/bin/nvcc")
    assert setup_module.build_environment()["CUDACXX"] == "/opt/cuda/bin/nvcc"


def test_another_choice_is_refused(setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENGINE_CUDA", "yes")
    with pytest.raises(SystemExit, match="PYENGINE_CUDA must be 0 or 1, not 'yes'"):
        setup_module.want_cuda()
