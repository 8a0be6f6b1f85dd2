"""The benchmarks of docs/performance.md in one run, each into a folder of its own.

    python benchmarks/all.py --out bench --peers DIR --fp32 FOLDER --skip llamacpp:w1 --skip llamacpp:w2

DIR has the peers' virtual environments, as benchmarks/peers/setup.sh makes them; FOLDER is the default model in fp32, as
benchmarks/peers/gguf_to_hf.py makes it. Without them, pyengine runs alone. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from machine import cpu_flags

HERE = Path(__file__).parent
PEERS = ("openvino", "llamacpp", "vllm")
OUTPUT_FILES = {"quality": "quality.json", "fairness": "fairness.json", "serving": "serving.png", "pace": "pace.png"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="virtual environments openvino, llamacpp and vllm")
    parser.add_argument("--fp32", metavar="FOLDER", help="the default model as an fp32 Hugging Face folder")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME:wN", help="a pair that takes too long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the names that a run prints")
    flags = parser.parse_args()
    rounds = ["--rounds", str(flags.rounds)]
    pythons = {name: flags.peers / name / "bin" / "python" for name in PEERS} if flags.peers is not None else {}
    peers = ["--fp32", flags.fp32] if flags.fp32 else []
    for name, path in pythons.items():
        if path.exists() and (name != "vllm" or flags.fp32):
            peers.append(f"--peer={name}={path}")
        else:
            print(f"{name} takes no part: " + ("it needs --fp32" if path.exists() else f"there is no {path}"))
    peers += [f"--skip={pair}" for pair in flags.skip]
    static = ["--compare-static", "--num-prompts", "300"]
    benchmarks = {  # folder: script and arguments
        "startup": ("startup", rounds),
        "startup_without_repacking": ("startup", [*rounds, "--repack", "none"]),
        "profile_step": ("profile_step", []),
        "mixed_load": ("mixed_load", rounds),
        "mixed_load_without_pace": ("mixed_load", [*rounds, "--target-itl-ms", "0"]),
        "mixed_load_with_target": ("mixed_load", [*rounds, "--target-itl-ms", "80"]),
        "contention": ("contention", rounds),
        "pace": ("pace", ["--target", "40", "--rates", "8,16,32", "--seconds", "8"]),
        "fairness": ("fairness", []),
        "static_batching": ("serving", [*static, "--long-input", "128", "--long-output", "384", "--max-num-seqs", "64"]),
        "static_batching_of_32": ("serving", [*static, "--max-num-seqs", "32"]),
        "quality": ("quality", ["--tokens", "4096"]),
        "peers": ("peers", [*rounds, *peers]),
    }
    if "cpuid_fault" in cpu_flags():
        benchmarks["peers_avx2"] = ("peers", [*rounds, *peers, "--isa", "avx2"])
    unknown = set(flags.only or []) - benchmarks.keys()
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(benchmarks)}")
    failed = []
    for name in flags.only or benchmarks:
        out = flags.out / name
        out.mkdir(parents=True, exist_ok=True)
        script, arguments = benchmarks[name]
        target = out / OUTPUT_FILES[script] if script in OUTPUT_FILES else out
        command = [sys.executable, str(HERE / f"{script}.py"), "--out", str(target), *arguments]
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        with (out / "report.txt").open("w") as report:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                report.write(line)
            if process.wait() != 0:
                failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
