"""Whether one tenant's flood makes another wait.

    python benchmarks/fairness.py --out fairness.json
    python benchmarks/fairness.py --model MODEL --flood 200 --compare-fcfs --max-num-seqs 32

Tenant B sends one request at a time: first alone, then while tenant A has `--flood` requests in flight. The figure is B's 95th
percentile of the time to first token, which is to be no more than twice its value alone plus two loaded steps. A step is the
time between two tokens of A's streams; as B's wait is a 95th percentile, so is the step. `--compare-fcfs` sends the same to a
server without tenants. Unknown flags go to the server. The exit code is 1 if B waited longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

from serving import percentile, serve

KEYS = {"a": "FAIRNESS_KEY_A", "b": "FAIRNESS_KEY_B"}  # environment variables
PROMPT_LEN = 64
VOCABULARY = 32_000  # ids below are in every model's


@dataclass
class Flood:
    """What A's streams saw."""

    gaps: list[float] = field(default_factory=list)  # seconds between tokens
    num_tokens: int = 0
    seconds: float = 0.0


def request(rng: random.Random, max_tokens: int) -> pb.GenerateRequest:
    """A prompt that no other request has."""
    ids = [rng.randrange(100, VOCABULARY) for _ in range(PROMPT_LEN)]
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)


def key(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {os.environ[KEYS[tenant]]}"),)


async def ttft(stub: rpc.InferenceStub, rng: random.Random, output_len: int) -> float:
    """Seconds to the first token of one of B's requests, which is then read to its end."""
    start, first = time.perf_counter(), None
    async for message in stub.Generate(request(rng, output_len), metadata=key("b")):
        if message.token_ids and first is None:
            first = time.perf_counter() - start
    assert first is not None
    return first


async def stream(stub: rpc.InferenceStub, sent: pb.GenerateRequest, flood: Flood) -> None:
    last = None
    async for message in stub.Generate(sent, metadata=key("a")):
        now = time.perf_counter()
        if message.token_ids:
            flood.num_tokens += len(message.token_ids)
            if last is not None:
                flood.gaps.append((now - last) / len(message.token_ids))
            last = now


async def measure(target: str, flags: argparse.Namespace) -> tuple[list[float], list[float], Flood]:
    """B's times to first token alone, and during A's flood; and what A saw."""
    rng, flood = random.Random(flags.seed), Flood()
    async with grpc.aio.insecure_channel(target, options=[("grpc.max_concurrent_streams", 2**20)]) as channel:
        stub = rpc.InferenceStub(channel)
        await ttft(stub, rng, flags.short_output)  # whatever the first request of a server pays for
        alone = [await ttft(stub, rng, flags.short_output) for _ in range(flags.probes)]
        start = time.perf_counter()
        lengths = [rng.randint(flags.long_output // 2, flags.long_output * 3 // 2) for _ in range(flags.flood)]
        sent = [request(rng, length) for length in lengths]
        streams = [asyncio.create_task(stream(stub, one, flood)) for one in sent]
        while len(flood.gaps) < flags.flood:  # until A has every slot
            await asyncio.sleep(0.05)
        loaded = []
        while len(loaded) < flags.probes and not any(task.done() and task.exception() for task in streams):
            if sum(not task.done() for task in streams) < flags.flood // 5:
                break  # the flood is ebbing
            loaded.append(await ttft(stub, rng, flags.short_output))
        await asyncio.gather(*streams)
        flood.seconds = time.perf_counter() - start
    return alone, loaded, flood


def report(name: str, alone: list[float], loaded: list[float], flood: Flood) -> dict[str, float]:
    step = percentile(flood.gaps, 95)
    figures = {
        "unloaded_ttft_p95_ms": 1e3 * percentile(alone, 95),
        "loaded_ttft_p50_ms": 1e3 * percentile(loaded, 50),
        "loaded_ttft_p95_ms": 1e3 * percentile(loaded, 95),
        "loaded_step_p50_ms": 1e3 * percentile(flood.gaps, 50),
        "loaded_step_p95_ms": 1e3 * step,
        "bound_ms": 1e3 * (2 * percentile(alone, 95) + 2 * step),
        "probes": float(len(loaded)),
        "a_tokens_per_s": flood.num_tokens / flood.seconds,
    }
    print(f"\n{name}: B's TTFT p95 {figures['unloaded_ttft_p95_ms']:.1f} ms alone ({len(alone)} requests)")
    during = f"p50 {figures['loaded_ttft_p50_ms']:.1f} ms, p95 {figures['loaded_ttft_p95_ms']:.1f} ms"
    print(f"  during A's flood {during} ({len(loaded)} requests)")
    print(f"  a loaded step takes {figures['loaded_step_p50_ms']:.1f} ms (p95 {figures['loaded_step_p95_ms']:.1f} ms)")
    print(f"  twice its value alone plus two loaded steps: {figures['bound_ms']:.1f} ms")
    print(f"  A got {figures['a_tokens_per_s']:.1f} tokens/s")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model by default")
    parser.add_argument("--flood", type=int, default=200, help="A's requests")
    parser.add_argument("--probes", type=int, default=20, help="B's requests, alone and at most that many during the flood")
    parser.add_argument("--long-output", type=int, default=48, help="tokens of A's requests, on average")
    parser.add_argument("--short-output", type=int, default=8, help="tokens of B's requests")
    parser.add_argument("--compare-fcfs", action="store_true", help="the same without tenants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="figures as JSON")
    flags, rest = parser.parse_known_args()
    for variable in KEYS.values():
        os.environ.setdefault(variable, f"sk-{random.SystemRandom().getrandbits(128):032x}")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.json"
        entries = [{"name": name, "api_keys": [{"env": variable}]} for name, variable in KEYS.items()]
        path.write_text(json.dumps({"tenants": entries}))
        modes = {"tenants": [*rest, "--tenants", str(path)]}
        if flags.compare_fcfs:
            modes["first come, first served"] = rest
        for name, extra in modes.items():
            with serve(flags.model, extra) as target:
                results[name] = report(name, *asyncio.run(measure(target, flags)))
    if flags.out is not None:
        flags.out.write_text(json.dumps(results, indent=2))
    is_fair = results["tenants"]["loaded_ttft_p95_ms"] <= results["tenants"]["bound_ms"]
    print("\nB waited no longer than that" if is_fair else "\nB WAITED LONGER THAN THAT")
    return 0 if is_fair else 1


if __name__ == "__main__":
    raise SystemExit(main())
