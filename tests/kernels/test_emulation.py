"""The CUDA kernels in emulation: the same bits in every thread order, and, in the sanitizer build, no finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation_build import build_module
from emulation_cases import CASES, check_case
from emulation_run import run_cases

from pyengine.ops import load_emulated


@pytest.mark.parametrize("name", CASES)
def test_every_order_gives_the_same_bits(name: str) -> None:
    check_case(name, load_emulated())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sanitizer_finds_nothing(tmp_path: Path) -> None:
    result = run_cases(build_module(tmp_path / "_emulated.so", sanitizer=True))
    assert result.returncode == 0, result.stdout + result.stderr


def test_unknown_order_is_an_error() -> None:
    with pytest.raises(ValueError, match="sideways"):
        load_emulated().emulated_set_schedule("sideways")
