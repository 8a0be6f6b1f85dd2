"""`make gpu-check`: builds, tests and measures pyengine on a machine with a GPU, in under 8 minutes, without a network.

1. Build for this GPU's architecture.
2. The kernel tests on the GPU against float64, and, beside them, the same kernels under compute-sanitizer.
3. Kernel benchmarks beside the device's own copy bandwidth and bf16 matmul rate, and torch's attention.
4. The engine's throughput on random weights in the shape of Llama 3 8B, beside Transformers' generate.

Needs the CUDA toolkit, cmake, ninja, pybind11, torch with CUDA, transformers, safetensors, numpy, pytest and hypothesis; plots
need matplotlib. `--device emulated` rehearses all of it, tiny, on a machine without a GPU. The output folder gets report.md,
report.json, plots and one log a step. A step that fails or runs out of time does not stop the others. Exit status 0: every
step passed; 1: one did not, and the table says which.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_report

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "benchmarks" / "gpu"
REQUIRED = ("torch", "transformers", "safetensors", "numpy", "pytest", "hypothesis", "pybind11", "setuptools")
#: Test files whose tests take the backend's fixture.
TESTS = (
    "cache_ops",
    "checkpoint_linear",
    "layer_ops",
    "merge_and_fused_ops",
    "paged_attention",
    "random_shapes",
    "sampling_ops",
)
MAX_ERROR = 0.02  # of a benchmark's attention output from torch's, in bf16


@dataclass
class Step:
    """One step's outcome."""

    name: str
    status: str  # passed, FAILED, or why it did not run
    seconds: float
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.status != "passed"


@dataclass
class Check:
    """What the whole run knows.

    Args:
        device: cuda or emulated.
        output: folder for logs and reports.
        deadline: no step runs beyond this moment of time.monotonic().
    """

    device: str
    output: Path
    deadline: float
    steps: list[Step] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def run(self, name: str, command: Sequence[str], limit: float, **environment: str) -> Step:
        """Run a command with its output in NAME.log; the step's detail is the log's last line."""
        limit = min(limit, self.deadline - time.monotonic())
        if limit <= 1:
            return self._add(Step(name, "NOT RUN: no time left", 0.0))
        print(f"gpu-check: {name} ...", flush=True)
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "kernels", os.environ.get("PYTHONPATH", ""))))
        env = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | environment
        log = self.output / f"{name.replace(' ', '-')}.log"
        begin = time.monotonic()
        with log.open("w") as file:
            try:
                code = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=limit).returncode
                status = "passed" if code == 0 else f"FAILED: exit status {code}"
            except subprocess.TimeoutExpired:
                status = f"FAILED: not done after {limit:.0f} s"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return self._add(Step(name, status, time.monotonic() - begin, lines[-1].strip()[:160] if lines else ""))

    def _add(self, step: Step) -> Step:
        self.steps.append(step)
        print(f"gpu-check: {step.name}: {step.status}, {step.seconds:.0f} s  {step.detail}", flush=True)
        return step

    def read(self, name: str) -> dict[str, Any]:
        """A benchmark's JSON; empty where it wrote none."""
        file = self.output / name
        return json.loads(file.read_text()) if file.exists() else {}


def architecture() -> str:
    """The GPU's compute capability as CMake writes it."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    first = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    return f"{first.replace('.', '')}-real"


def build(check: Check, jobs: int) -> Step:
    """The extension in place; on a GPU with the CUDA kernels for its architecture alone."""
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    if check.on_gpu:
        environment |= {"PYENGINE_CUDA": "1", "CUDAARCHS": architecture()}
    return check.run("build", [sys.executable, "setup.py", "build_ext", "--inplace"], 240, **environment)


def kernel_tests(check: Check, jobs: int) -> None:
    """Every kernel test that takes a backend, on this device."""
    backend = "cuda" if check.on_gpu else "mirror"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kernel-device", backend, "-k", backend]
    if check.on_gpu:
        command += [f"tests/kernels/test_{name}.py" for name in TESTS]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(max(1, jobs // 2))]
    else:
        command += ["tests/kernels/test_cache_ops.py::test_swap_blocks", "tests/kernels/test_sampling_ops.py::test_bitmask"]
    check.run("kernel tests", command, 150)


def sanitize(check: Check, tool: str, cases: str) -> None:
    """The small cases under one of compute-sanitizer's tools; in the rehearsal without it."""
    program = [sys.executable, "tests/kernels/device_cases.py", check.device, f"--cases={cases}"]
    if check.on_gpu:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        program = [sanitizer, "--tool", tool, "--error-exitcode", "9", *program]
    # Without torch's caching every tensor is an allocation of its own, whose bounds the tool knows.
    check.run(f"sanitizer {tool}", program, 150, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def verify(check: Check, jobs: int) -> None:
    """Tests and sanitizers: results only, so they may share the machine."""
    jobs_at_once = [
        lambda: kernel_tests(check, jobs),
        lambda: sanitize(check, "memcheck", "" if check.on_gpu else "copy_blocks,rotary,merge"),
        lambda: sanitize(check, "racecheck", "decode/bf16,decode/split,prefill/bf16,simt/decode,sample,rms_norm,linear"),
        lambda: sanitize(check, "synccheck", "decode/bf16,prefill/bf16,simt/decode,sample,rms_norm,linear"),
    ]
    with ThreadPoolExecutor(len(jobs_at_once) if check.on_gpu else 1) as pool:
        for job in [pool.submit(job) for job in jobs_at_once]:
            job.result()


def benchmark(check: Check) -> None:
    """Kernels, then the engine, each in a process of its own."""
    step = check.run("kernel benchmarks", bench_command(check, "kernels.py", "kernels.json"), 100)
    wrong = [r for r in check.read("kernels.json").get("results", []) if (r["error"] or 0) > MAX_ERROR]
    if wrong and not step.failed:
        step.status, step.detail = "FAILED: results differ from torch's", f"{wrong[0]['name']}: by {wrong[0]['error']:.3g}"
    seconds = max(10.0, min(150.0, check.deadline - time.monotonic() - 15))
    command = [*bench_command(check, "engine.py", "engine.json"), "--seconds", str(seconds - 15)]
    check.run("engine benchmarks", command, seconds + 15)


def bench_command(check: Check, script: str, output: str) -> list[str]:
    return [sys.executable, str(BENCH / script), "--device", check.device, "--output", str(check.output / output)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-check", help="folder for reports and logs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers and test processes at once")
    parser.add_argument("--minutes", type=float, default=7.75, help="for everything; what is not done then is left out")
    arguments = parser.parse_args()
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu-check: this Python ({sys.executable}) lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    begin = time.monotonic()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for stale in ("kernels.json", "engine.json"):
        (output / stale).unlink(missing_ok=True)
    check = Check(arguments.device, output, begin + arguments.minutes * 60)
    if not build(check, arguments.jobs).failed:
        verify(check, arguments.jobs)
        benchmark(check)
    report = {
        "device": check.read("kernels.json").get("device", arguments.device),
        "seconds": time.monotonic() - begin,
        "steps": [step.__dict__ for step in check.steps],
        "kernels": check.read("kernels.json"),
        "engine": check.read("engine.json"),
    }
    (output / "report.json").write_text(json.dumps(report, indent=1))
    text = gpu_report.markdown(report)
    (output / "report.md").write_text(text)
    print(text)
    print(f"gpu-check: {gpu_report.plots(report, output)}; {report['seconds']:.0f} s; all of it in {output}")
    failed = [step for step in check.steps if step.failed]
    for step in failed:
        print(f"gpu-check: {step.name}: {step.status}: {step.detail}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
