"""Run-time dispatch: which instruction set's kernels run, forcing one, and that no unit leaks code into another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native import ISA_FLAGS, ROOT, compile_cpp

from pyengine.ops import load_core

TOOL = ROOT / "tools" / "check_isa_symbols.py"


@pytest.fixture
def restore_isa() -> Iterator[None]:
    core = load_core()
    previous = core.get_isa()
    yield
    core.set_isa(previous)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )


def test_widest_supported_is_chosen() -> None:
    result = run_python(
        "from pyengine.ops import load_core as c; print(c().get_isa(), c().supported_isas()[-1])", PYENGINE_CPU_ISA=""
    )
    chosen, widest = result.stdout.split()
    assert chosen == widest


def test_supported_isas_follow_the_features() -> None:
    core, features = load_core(), load_core().cpu_features()
    expected = ["scalar"] + [isa for isa in ("avx2", "avx512", "avx512_vnni") if isa in core.isas() and features[isa]]
    if "amx" in core.isas() and features["avx512_vnni"] and features["amx_int8"] and features["amx_bf16"]:
        expected.append("amx")
    assert core.supported_isas() == expected


def test_features_agree_with_the_kernel() -> None:
    """/proc/cpuinfo lists what Linux found and enabled."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    if not lines:
        pytest.skip("not an x86 machine")
    flags = set(lines[0].split(":")[1].split())
    features = load_core().cpu_features()
    assert features["avx2"] == ({"avx2", "fma", "f16c"} <= flags)
    assert features["avx512"] == ({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags)
    assert features["avx512_vnni"] == (features["avx512"] and "avx512_vnni" in flags)
    assert features["amx_bf16"] <= ("amx_bf16" in flags)


def test_force_and_switch(restore_isa: None) -> None:
    core = load_core()
    for isa in core.supported_isas():
        core.set_isa(isa)
        assert core.get_isa() == isa


def test_unknown_isa_is_refused(restore_isa: None) -> None:
    core = load_core()
    before = core.get_isa()
    with pytest.raises(ValueError, match=r"unknown instruction set 'mmx' \(this build has scalar"):
        core.set_isa("mmx")
    assert core.get_isa() == before


def test_environment_forces_one() -> None:
    code = "from pyengine.ops import load_core; print(load_core().get_isa())"
    assert run_python(code, PYENGINE_CPU_ISA="scalar").stdout == "scalar\n"


def test_wrong_environment_is_one_clear_error() -> None:
    code = """
from pyengine.errors import ConfigError
from pyengine.ops import load_core
try:
    load_core()
except ConfigError as error:
    print(error.field, "|", error)
"""
    result = run_python(code, PYENGINE_CPU_ISA="mmx")
    assert result.stdout.startswith("PYENGINE_CPU_ISA | PYENGINE_CPU_ISA: unknown instruction set 'mmx'"), result.stderr


# ---- the rule that keeps AVX code out of shared symbols ------------------------------------------------------------

CLEAN = """
namespace pyengine::cpu { namespace PE_ISA {
template <class T> T twice(T x) { return x + x; }
int kernel(int x) { return twice(x); }
static int local(int x) { return x; }
int other(int x) { return local(x); }
} }
"""
LEAKING = """
template <class T> __attribute__((noinline)) T shared(T x) { return x + x; }
namespace pyengine::cpu { namespace PE_ISA { int kernel(int x) { return shared(x); } } }
"""


@pytest.mark.parametrize(("source", "leaks"), [(CLEAN, False), (LEAKING, True)], ids=["clean", "leaking"])
def test_symbol_check_sees_a_leak(source: str, leaks: bool, tmp_path: Path) -> None:
    unit = tmp_path / "unit.cpp"
    unit.write_text(source)
    compiled = compile_cpp(tmp_path / "unit.o", [unit], ["-c", *ISA_FLAGS["scalar"]])
    result = subprocess.run([sys.executable, str(TOOL), str(compiled)], capture_output=True, text=True, timeout=60)
    assert result.returncode == int(leaks)
    assert ("int shared<int>(int)" in result.stderr) == leaks


def test_kernel_units_leak_nothing() -> None:
    """The build runs this check too, and fails; here it runs over what the last build in place left."""
    objects = [
        p
        for isa in (*ISA_FLAGS, "avx512_vnni", "amx")
        for p in sorted((ROOT / "build" / "cmake" / "CMakeFiles" / f"cpu_{isa}.dir").rglob("*.o"))
    ]
    if not objects:
        pytest.skip("no build in place; the build itself ran the check")
    result = subprocess.run([sys.executable, str(TOOL), *map(str, objects)], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
