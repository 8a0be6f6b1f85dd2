"""What is left of an engine's speed when other processes want the same cores.

    python benchmarks/contention.py --out contention --busy 1
    python benchmarks/contention.py --out contention --peer openvino=OV/bin/python

Each engine runs a workload alone and beside `--busy` processes that never wait, in turn, several rounds. Its fair share is what
a scheduler gives `cores` threads that compete with them: cores / (cores + busy). `--peer`, `--fp32`, `--options` and `--skip`
are those of peers.py. Writes contention.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from peers import add_flags, check_flags, engines, machine_of, run, spread, stop_cleanly, tokenize
from workloads import load_workloads


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, workloads=["w1"])
    parser.add_argument("--busy", type=int, default=1, help="processes that compete with the engine")
    flags = parser.parse_args()
    check_flags(parser, flags)
    stop_cleanly()
    parts, workloads, machine = engines(flags), load_workloads(flags.out, tokenize), machine_of(flags)
    cores = int(machine["cores"])
    shares: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in parts}
    for index in range(flags.rounds):
        for engine in parts:
            names = [name for name in flags.workloads if name not in engine.skipped]
            alone = run(engine, names, flags.out, 2 * index, flags.timeout)
            with busy_processes(flags.busy):
                beside = run(engine, names, flags.out, 2 * index + 1, flags.timeout)
            for name in names:
                if name not in alone or name not in beside:
                    continue  # `run` has said why
                shares[engine.name].setdefault(name, []).append(alone[name] / beside[name])
                tokens = sum(request["n"] for request in workloads[name])
                print(
                    f"round {index + 1}: {engine.name:14} {name} {tokens / alone[name]:8.1f} tokens/s alone, "
                    f"{tokens / beside[name]:8.1f} beside {flags.busy} busy: {alone[name] / beside[name]:.0%} left",
                    flush=True,
                )
    fair = cores / (cores + flags.busy)
    print(f"\nfair share of {cores} cores beside {flags.busy} busy: {fair:.0%}")
    for engine_name, figures in shares.items():
        for name, values in figures.items():
            print(f"{engine_name:14} {name} keeps {statistics.median(values):.0%} ({min(values):.0%} to {max(values):.0%})")
    report = {
        "machine": machine,
        "busy": flags.busy,
        "fair_share": fair,
        "share_kept": {
            engine_name: {name: spread(values) for name, values in figures.items()} for engine_name, figures in shares.items()
        },
    }
    (flags.out / "contention.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
