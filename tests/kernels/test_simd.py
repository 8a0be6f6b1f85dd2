"""csrc/cpu/simd.h: every conversion, rounding and operation, for each instruction set."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native import ISA_FLAGS, ROOT, compile_cpp, has_header, run_program

from pyengine.ops import load_core


@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_simd_vocabulary(isa: str, tmp_path: Path) -> None:
    program = compile_cpp(tmp_path / "simd_test", [ROOT / "tests" / "csrc" / "simd_test.cpp"], ISA_FLAGS[isa])
    if isa not in load_core().supported_isas():
        pytest.skip(f"this CPU lacks {isa}")
    run_program(program)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_simd_vocabulary_through_simde(isa: str, tmp_path: Path) -> None:
    """The same checks on any machine: the intrinsics emulated by SIMDe (Debian's libsimde-dev)."""
    if not has_header("simde/x86/avx512.h"):
        pytest.skip("SIMDe is not installed")
    defines = ["-DPE_SIMDE", "-Wno-psabi", f"-DPE_ISA={isa}", f"-DPE_SIMD_{isa.upper()}"]
    run_program(compile_cpp(tmp_path / "simd_test", [ROOT / "tests" / "csrc" / "simd_test.cpp"], defines))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_through_simde(tmp_path: Path) -> None:
    """Every kernel test of the AVX kernels, in a build whose AVX kernels run through SIMDe."""
    if not has_header("simde/x86/avx512.h"):
        pytest.skip("SIMDe is not installed")
    shutil.copytree(ROOT / "pyengine", tmp_path / "pyengine", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPYENGINE_OUTPUT_DIR={tmp_path / 'pyengine'}", "-DPYENGINE_SIMDE=ON"]
    build = str(tmp_path / "build")
    subprocess.run(["cmake", "-S", str(ROOT), "-B", build, "-G", "Ninja", *options], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "_C"], check=True)
    tests = [str(p) for p in sorted((ROOT / "tests" / "kernels").glob("test_*.py"))]
    pytest_args = ["-m", "pytest", "-m", "not slow", "-k", "cpu-avx", "-c", str(ROOT / "pyproject.toml"), *tests]
    result = subprocess.run([sys.executable, *pytest_args], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
