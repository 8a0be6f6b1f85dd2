"""Compiles and runs the C++ tests of tests/csrc. The build needs a C++ compiler, so its absence is a failure here too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Compiler flags of each instruction set, as CMakeLists.txt has them.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
ISA_FLAGS = {
    "scalar": ("-DPE_ISA=scalar",),
    "avx2": ("-DPE_ISA=avx2", "-DPE_SIMD_AVX2", *_AVX2),
    "avx512": (
        *("-DPE_ISA=avx512", "-DPE_SIMD_AVX512", *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    ),
}


def compile_cpp(output: Path, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """Compile with warnings as errors; returns `output`."""
    command = [
        os.environ.get("CXX", "g++"),
        *("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"),
        *flags,
        *map(str, sources),
        *("-o", str(output)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    return output


def run_program(program: Path, *args: str) -> None:
    """Run a test program; it must exit with 0 and print nothing on stderr."""
    result = subprocess.run([str(program), *args], capture_output=True, text=True, timeout=250)
    assert (result.returncode, result.stderr) == (0, "")


def has_header(name: str) -> bool:
    """Whether the compiler finds `#include <name>`."""
    command = [os.environ.get("CXX", "g++"), "-E", "-x", "c++", "-"]
    return subprocess.run(command, input=f"#include <{name}>", capture_output=True, text=True).returncode == 0
