"""Time to the first token of a fresh process, and its peak memory.

    python benchmarks/startup.py --out startup

Each start is a process of its own that imports torch, transformers and grpc, then loads the model and generates one token, then
serves a context of 512 tokens. A first start has an empty tokenizer cache, a second one finds it filled; whether the weights
are in the system's page cache is the system's matter. Seconds and memory are those beyond the imports. Writes startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROCESS = """
import json, sys, time
start = time.perf_counter()
import torch, transformers, grpc

def peak_megabytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) / 1024

imported, base = time.perf_counter(), peak_megabytes()
from pyengine import LLM, SamplingParams
settings = json.loads(sys.argv[1])
with LLM(max_model_len=512, **settings) as llm:
    llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    first_token = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    llm.generate({"prompt_token_ids": list(range(100, 548))}, params, use_tqdm=False)
print(json.dumps({
    "import_seconds": imported - start,
    "first_token_seconds": first_token - imported,
    "peak_megabytes": peak_megabytes() - base,
}))
"""


def start(settings: dict[str, Any], cache: str) -> dict[str, float]:
    environment = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PROCESS, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for startup.json")
    parser.add_argument("--model", help="GGUF file or Hugging Face folder; the default model by default")
    parser.add_argument("--quantization", help="as the engine takes it")
    parser.add_argument("--repack", default="auto", help="as the engine takes it")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    settings = {"model": flags.model, "quantization": flags.quantization, "repack": flags.repack}
    runs: dict[str, list[dict[str, float]]] = {"first start": [], "second start": []}
    for _ in range(flags.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name in runs:
                runs[name].append(start(settings, cache))
    for name, figures in runs.items():
        columns = {key: [run[key] for run in figures] for key in figures[0]}
        row = ", ".join(f"{key} {statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for key, v in columns.items())
        print(f"{name}: {row}")
    (flags.out / "startup.json").write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
