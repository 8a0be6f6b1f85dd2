"""Where a step's time goes, kernel by kernel, with bytes, operations and share of this machine's measured limits.

    python benchmarks/profile_step.py --out profile
    python benchmarks/profile_step.py --out profile --decode 1 8 64 --prefill 512 --context 256

The model's recorded step is run with a clock around each kernel; bytes and operations of each follow from its arguments. The
limits are measured in the same run by benchmarks/limits.cpp: reading memory, and arithmetic from registers alone. A kernel's
share is of the limit that it is nearer to. For decode steps, an engine runs the same batch turn about: what its step takes
beyond the kernels (least of the repeats each, the least disturbed ones) is scheduling, preparing inputs, sampling and output.
All else are medians over --repeats. Writes profile.json and profile.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyengine import LLM, SamplingParams
from pyengine.config import EngineArgs, EngineConfig
from pyengine.config_resolution import resolve, resolve_load
from pyengine.inputs import TokensPrompt
from pyengine.layers.attention_metadata import AttentionMetadata, LogitsRows
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.weights import load_model
from pyengine.ops import Ops
from pyengine.worker.backends import create_backend
from pyengine.worker.hardware import detect_hardware
from pyengine.worker.step_replay import ReplayedStepRunner
from pyengine.worker.worker import kv_cache_spec

from machine import describe


@dataclass(frozen=True)
class Batch:
    """A step: sequences with the same number of query tokens, each after `context` tokens that are computed."""

    num_seqs: int
    query_len: int
    context: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.num_seqs}" if self.query_len == 1 else f"prefill of {self.query_len}"

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.query_len

    @property
    def logits_rows(self) -> Batch:
        """The sequences' last tokens, all that goes on once the last layer's keys and values are written."""
        return replace(self, query_len=1, context=self.context + self.query_len - 1)


#: What a step runs beside the kernels whose limits are of interest.
_LOOKUPS = ("quantized_embedding", "w8a16_embedding", "copy", "gather", "logits_rows", "argmax")
_CACHE_WRITES = ("reshape_and_cache", "rotary_reshape_and_cache")
_EMBEDDINGS = ("quantized_embedding", "w8a16_embedding")


@dataclass(frozen=True)
class Cost:
    """What a kernel must move and compute at least."""

    label: str
    num_bytes: float
    operations: float
    kind: str  # int8, bf16 or fp32


def _w8a16_cost(op: str, tensors: Sequence[Tensor], rows: int) -> Cost:
    """A product of 16 and 8 bits is two of bytes. A gated product has two outputs for each that it writes."""
    out, x, weight, factors = tensors[:4]
    outputs = out.shape[1] * (2 if op == "w8a16_gated_linear" else 1)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (weight, factors))
    moved = weight_bytes + rows * sum(tensor.shape[1] * tensor.element_size() for tensor in (out, x))
    return Cost(f"{op} {x.shape[1]} to {outputs}", moved, 4.0 * rows * x.shape[1] * outputs, "int8")


def cost(op: str, args: Sequence[Any], batch: Batch) -> Cost:
    """A recorded call's cost in a step of this batch. Tensors have a row a token."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    rows = batch.num_tokens

    def row_bytes(tensor: Tensor) -> int:
        return tensor[0].numel() * tensor.element_size()

    if op in ("w8a16_linear", "w8a16_gated_linear"):
        return _w8a16_cost(op, tensors, rows)
    if op in ("linear", "gated_linear", "quantized_linear", "quantized_gated_linear"):
        out, x, weight = tensors[:3]
        outputs = out.shape[1] * (2 if "gated" in op else 1)
        shape = f"{x.shape[1]} to {outputs}"
        kind, detail = ("int8", f", {args[3]}") if op.startswith("quantized") else ("fp32", "")
        moved = weight.numel() * weight.element_size() + rows * (row_bytes(out) + row_bytes(x))
        return Cost(f"{op} {shape}{detail}", moved, 2.0 * rows * x.shape[1] * outputs, kind)
    if op == "paged_attention":
        out, query, k_cache = tensors[:3]
        _, num_heads, head_dim = query.shape
        kv_bytes = 2 * k_cache.shape[1] * head_dim * k_cache.element_size()  # of a token: K and V
        last = batch.context + batch.query_len
        seen = sum(range(batch.context + 1, last + 1))  # keys, summed over a sequence's query tokens
        moved = batch.num_seqs * last * kv_bytes + rows * (row_bytes(out) + row_bytes(query))
        kind = "bf16" if k_cache.dtype == torch.bfloat16 else "fp32"
        return Cost(op, moved, 4.0 * batch.num_seqs * seen * num_heads * head_dim, kind)
    # The rest streams rows once in and once out; its arithmetic is no matter. Caches and tables are not rows.
    moved = rows * sum(row_bytes(tensor) for tensor in tensors if tensor.dim() > 1 and tensor.dtype.is_floating_point)
    if op in (*_CACHE_WRITES, "rotary_embedding"):
        moved = 2 * rows * sum(row_bytes(tensor) for tensor in tensors if tensor.dim() == 3)
    return Cost(op, moved, 0.0, "fp32")


class Trace:
    """Ops that note each call, so that a recorded kernel can be told from its arguments."""

    def __init__(self, ops: Ops) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        names = [field.name for field in fields(ops) if field.name != "name"]
        self.ops = replace(ops, **{name: self._noting(name, getattr(ops, name)) for name in names})

    def _noting(self, name: str, op: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args))
            op(*args, **kwargs)

        return call


class Profiler:
    """A model whose recorded step is timed op by op."""

    def __init__(self, args: EngineArgs, max_tokens: int, max_context: int) -> None:
        checkpoint = open_checkpoint(args.model)
        hardware = detect_hardware()
        load_config = resolve_load(args, checkpoint.arch, hardware)
        backend = create_backend(load_config.device, load_config.num_threads)
        trace = Trace(backend.ops)
        model = load_model(checkpoint, load_config, trace.ops)
        self.config: EngineConfig = resolve(args, checkpoint.name, checkpoint.arch, hardware)
        spec = kv_cache_spec(checkpoint.arch, self.config.cache)
        num_blocks = -(-(max_tokens + max_context) // spec.block_size)
        pool = backend.allocate_pool(spec, num_blocks + max_tokens + 1, host=False)
        pool.data.zero_()  # resident, as a pool in use is
        torch.set_num_threads(1)  # as in an engine's step: torch's own threads would spin between calls
        trace.calls.clear()
        caches = [pool.layer(index) for index in range(checkpoint.arch.num_layers)]
        self._runner = ReplayedStepRunner(model, caches, max_num_tokens=max_tokens, max_num_rows=max_tokens)
        self._calls = [call for call in trace.calls if call[0] not in _EMBEDDINGS]

    def runs(self, batch: Batch, repeats: int, after_each: Callable[[], None]) -> list[list[tuple[str, float]]]:
        """Each run's kernels in order, and their seconds."""
        inputs = self._inputs(batch)
        runs = []
        for _ in range(repeats + 2):
            runs.append(self._runner.op_times(*inputs))
            after_each()
        return runs[2:]

    def times(self, batch: Batch, runs: Sequence[list[tuple[str, float]]]) -> list[tuple[Cost, float]]:
        """Each kernel in order and the median of its seconds."""
        calls = iter(self._calls)
        last_write = max(index for index, (name, _) in enumerate(runs[0]) if name in _CACHE_WRITES)
        result = []
        for index, (name, _) in enumerate(runs[0]):
            seconds = statistics.median(run[index][1] for run in runs)
            if name in _LOOKUPS:
                result.append((Cost(name, 0.0, 0.0, "fp32"), seconds))
                continue
            op, args = next(calls)
            if op != name:
                raise SystemExit(f"the plan runs {name} where the model called {op}")
            result.append((cost(op, args, batch if index <= last_write else batch.logits_rows), seconds))
        return result

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor, AttentionMetadata, LogitsRows | None]:
        block_size = self.config.cache.block_size
        end = batch.context + batch.query_len
        blocks = -(-end // block_size)
        table = torch.arange(1, batch.num_seqs * blocks + 1, dtype=torch.int32).view(batch.num_seqs, blocks)
        positions = torch.arange(batch.context, end).repeat(batch.num_seqs)  # [num_tokens]
        sequence = torch.arange(batch.num_seqs).repeat_interleave(batch.query_len)
        slots = table[sequence, positions // block_size] * block_size + positions % block_size
        metadata = AttentionMetadata(
            num_seqs=batch.num_seqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.query_len,
            max_seq_len=end,
            query_start_loc=torch.arange(batch.num_seqs + 1, dtype=torch.int32) * batch.query_len,
            seq_lens=torch.full((batch.num_seqs,), end, dtype=torch.int32),
            block_table=table,
            slot_mapping=slots,
        )
        vocab_size = self.config.model.arch.vocab_size
        ids = torch.randint(0, vocab_size, (batch.num_tokens,), generator=torch.Generator().manual_seed(0))
        if batch.query_len == 1:
            return ids, positions, metadata, None
        starts = torch.arange(batch.num_seqs + 1, dtype=torch.int32)
        last = replace(metadata, num_tokens=batch.num_seqs, max_query_len=1, query_start_loc=starts, slot_mapping=slots[:0])
        return ids, positions, metadata, LogitsRows(starts[1:].long() * batch.query_len - 1, last)


@contextmanager
def engine_steps(args: dict[str, Any], batch: Batch, repeats: int) -> Iterator[Callable[[], float]]:
    """An engine that decodes `num_seqs` sequences of about that context: what it yields runs a step and returns its seconds."""
    with LLM(disable_log_stats=True, enable_prefix_caching=False, max_num_seqs=max(batch.num_seqs, 1), **args) as llm:
        engine = llm.llm_engine
        vocab_size = engine.config.model.arch.vocab_size
        generator = torch.Generator().manual_seed(0)
        started: set[str] = set()
        params = SamplingParams(temperature=0, max_tokens=repeats + 200, ignore_eos=True, detokenize=False)
        for index in range(batch.num_seqs):
            ids = torch.randint(0, vocab_size, (max(1, batch.context - 20),), generator=generator).tolist()
            engine.add_request(str(index), TokensPrompt(ids), params)
        while len(started) < batch.num_seqs:
            started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}

        def step() -> float:
            start = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - start
            if len(outputs) != batch.num_seqs:
                raise SystemExit(f"a step of {len(outputs)} sequences, not {batch.num_seqs}")
            return seconds

        yield step


def profile(
    profiler: Profiler, settings: dict[str, Any], batch: Batch, repeats: int, *, with_engine: bool
) -> tuple[list[tuple[Cost, float]], dict[str, float] | None]:
    """Times of a batch's kernels, and for decode steps what the engine's step takes, measured turn about with them."""
    if batch.query_len != 1 or not with_engine:
        return profiler.times(batch, profiler.runs(batch, repeats, lambda: None)), None
    seconds: list[float] = []
    with engine_steps(settings, batch, repeats) as step:
        runs = profiler.runs(batch, repeats, lambda: seconds.append(step()))
    seconds = seconds[2:]
    kernels = min(sum(time for _, time in run) for run in runs)
    figures = {
        "step_seconds": statistics.median(seconds),
        "least_step_seconds": min(seconds),
        "least_kernel_seconds": kernels,
        "share_outside_kernels": 1 - kernels / min(seconds),
    }
    return profiler.times(batch, runs), figures


def measure_limits(num_threads: int) -> dict[str, Any] | None:
    """What benchmarks/limits.cpp says; None on a machine that it is not written for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        print("limits.cpp knows x86-64 only: no shares")
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        source = Path(__file__).with_name("limits.cpp")
        subprocess.run(["c++", "-O2", "-march=native", "-std=c++17", "-pthread", source, "-o", program], check=True)
        done = subprocess.run([program, str(num_threads)], check=True, capture_output=True, text=True)
    limits: dict[str, Any] = json.loads(done.stdout)
    return limits


def best(seen: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The largest of each number."""
    first, *rest = seen
    if first is None:
        return None
    others = [other for other in rest if other is not None]
    return {
        key: best([value, *(other[key] for other in others)])
        if isinstance(value, dict)
        else max([value, *(other[key] for other in others)])
        for key, value in first.items()
    }


def chosen(limits: dict[str, Any], isa: str, int8: str | None) -> dict[str, float]:
    """The limits that kernels of this instruction set have. A tile has half as many products of bf16 as of bytes."""
    fp32 = limits["fp32_ops_per_s"]
    products = limits["int8_ops_per_s"]
    int8 = int8 or ("amx" if "amx" in isa else isa)
    single = fp32["avx512"] if isa.startswith(("avx512", "amx")) and "avx512" in fp32 else fp32["avx2"]
    return {
        "bytes": limits["read_bytes_per_s"],
        "fp32": single,
        "bf16": products["amx"] / 2 if isa == "amx" and "amx" in products else single,
        "int8": products.get(int8, products["avx2"]),
    }


def summarise(times: list[tuple[Cost, float]], limits: dict[str, float] | None) -> list[dict[str, Any]]:
    """One row for each kind of kernel call, the slowest first."""
    total = sum(seconds for _, seconds in times)
    rows: dict[str, dict[str, Any]] = {}
    for item, seconds in times:
        row = rows.setdefault(item.label, {"kernel": item.label, "calls": 0, "seconds": 0.0, "bytes": 0.0, "operations": 0.0})
        row["calls"] += 1
        row["seconds"] += seconds
        row["bytes"] += item.num_bytes
        row["operations"] += item.operations
        row["kind"] = item.kind
    for row in rows.values():
        row["share_of_step"] = row["seconds"] / total
        if limits is not None and row["seconds"] > 0:
            row["share_of_bandwidth"] = row["bytes"] / row["seconds"] / limits["bytes"]
            row["share_of_arithmetic"] = row["operations"] / row["seconds"] / limits[row["kind"]]
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def print_rows(name: str, rows: list[dict[str, Any]], engine: dict[str, float] | None) -> None:
    kernels = sum(row["seconds"] for row in rows)
    print(f"\n{name}: {1e3 * kernels:.2f} ms in kernels")
    print(f"  {'kernel':36} {'calls':>5} {'ms':>8} {'share':>6} {'GB/s':>7} {'of limit':>8} {'Gop/s':>8} {'of limit':>8}")
    for row in rows:
        shares = [f"{row[key]:8.1%}" if key in row else "" for key in ("share_of_bandwidth", "share_of_arithmetic")]
        rates = [row[key] / max(row["seconds"], 1e-12) / 1e9 for key in ("bytes", "operations")]
        print(
            f"  {row['kernel']:36} {row['calls']:5} {1e3 * row['seconds']:8.3f} {row['share_of_step']:6.1%} "
            f"{rates[0]:7.2f} {shares[0]:>8} {rates[1]:8.1f} {shares[1]:>8}"
        )
    if engine is not None:
        whole, least = 1e3 * engine["step_seconds"], 1e3 * engine["least_step_seconds"]
        print(
            f"  a whole step in the engine takes {whole:.2f} ms (least {least:.2f}, {1e3 * engine['least_kernel_seconds']:.2f} "
            f"in kernels): {engine['share_outside_kernels']:.1%} outside these kernels"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    """A bar for each step, cut into its kernels; the share of the nearer limit is written in the larger pieces."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = report["steps"]
    labels = list(dict.fromkeys(row["kernel"] for step in steps for row in step["kernels"]))
    colours = {label: pyplot.get_cmap("tab20")(i % 20) for i, label in enumerate(labels)}
    figure, axis = pyplot.subplots(figsize=(11, 1.6 + 0.8 * len(steps)), constrained_layout=True)
    for place, step in enumerate(steps):
        left = 0.0
        for row in step["kernels"]:
            share = row["share_of_step"]
            axis.barh(place, share, left=left, color=colours[row["kernel"]], edgecolor="white")
            nearest = max(row.get("share_of_bandwidth", 0.0), row.get("share_of_arithmetic", 0.0))
            if share > 0.06 and nearest:
                axis.text(left + share / 2, place, f"{nearest:.0%}", ha="center", va="center", fontsize=8)
            left += share
    axis.set(yticks=range(len(steps)), xlim=(0, 1), xlabel="share of the time in kernels; figures: share of the nearer limit")
    axis.set_yticklabels([step["name"] for step in steps])
    axis.legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=colours[label]) for label in labels],
        labels=labels,
        bbox_to_anchor=(1.01, 1),
        loc="upper left",
        fontsize=7,
    )
    figure.savefig(path, dpi=120)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for profile.json and profile.png")
    parser.add_argument("--model", help="GGUF file or Hugging Face folder; the default model by default")
    parser.add_argument("--quantization", help="as the engine takes it")
    parser.add_argument("--repack", default="auto", choices=("auto", "none", "int8"), help="as the engine takes it")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 64], help="batch sizes of decode steps")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="lengths of prompts, one in a step")
    parser.add_argument("--context", type=int, default=128, help="tokens before a decode step's")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--int8-limit", help="compare with this instruction set's limit: avx2, avx512_vnni or amx")
    parser.add_argument("--no-engine", action="store_true", help="kernels only")
    return parser.parse_args()


def main() -> None:
    flags = parse_flags()
    flags.out.mkdir(parents=True, exist_ok=True)
    settings = {"model": flags.model, "device": "cpu", "quantization": flags.quantization, "repack": flags.repack}
    batches = [Batch(count, 1, flags.context) for count in flags.decode] + [Batch(1, length, 0) for length in flags.prefill]
    machine = describe()
    profiler = Profiler(
        EngineArgs(**settings),
        max(batch.num_tokens for batch in batches),
        max(batch.num_seqs * (batch.context + 1) for batch in batches),
    )
    print(f"{machine['processor']}, {profiler.config.device.num_threads} threads, {machine['instruction_set']}")
    # Machines have better and worse seconds: the limits are the best of what is seen before and after.
    seen = [measure_limits(profiler.config.device.num_threads)]
    results = [profile(profiler, settings, batch, flags.repeats, with_engine=not flags.no_engine) for batch in batches]
    seen.append(measure_limits(profiler.config.device.num_threads))
    measured = best(seen)
    limits = None if measured is None else chosen(measured, str(machine["instruction_set"]), flags.int8_limit)
    if limits is not None:
        print(", ".join(f"{name} {limit / 1e9:.1f} G/s" for name, limit in limits.items()))
    steps = []
    for batch, (times, engine) in zip(batches, results, strict=True):
        rows = summarise(times, limits)
        print_rows(batch.name, rows, engine)
        steps.append({"name": batch.name, "kernels": rows, "engine": engine})
    report = {"machine": machine, "measured_limits": measured, "limits": limits, "context": flags.context, "steps": steps}
    (flags.out / "profile.json").write_text(json.dumps(report, indent=2))
    plot(report, flags.out / "profile.png")
    print(f"\n{flags.out / 'profile.json'}, {flags.out / 'profile.png'}")


if __name__ == "__main__":
    main()
