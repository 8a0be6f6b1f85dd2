"""csrc/cpu/simd.h: every conversion, rounding and operation, for each instruction set."""

from __future__ import annotations

from pathlib import Path

import pytest
from native import ISA_FLAGS, ROOT, compile_cpp, run_program

from pyengine.ops import load_core


@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_simd_vocabulary(isa: str, tmp_path: Path) -> None:
    program = compile_cpp(tmp_path / "simd_test", [ROOT / "tests" / "csrc" / "simd_test.cpp"], ISA_FLAGS[isa])
    if isa not in load_core().supported_isas():
        pytest.skip(f"this CPU lacks {isa}")
    run_program(program)
