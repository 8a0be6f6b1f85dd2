"""What the runners of this folder share. Each runs in its own engine's Python, so this needs the standard library only.

    PYTHON RUNNER.py MODEL WORKLOADS OUT w3 w1 ...

WORKLOADS is a folder of `wN.json` (benchmarks/workloads.py). A runner loads the model once, runs the workloads named, prints
`RES WORKLOAD TOKENS_PER_S SECONDS` for each, and writes its tokens to `OUT/wN.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: `{"ids": prompt token ids, "n": output tokens}`
Request = dict[str, Any]
#: `{"text": ..., "num_tokens": ...}`, from an engine that does not give token ids
Text = dict[str, Any]


def num_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parser() -> argparse.ArgumentParser:
    """The arguments that every runner takes; one with options adds its own."""
    result = argparse.ArgumentParser()
    result.add_argument("model", help="GGUF file or Hugging Face folder, as the engine wants it")
    result.add_argument("workloads", type=Path)
    result.add_argument("out", type=Path)
    result.add_argument("names", nargs="+", metavar="wN")
    return result


def run(flags: argparse.Namespace, generate: Callable[[str, list[Request]], Sequence[list[int] | Text]]) -> None:
    """Time `generate(workload, requests)`, which returns each request's output."""
    for name in flags.names:
        requests = json.loads((flags.workloads / f"{name}.json").read_text())
        start = time.perf_counter()
        outputs = generate(name, requests)
        seconds = time.perf_counter() - start
        lengths = [output["num_tokens"] if isinstance(output, dict) else len(output) for output in outputs]
        wanted = [request["n"] for request in requests]
        if lengths != wanted:
            raise SystemExit(f"{name}: output lengths are {lengths}, not {wanted}: the figures would not compare")
        (flags.out / f"{name}.json").write_text(json.dumps(outputs))
        print(f"RES {name} {sum(lengths) / seconds:.3f} {seconds:.3f}", flush=True)
