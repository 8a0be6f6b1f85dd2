"""Online serving: open-loop Poisson arrivals over gRPC, latency percentiles and a plot.

    python benchmarks/serving.py --target 127.0.0.1:50051 --num-prompts 100 --request-rate 4 --out serving.png
    python benchmarks/serving.py --compare-static --num-prompts 300 --out static.png --max-num-seqs 64

Arrivals do not wait for answers (open loop), so a server that falls behind shows it in its latencies; `--concurrency` bounds
the requests in flight instead, `--request-rate inf` sends them all at once. Latencies are the client's: time to first token
(TTFT) from the moment a request was due, time between messages with tokens (ITL, divided by the tokens they bring), end to end
(E2E). Without `--target` the benchmark starts the server itself (engine flags pass through); `--compare-static` then runs the
same load against the same engine with static batching too, and prints the ratios. PYENGINE_API_KEY is the key of the server at
`--target`, where it asks for one.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tqdm import tqdm

from pyengine.client import explain
from pyengine.server.auth import KEY_VARIABLE
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

from workloads import documentation

PERCENTILES = (50, 90, 99)


def key_metadata() -> list[tuple[str, str]]:
    """What proves to the server that we may call it."""
    key = os.environ.get(KEY_VARIABLE)
    return [("authorization", f"Bearer {key}")] if key else []


@dataclass(frozen=True)
class Load:
    """What is sent, and when: the same for every server that is compared."""

    prompts: list[list[int]]
    output_lens: list[int]
    due: list[float]  # seconds after the start


@dataclass
class Trace:
    """One request as the client saw it; times in seconds from the start of the run."""

    due: float
    token_times: list[tuple[float, int]] = field(default_factory=list)  # (arrival, tokens in the message)
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0][0] - self.due

    @property
    def e2e(self) -> float:
        return self.token_times[-1][0] - self.due

    def inter_token_latencies(self) -> list[float]:
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return [(t1 - t0) / tokens for (t0, _), (t1, tokens) in pairs for _ in range(tokens)]


def percentile(values: list[float], p: float) -> float:
    """Nearest-rank percentile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] if ordered else math.nan


def make_load(flags: argparse.Namespace, ids: list[int]) -> Load:
    """Mixed short and long requests cut from `ids`; lengths and arrivals are drawn with the seed."""
    rng = random.Random(flags.seed)
    prompts, output_lens, due = [], [], []
    clock = 0.0
    for _ in range(flags.num_prompts):
        long = rng.random() < flags.long_share
        prompt_len = rng.randint(*((flags.long_input // 2, flags.long_input) if long else (8, flags.short_input)))
        start = rng.randrange(len(ids) - prompt_len)
        prompts.append(ids[start : start + prompt_len])
        output_lens.append(rng.randint(*((flags.long_output // 2, flags.long_output) if long else (4, flags.short_output))))
        due.append(clock)
        if math.isfinite(flags.request_rate):
            clock += rng.expovariate(flags.request_rate)
    return Load(prompts, output_lens, due)


async def send(stub: rpc.InferenceStub, load: Load, i: int, start: float, slots: asyncio.Semaphore) -> Trace:
    """Send request i when it is due and trace its stream."""
    trace = Trace(due=load.due[i])
    await asyncio.sleep(max(0.0, start + load.due[i] - time.perf_counter()))
    async with slots:
        sampling = pb.SamplingParams(temperature=0, max_tokens=load.output_lens[i], ignore_eos=True, detokenize=False)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=load.prompts[i]), sampling=sampling)
        try:
            async for message in stub.Generate(request, metadata=key_metadata()):
                if message.token_ids:
                    trace.token_times.append((time.perf_counter() - start, len(message.token_ids)))
        except grpc.aio.AioRpcError as error:
            trace.error = f"{error.code().name}: {error.details()}"
    return trace


async def run(target: str, load: Load, concurrency: int | None) -> list[Trace]:
    """Put the whole load on the server and wait for every answer."""
    options = [("grpc.max_concurrent_streams", 2**20)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub = rpc.InferenceStub(channel)
        slots = asyncio.Semaphore(concurrency or len(load.prompts))
        start = time.perf_counter()
        tasks = [asyncio.create_task(send(stub, load, i, start, slots)) for i in range(len(load.prompts))]
        with tqdm(total=len(tasks), unit="req", disable=not sys.stderr.isatty()) as bar:
            for task in tasks:
                task.add_done_callback(lambda _: bar.update())
            return list(await asyncio.gather(*tasks))


def summarise(name: str, traces: list[Trace]) -> dict[str, float]:
    """Print one server's table; return its figures, latencies in milliseconds."""
    done = [t for t in traces if t.error is None and t.token_times]
    failed = [t.error for t in traces if t.error is not None]
    seconds = max((t.token_times[-1][0] for t in done), default=math.nan)
    tokens = sum(count for t in done for _, count in t.token_times)
    figures = {
        "completed": float(len(done)),
        "failed": float(len(failed)),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "tokens_per_s": tokens / seconds,
        "ttft_mean_ms": 1e3 * sum(t.ttft for t in done) / max(1, len(done)),
    }
    series = {
        "ttft": [t.ttft for t in done],
        "itl": [x for t in done for x in t.inter_token_latencies()],
        "e2e": [t.e2e for t in done],
    }
    print(f"\n{name}: {len(done)} completed, {len(failed)} failed, {seconds:.1f} s")
    print(f"  {figures['requests_per_s']:.2f} requests/s, {figures['tokens_per_s']:.1f} tokens/s")
    for key, values in series.items():
        for p in PERCENTILES:
            figures[f"{key}_p{p}_ms"] = 1e3 * percentile(values, p)
        row = "  ".join(f"p{p} {figures[f'{key}_p{p}_ms']:9.1f}" for p in PERCENTILES)
        mean = 1e3 * sum(values) / max(1, len(values))
        print(f"  {key.upper():4} ms  mean {mean:9.1f}  {row}")
    for error in sorted({e for e in failed if e})[:3]:
        print(f"  failed with {error}")
    return figures


def plot(results: dict[str, list[Trace]], path: Path) -> None:
    """Distribution of TTFT, ITL and E2E, one line a server, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    for name, traces in results.items():
        done = [t for t in traces if t.error is None and t.token_times]
        columns = ([t.ttft for t in done], [x for t in done for x in t.inter_token_latencies()], [t.e2e for t in done])
        for axis, values in zip(axes, columns, strict=True):
            ordered = sorted(values)
            axis.plot([1e3 * v for v in ordered], [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
    for axis, title in zip(axes, ("Time to first token", "Inter-token latency", "End-to-end latency"), strict=True):
        axis.set(title=title, xlabel="ms", ylabel="share of samples", xscale="log", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    print(f"\nplot: {path}")


@contextmanager
def serve(model: str | None, extra: list[str]) -> Iterator[str]:
    """Run a server (None: of the default model) on a free port; yield its target; stop it and check that it left cleanly.

    It asks for no key of its own, whatever the environment says: the one there is another server's.
    """
    chosen = [] if model is None else ["--model", model]
    command = [sys.executable, "-m", "pyengine.server", *chosen, "--port", "0", *extra]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        log = []
        for line in process.stderr:
            found = re.search(r"(?:serving|listening) on (127\.0\.0\.1:\d+)", line)
            if found:
                break
            log.append(line)
        else:
            raise SystemExit(f"the server did not start: {' '.join(command)}\n{''.join(log[-20:]).rstrip()}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # keep its log from filling the pipe
        yield found.group(1)
    finally:
        process.terminate()
        status = process.wait(timeout=120)
    if status != 0:
        raise SystemExit(f"the server left with exit code {status}")


def parse_flags() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--target", help="HOST:PORT of a running server; by default one is started, and unknown flags go to it")
    where.add_argument("--model", help="of the server that is started; the default model by default")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--request-rate", type=float, default=math.inf, help="mean arrivals a second; inf: all at once")
    parser.add_argument("--concurrency", type=int, help="most requests in flight; unbounded by default")
    parser.add_argument("--compare-static", action="store_true", help="the same load with static batching, and ratios")
    parser.add_argument("--long-share", type=float, default=0.1, help="share of requests that are long")
    parser.add_argument("--short-input", type=int, default=64)
    parser.add_argument("--short-output", type=int, default=24)
    parser.add_argument("--long-input", type=int, default=512)
    parser.add_argument("--long-output", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("serving.png"), help="the plot; figures go beside it as JSON")
    flags, rest = parser.parse_known_args()
    if flags.target and (rest or flags.compare_static):
        parser.error(f"without --target only: {' '.join(rest) or '--compare-static'}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, "error: the plot needs matplotlib: pip install matplotlib, or make dev\n")
    return flags, rest


def measure(target: str, flags: argparse.Namespace) -> list[Trace]:
    """Tokenise the corpus at the server, then run the load on it. A server that does not answer ends the program."""
    with grpc.insecure_channel(target) as channel:
        request = pb.TokenizeRequest(text=documentation()[:200_000])
        try:
            ids = list(rpc.InferenceStub(channel).Tokenize(request, timeout=60, metadata=key_metadata()).token_ids)
        except grpc.RpcError as error:
            hint = f"; set {KEY_VARIABLE}" if error.code() is grpc.StatusCode.UNAUTHENTICATED else ""
            raise SystemExit(f"error: {explain(error, target, 'the benchmark speaks no TLS')}{hint}") from None
    return asyncio.run(run(target, make_load(flags, ids), flags.concurrency))


def main() -> None:
    flags, rest = parse_flags()
    results: dict[str, list[Trace]] = {}
    if flags.target:
        results["server"] = measure(flags.target, flags)
    else:
        modes = {"continuous": rest, **({"static": [*rest, "--static-batching"]} if flags.compare_static else {})}
        for name, extra in modes.items():
            with serve(flags.model, extra) as target:
                results[name] = measure(target, flags)
    figures = {name: summarise(name, traces) for name, traces in results.items()}
    if flags.compare_static:
        a, b = figures["continuous"], figures["static"]
        names = {"mean TTFT": "ttft_mean_ms", "requests/s": "requests_per_s", "tokens/s": "tokens_per_s"}
        print("\ncontinuous / static: " + ", ".join(f"{name} {a[key] / b[key]:.2f}x" for name, key in names.items()))
    flags.out.with_suffix(".json").write_text(json.dumps(figures, indent=2))
    plot(results, flags.out)


if __name__ == "__main__":
    main()
