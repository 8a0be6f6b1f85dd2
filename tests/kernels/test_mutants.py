"""A test of the tests: bugs planted in the CUDA sources must be caught by the cases of emulation_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation_build import build_module, build_mutant
from emulation_run import run_cases
from mutants import MUTANTS, Mutant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sanitizer"])
def unchanged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_module(tmp_path_factory.mktemp("unchanged") / "_emulated.so", sanitizer=request.param)


def test_unchanged_sources_pass(unchanged: Path) -> None:
    result = run_cases(unchanged)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_caught(mutant: Mutant, tmp_path: Path) -> None:
    changes = {mutant.file: (mutant.old, mutant.new)}
    module = build_mutant(tmp_path, changes, mutant.units, sanitizer=mutant.sanitizer)
    result = run_cases(module, mutant.cases)
    # 3: a case failed and said so. Below 0: the bug crashed the process.
    assert result.returncode == 3 or result.returncode < 0, f"not caught: {result.returncode}\n{result.stdout}{result.stderr}"


def test_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
