"""Builds the extensions with CMake and ninja, against the torch of the environment. Everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            "pyengine is built against the torch of this environment, and there is none.\n"
            "Install one first (pip install torch), then: pip install --no-build-isolation ."
        )


def find_nvcc() -> str | None:
    """CUDACXX, or nvcc from PATH or where the toolkit puts it."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def want_cuda() -> bool:
    """PYENGINE_CUDA=1 or 0 decides; otherwise whether the installed torch has CUDA and there is a compiler for it."""
    choice = os.environ.get("PYENGINE_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"PYENGINE_CUDA must be 0 or 1, not {choice!r}")
    if choice:
        return choice == "1"
    import torch

    if torch.version.cuda is None:
        return False
    if find_nvcc() is None:
        # PyPI's torch for Linux is a CUDA build, which says nothing about the machine.
        print("torch is a CUDA build, but there is no nvcc: building for the CPU (PYENGINE_CUDA=1 insists)", file=sys.stderr)
        return False
    return True


def build_environment() -> dict[str, str]:
    """The environment for CMake: a venv's own cmake and ninja are found also where it is not activated, and so is nvcc."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=path) is None:
            raise SystemExit(f"building pyengine needs {tool}: pip install {tool}")
    environment = os.environ | {"PATH": path}
    nvcc = find_nvcc()
    return environment | {"CUDACXX": nvcc} if nvcc else environment


class CMakeBuild(build_ext):
    """One CMake run builds all extensions, _emulated too, and puts them where setuptools looks for them."""

    def run(self) -> None:
        require_torch()
        environment = build_environment()
        # In place: a build folder that stays, so that only what changed is compiled.
        build_dir = ROOT / "build" / "cmake" if self.inplace else Path(self.build_temp).resolve() / "cmake"
        output_dir = Path(self.get_ext_fullpath("pyengine._C")).resolve().parent
        build_dir.mkdir(parents=True, exist_ok=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        cmake = str(shutil.which("cmake", path=environment["PATH"]))
        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYENGINE_OUTPUT_DIR={output_dir}",
            f"-DPYENGINE_CUDA={'ON' if want_cuda() else 'OFF'}",
        ]
        # -k 0: what can be built is built, and all errors are shown.
        for command in (configure, [cmake, "--build", str(build_dir), "--", "-k", "0"]):
            status = subprocess.run(command, env=environment).returncode
            if status != 0:
                raise SystemExit(f"cmake failed with status {status}; what went wrong stands above")


setup(ext_modules=[Extension("pyengine._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
