"""`make gpu-check`, rehearsed on the emulated device: all of its own code runs before a GPU is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Packages that a GPU machine need not have.
ABSENT = ("fastapi", "gguf", "smg_grpc_proto", "grpc_health", "accelerate")
_HIDE = f"""
import sys
class Hidden:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("gpu-check")
    (folder / "sitecustomize.py").write_text(_HIDE)
    command = [sys.executable, "tools/gpu_check.py", "--device", "emulated", "--output", str(folder / "out"), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    return result, folder / "out"


def test_every_step_passes(rehearsal: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, folder = rehearsal
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in folder.glob("*.log"))
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr}\n{logs}"
    report = json.loads((folder / "report.json").read_text())
    names = [step["name"] for step in report["steps"]]
    sanitizers = ["sanitizer memcheck", "sanitizer racecheck", "sanitizer synccheck"]
    assert names == ["build", "kernel tests", *sanitizers, "kernel benchmarks", "engine benchmarks"]
    assert {step["status"] for step in report["steps"]} == {"passed"}


def test_report_has_what_a_reader_wants(rehearsal: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = rehearsal
    report = json.loads((folder / "report.json").read_text())
    results = report["kernels"]["results"]
    assert {"decode", "prefill", "memory", "linear", "swap"} <= {result["group"] for result in results}
    assert all(result["share"] > 0 for result in results if result["group"] != "swap")
    compared = [result for result in results if result["baseline"] == "torch SDPA"]
    assert compared
    assert all(0 < result["error"] < 0.02 for result in compared)
    assert [row["num_seqs"] for row in report["engine"]["pyengine"]] == [1, 2, 4]
    assert [row["num_seqs"] for row in report["engine"]["transformers"]] == [1, 2, 4]
    assert 0 < report["engine"]["ragged"]["kv_utilisation"] <= 1
    text = (folder / "report.md").read_text()
    assert "| decode | bfloat16, 2 x 40 |" in text
    assert all((folder / name).stat().st_size > 1000 for name in ("kernels.png", "engine.png"))


def test_failures_are_in_the_table_and_in_the_status(tmp_path: Path) -> None:
    """A run without time fails, and says of each step that it did not run."""
    command = [sys.executable, "tools/gpu_check.py", "--device", "emulated", "--output", str(tmp_path), "--minutes", "0.001"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "build: NOT RUN: no time left" in result.stderr
