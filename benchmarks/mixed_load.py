"""Long prompts that arrive amid short streams: how much the streams feel them.

    python benchmarks/mixed_load.py --out mixed                   # starts a server of the default model
    python benchmarks/mixed_load.py --out mixed --target HOST:PORT

28 short streams run first alone, then with 4 prompts of 1,500 tokens that arrive while all of them are decoding. Compared are
the inter-token latencies of the short streams: their 99th percentile with the long prompts, over their median without. Unknown
flags go to the server that is started. Writes mixed_load.json and mixed_load.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from contextlib import nullcontext
from pathlib import Path

import grpc

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

from serving import Load, Trace, key_metadata, percentile, run, serve
from workloads import documentation


def make_load(ids: list[int], flags: argparse.Namespace, *, with_long: bool, offset: int) -> Load:
    """Prompts cut from `ids`, none of them twice: short ones at once, long ones one after another later."""
    position = offset

    def take(count: int) -> list[int]:
        nonlocal position
        position += count
        return ids[position - count : position]

    prompts = [take(flags.short_input) for _ in range(flags.short)]
    lengths = [flags.short_output] * flags.short
    due = [0.0] * flags.short
    if with_long:
        prompts += [take(flags.long_input) for _ in range(flags.long)]
        lengths += [flags.long_output] * flags.long
        due += [flags.long_delay + index * flags.long_interval for index in range(flags.long)]
    return Load(prompts, lengths, due)


def latencies(traces: list[Trace]) -> list[float]:
    """Seconds between tokens, of all streams."""
    failed = [trace.error for trace in traces if trace.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return [value for trace in traces for value in trace.inter_token_latencies()]


def measure(target: str, flags: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The short streams' latencies in each round, alone and mixed."""
    with grpc.insecure_channel(target) as channel:
        request = pb.TokenizeRequest(text=documentation())
        ids = list(rpc.InferenceStub(channel).Tokenize(request, timeout=60, metadata=key_metadata()).token_ids)
    needed = flags.short * flags.short_input + flags.long * flags.long_input
    if needed * 2 * flags.rounds > len(ids):
        ids *= needed * 2 * flags.rounds // len(ids) + 1
    results: dict[str, list[list[float]]] = {"alone": [], "mixed": []}
    for index in range(flags.rounds):
        for place, name in enumerate(results):
            load = make_load(ids, flags, with_long=name == "mixed", offset=(2 * index + place) * needed)
            traces = asyncio.run(run(target, load, None))
            latencies(traces)  # none may have failed
            results[name].append(latencies(traces[: flags.short]))
            if name == "mixed":
                last = max(trace.token_times[-1][0] for trace in traces[: flags.short])
                if last < load.due[-1]:
                    raise SystemExit("the short streams ended before the last long prompt came: raise --short-output")
    return results


def plot(results: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    for name, rounds in results.items():
        ordered = sorted(1e3 * value for values in rounds for value in values)
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
    axis.set(xlabel="inter-token latency of the short streams, ms", ylabel="share of tokens", xscale="log", ylim=(0, 1))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_flags() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures and the plot")
    parser.add_argument("--target", help="HOST:PORT of a running server; by default one is started")
    parser.add_argument("--model", help="of the server that is started; the default model by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", type=int, default=28, help="short streams")
    parser.add_argument("--short-input", type=int, default=32)
    parser.add_argument("--short-output", type=int, default=128)
    parser.add_argument("--long", type=int, default=4, help="long prompts")
    parser.add_argument("--long-input", type=int, default=1500)
    parser.add_argument("--long-output", type=int, default=16)
    parser.add_argument("--long-delay", type=float, default=1.5, help="seconds until the first of them")
    parser.add_argument("--long-interval", type=float, default=0.25, help="seconds from one to the next")
    flags, rest = parser.parse_known_args()
    if flags.target and (rest or flags.model):
        parser.error(f"without --target only: {' '.join(rest) or '--model'}")
    return flags, rest


def main() -> None:
    flags, rest = parse_flags()
    flags.out.mkdir(parents=True, exist_ok=True)
    with nullcontext(flags.target) if flags.target else serve(flags.model, rest) as target:
        results = measure(target, flags)
    rounds = []
    for alone, mixed in zip(results["alone"], results["mixed"], strict=True):
        median, p99 = statistics.median(alone), percentile(mixed, 99)
        rounds.append({"alone_median_ms": 1e3 * median, "mixed_p99_ms": 1e3 * p99, "ratio": p99 / median})
        print("alone: median {alone_median_ms:.1f} ms; mixed: p99 {mixed_p99_ms:.1f} ms; {ratio:.2f}x".format(**rounds[-1]))
    ratios = [entry["ratio"] for entry in rounds]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"p99 with the long prompts over the median without: {statistics.median(ratios):.2f}x ({spread})")
    report = {"flags": {k: v for k, v in vars(flags).items() if k != "out"}, "rounds": rounds}
    (flags.out / "mixed_load.json").write_text(json.dumps(report, indent=2))
    plot(results, flags.out / "mixed_load.png")


if __name__ == "__main__":
    main()
