"""The benchmarks run, and what they say of quality holds. Nothing here looks at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_benchmark(name: str, *arguments: object) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_default_model_keeps_its_predictions(tmp_path: Path) -> None:
    """On 2,048 tokens of real text: Q4_1 and Q8_0 weights, as they are or repacked, and a bfloat16 cache against fp32."""
    out = tmp_path / "quality.json"
    variants = ("--variant", "blocks:repack=none", "--variant", "repacked:repack=int8")
    run_benchmark("quality", "--tokens", 2048, *variants, "--out", out)
    for figures in json.loads(out.read_text())["variants"].values():
        assert figures["positions"] == 2046
        assert figures["mean_kl"] < 0.01
        assert abs(figures["perplexity_change"]) < 0.01
        assert figures["same_top_1"] > 0.95


def write_workloads(folder: Path) -> dict[str, list[dict[str, Any]]]:
    folder.mkdir()
    workloads: dict[str, list[dict[str, Any]]] = {
        "w1": [{"ids": list(range(10, 30)), "n": 6}, {"ids": list(range(40, 90)), "n": 9}],
        "w3": [{"ids": list(range(10, 30)), "n": 5}],
    }
    for name, requests in workloads.items():
        (folder / f"{name}.json").write_text(json.dumps(requests))
    return workloads


@pytest.mark.slow
def test_peers_keeps_tokens_and_ratios(tmp_path: Path) -> None:
    out = tmp_path / "peers"
    workloads = write_workloads(out)
    run_benchmark("peers", "--out", out, "--rounds", 2, "--workloads", "w3", "w1")
    report = json.loads((out / "peers.json").read_text())
    assert report["output_tokens"] == {"w3": 5, "w1": 15}
    for name, requests in workloads.items():
        row = report["table"][name]["pyengine"]["tokens_per_s"]
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert row["rounds"] == 2
        first, second = (json.loads((out / "tokens" / f"pyengine-{i}" / f"{name}.json").read_text()) for i in range(2))
        assert first == second
        assert [len(ids) for ids in first] == [request["n"] for request in requests]
    assert (out / "peers.png").stat().st_size > 1000


def test_peers_names_what_it_cannot_use(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for arguments, message in ((["--peer", "ollama=python"], "NAME of openvino"), (["--peer", "vllm=python"], "needs --fp32")):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 2
        assert message in done.stderr


def test_programs_can_be_limited_to_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from limited_cpu import limited_environment
    from machine import cpu_flags

    if not {"cpuid_fault", "avx2"} <= cpu_flags():
        with pytest.raises(SystemExit, match="cpuid_fault"):
            limited_environment("avx2", tmp_path)
        return
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    seen = (
        "import signal, torch; from pyengine.ops import load_core;"
        "signal.signal(signal.SIGTERM, lambda *_: None);"
        "print(torch.backends.cpu.get_cpu_capability(), load_core().get_isa())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("PYENGINE_CPU_ISA", "ATEN_CPU_CAPABILITY")}
    environment |= {"PYTHONPATH": str(ROOT)} | limited_environment("avx2", tmp_path)
    for command in ([seen], [child, seen]):  # a process, and a child of one
        done = subprocess.run([sys.executable, "-c", *command], capture_output=True, text=True, env=environment, timeout=120)
        assert (done.returncode, done.stdout.split()) == (0, ["AVX2", "avx2"]), done.stderr
    crash = subprocess.run([sys.executable, "-c", "import ctypes; ctypes.string_at(0)"], env=environment, timeout=120)
    assert crash.returncode == -signal.SIGSEGV, "other faults must end a program as they do without"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repack", "kernel", "operations", "weight_bytes"),
    [
        ("none", "quantized_linear 1536 to 576, Q4_1", 2, 1536 * 576 * 20 // 32),
        ("int8", "w8a16_linear 1536 to 576", 4, 1536 * 576 * (1 + 8 / 512)),  # two floats for each group of values
    ],
)
def test_profile_accounts_for_every_kernel(
    repack: str, kernel: str, operations: int, weight_bytes: float, tmp_path: Path
) -> None:
    sizes = ("--decode", 3, "--prefill", 40, "--context", 20, "--repeats", 2)
    run_benchmark("profile_step", "--out", tmp_path, "--repack", repack, *sizes)
    report = json.loads((tmp_path / "profile.json").read_text())
    assert [step["name"] for step in report["steps"]] == ["decode, batch 3", "prefill of 40"]
    # The last layer computes only the rows whose logits are wanted: each sequence's last.
    for step, rows_of_all_layers in zip(report["steps"], (30 * 3, 29 * 40 + 1), strict=True):
        rows = {row["kernel"]: row for row in step["kernels"]}
        assert sum(row["share_of_step"] for row in rows.values()) == pytest.approx(1)
        down = rows[kernel]
        assert down["calls"] == rows["paged_attention"]["calls"] == 30
        assert down["operations"] == rows_of_all_layers * operations * 1536 * 576
        assert down["bytes"] == 30 * weight_bytes + rows_of_all_layers * 4 * (1536 + 576)
    assert report["steps"][0]["engine"]["step_seconds"] > 0
    assert report["steps"][1]["engine"] is None
    assert (tmp_path / "profile.png").stat().st_size > 1000


@pytest.mark.slow
def test_mixed_load_compares_the_short_streams(tmp_path: Path) -> None:
    sizes = ("--rounds", 2, "--short", 4, "--short-output", 200, "--long", 2, "--long-input", 200, "--long-delay", 0.1)
    run_benchmark("mixed_load", "--out", tmp_path, *sizes, "--max-model-len", 512)
    report = json.loads((tmp_path / "mixed_load.json").read_text())
    assert len(report["rounds"]) == 2
    for entry in report["rounds"]:
        assert entry["ratio"] == pytest.approx(entry["mixed_p99_ms"] / entry["alone_median_ms"])
    assert (tmp_path / "mixed_load.png").stat().st_size > 1000


@pytest.mark.slow
def test_contention_says_what_is_left(tmp_path: Path) -> None:
    out = tmp_path / "contention"
    write_workloads(out)
    run_benchmark("contention", "--out", out, "--rounds", 1, "--busy", 2)
    report = json.loads((out / "contention.json").read_text())
    assert report["share_kept"]["pyengine"]["w1"]["rounds"] == 1
    assert report["fair_share"] == report["machine"]["cores"] / (report["machine"]["cores"] + 2)


@pytest.mark.slow
def test_startup_reports_each_kind_of_start(tmp_path: Path) -> None:
    run_benchmark("all", "--out", tmp_path, "--only", "startup", "--rounds", 1)
    report = json.loads((tmp_path / "startup" / "startup.json").read_text())
    for name in ("first start", "second start"):
        (figures,) = report[name]
        assert figures["first_token_seconds"] > 0
        assert 0 < figures["peak_megabytes"] < 400
    assert "second start" in (tmp_path / "startup" / "report.txt").read_text()
