"""The four fixed workloads: prompts cut from the standard library's documentation, lengths drawn with a fixed seed.

Each `wN.json` is a list of `{"ids": prompt token ids, "n": output tokens}`:
w1 64 mixed requests (log-normal lengths); w2 32 requests that share a 512-token prefix; w3 one stream, 128 in and 128 out;
w4 one prompt of 2,048 tokens.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

MODULES = [
    "argparse",
    "asyncio",
    "collections",
    "decimal",
    "difflib",
    "doctest",
    "heapq",
    "http.client",
    "logging",
    "pickle",
    "re",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "threading",
    "typing",
    "unittest",
    "urllib.parse",
    "zipfile",
    "random",
    "fractions",
    "datetime",
    "json",
    "email",
]


class WorkloadRequest(TypedDict):
    ids: list[int]
    n: int


def load_workloads(folder: Path, tokenize: Callable[[str], list[int]]) -> dict[str, list[WorkloadRequest]]:
    """Read every `w*.json` in `folder`, by name; make w1 to w4 there if there are none.

    Args:
        folder: where the files are, or go; made if missing.
        tokenize: text to token ids of the model to be measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("w*.json")):
        for name, requests in make_workloads(tokenize).items():
            (folder / f"{name}.json").write_text(json.dumps(requests))
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("w*.json"))}


def documentation() -> str:
    """A few hundred kilobytes of English and Python, the same on every machine with the same Python."""
    docs = []
    for name in MODULES:
        members: dict[str, Any] = vars(importlib.import_module(name))
        docs += [d for n, o in members.items() if not n.startswith("_") and (d := inspect.getdoc(o)) and len(d) > 200]
    random.Random(0).shuffle(docs)
    return "\n\n".join(docs)


def make_workloads(tokenize: Callable[[str], list[int]]) -> dict[str, list[WorkloadRequest]]:
    """The four workloads for one tokenizer."""
    ids = tokenize(documentation())
    rng = random.Random(0)
    position = 0

    def take(count: int) -> list[int]:
        nonlocal position
        if position + count > len(ids):
            position = rng.randrange(len(ids) // 4)
        position += count
        return ids[position - count : position]

    def length(mu: float, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, int(rng.lognormvariate(mu, sigma))))

    def mixed() -> WorkloadRequest:
        return {"ids": take(length(4.3, 0.8, 8, 512)), "n": length(4.0, 0.7, 8, 256)}

    w1 = [mixed() for _ in range(64)]
    prefix = take(512)
    w2: list[WorkloadRequest] = [{"ids": prefix + take(32), "n": 32} for _ in range(32)]
    return {"w1": w1, "w2": w2, "w3": [{"ids": take(128), "n": 128}], "w4": [{"ids": take(2048), "n": 16}]}
