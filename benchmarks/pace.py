"""What --target-itl-ms holds, and what it costs: a ramp of load, with and without it.

    python benchmarks/pace.py --target 60 --out pace.png
    python benchmarks/pace.py --model MODEL --target 100 --rates 1,2,4 --seconds 15

At each rate requests arrive at random (Poisson) for `--seconds`: prompts of 32 to 256 tokens, outputs of 16 to 64. The same
requests at the same times go to a server without a target and to one with it, both started here. Printed for each rate: the
95th percentile of the time between two tokens, tokens a second, and the median time to first token; then the throughput that
the target gave up where load was highest. Unknown flags go to the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import grpc

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

from serving import Load, Trace, percentile, run, serve

VOCABULARY = 32_000  # ids below are in every model's


def make_load(rate: float, seconds: float, seed: int) -> Load:
    """Arrivals at random; no two prompts share anything."""
    rng = random.Random(seed)
    prompts, output_lens, due, clock = [], [], [], 0.0
    while (clock := clock + rng.expovariate(rate)) < seconds:
        prompts.append([rng.randrange(100, VOCABULARY) for _ in range(rng.randint(32, 256))])
        output_lens.append(rng.randint(16, 64))
        due.append(clock)
    return Load(prompts, output_lens, due)


def warm_up(target: str) -> None:
    """One request, for what the first of a server pays for."""
    with grpc.insecure_channel(target) as channel:
        sampling = pb.SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100, 228)), sampling=sampling)
        rpc.InferenceStub(channel).Complete(request, timeout=300)


def figures(traces: list[Trace]) -> dict[str, float]:
    failed = [trace.error for trace in traces if trace.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    seconds = max(trace.token_times[-1][0] for trace in traces)
    return {
        "itl_p95_ms": 1e3 * percentile([gap for trace in traces for gap in trace.inter_token_latencies()], 95),
        "tokens_per_s": sum(count for trace in traces for _, count in trace.token_times) / seconds,
        "ttft_p50_ms": 1e3 * percentile([trace.ttft for trace in traces], 50),
        "requests": float(len(traces)),
    }


def plot(results: dict[str, dict[float, dict[str, float]]], target: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    titles = {
        "itl_p95_ms": "Time between tokens, p95, ms",
        "tokens_per_s": "Tokens/s",
        "ttft_p50_ms": "Time to first token, p50, ms",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for label, by_rate in results.items():
            axis.plot(list(by_rate), [entry[name] for entry in by_rate.values()], marker="o", label=label)
        axis.set(title=title, xlabel="requests a second", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].axhline(target, color="grey", linestyle="--", label="target")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    print(f"\nplot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model by default")
    parser.add_argument("--target", type=float, required=True, help="ms between two tokens")
    parser.add_argument("--rates", default="1,2,4", help="requests a second, ascending")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("pace.png"), help="the plot; figures go beside it as JSON")
    flags, rest = parser.parse_known_args()
    rates = [float(rate) for rate in flags.rates.split(",")]
    results: dict[str, dict[float, dict[str, float]]] = {}
    for label, extra in (("without", ["--target-itl-ms", "0"]), ("with", ["--target-itl-ms", str(flags.target)])):
        results[label] = {}
        with serve(flags.model, [*rest, *extra]) as target:
            warm_up(target)
            for i, rate in enumerate(rates):
                load = make_load(rate, flags.seconds, flags.seed + i)
                start = time.perf_counter()
                entry = results[label][rate] = figures(asyncio.run(run(target, load, None)))
                took = time.perf_counter() - start
                latencies = f"ITL p95 {entry['itl_p95_ms']:7.1f} ms, TTFT p50 {entry['ttft_p50_ms']:8.1f} ms"
                size = f"{entry['requests']:.0f} requests, {took:.1f} s"
                print(f"{label:8} {rate:5.1f}/s: {latencies}, {entry['tokens_per_s']:7.1f} tokens/s ({size})", flush=True)
    last = rates[-1]
    kept = results["with"][last]["tokens_per_s"] / results["without"][last]["tokens_per_s"]
    print(f"\nat {last:g} requests/s the target of {flags.target:g} ms costs {100 * (1 - kept):.1f}% of the tokens a second")
    flags.out.with_suffix(".json").write_text(json.dumps(results, indent=2))
    plot(results, flags.target, flags.out)


if __name__ == "__main__":
    main()
