"""Kernel benchmarks on one device, written to a JSON file: what `make gpu-check` runs.

PYTHONPATH=. python benchmarks/gpu/kernels.py --device cuda --output kernels.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch

from attention_bench import bench_decode, bench_prefill
from bench_device import BenchDevice
from linear_bench import bench_linear
from memory_bench import bench_cache_ops, bench_swap


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON: device, ceilings, results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = BenchDevice(arguments.device)
    bandwidth, rate = device.copy_bandwidth(), device.matmul_rate()
    report = {"device": device.describe(), "copy_bandwidth": bandwidth, "matmul_rate": rate, "results": []}
    print(f"{device.describe()}: copies {bandwidth / 1e9:.0f} GB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    start = time.perf_counter()
    for result in itertools.chain(
        bench_decode(device, bandwidth),
        bench_prefill(device, rate),
        bench_cache_ops(device, bandwidth),
        bench_linear(device, bandwidth, rate),
        bench_swap(device),
    ):
        report["results"].append(result.to_dict())
        print(f"{time.perf_counter() - start:6.1f} s  {result.group}: {result.name}: {result.seconds * 1e3:.3f} ms", flush=True)
        arguments.output.write_text(json.dumps(report, indent=1))  # after each: what was measured survives a later failure


if __name__ == "__main__":
    main()
