"""Tables and plots of a `make gpu-check` run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows), ""]


def _kernel_row(result: dict[str, Any]) -> list[str]:
    seconds = result["seconds"]
    achieved = (
        f"{result['bytes'] / seconds / 1e9:.1f} GB/s" if result["bytes"] else f"{result['flops'] / seconds / 1e12:.2f} TFLOP/s"
    )
    share = "" if result["share"] is None else f"{result['share']:.0%}"
    baseline = ""
    if result["baseline_seconds"]:
        baseline = (
            f"{result['baseline']}: {result['baseline_seconds'] * 1e3:.3f} ms ({result['baseline_seconds'] / seconds:.2f} x)"
        )
    error = "" if result["error"] is None else f"{result['error']:.1e}"
    return [result["group"], result["name"], f"{seconds * 1e3:.3f}", achieved, share, baseline, error]


def markdown(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    lines = [f"# GPU check: {report['device']}", "", f"{report['seconds']:.0f} s in all.", ""]
    steps = [[s["name"], s["status"], f"{s['seconds']:.0f}", s["detail"].replace("|", "/")] for s in report["steps"]]
    lines += _table(("step", "outcome", "seconds", "last line"), steps)
    kernels, engine = report["kernels"], report["engine"]
    if kernels:
        copies, rate = kernels["copy_bandwidth"] / 1e9, kernels["matmul_rate"] / 1e12
        lines += [f"Measured ceilings: copies {copies:.0f} GB/s (read + written), bf16 matmul {rate:.0f} TFLOP/s.", ""]
        columns = ("group", "what", "ms", "achieved", "share of ceiling", "beside", "largest difference")
        lines += _table(columns, [_kernel_row(result) for result in kernels["results"]])
    if engine.get("pyengine"):
        others = {row["num_seqs"]: row["output_tokens_per_s"] for row in engine.get("transformers", [])}
        rows = []
        for row in engine["pyengine"]:
            own, other = row["output_tokens_per_s"], others.get(row["num_seqs"])
            compared = ["", ""] if other is None else [f"{other:.0f}", f"{own / other:.2f} x"]
            rows.append([str(row["num_seqs"]), f"{own:.0f}", *compared, f"{row['kv_utilisation']:.1%}"])
        lines += _table(("sequences", "pyengine, tokens/s", "Transformers, tokens/s", "ratio", "KV slots in use"), rows)
    if engine.get("ragged"):
        row = engine["ragged"]
        lines += [
            f"Lengths of all kinds, {row['num_seqs']} sequences: {row['output_tokens_per_s']:.0f} tokens/s, "
            f"{row['kv_utilisation']:.1%} of the allocated KV slots in use.",
            "",
        ]
    return "\n".join(lines)


def plots(report: dict[str, Any], folder: Path) -> str:
    """Writes kernels.png and engine.png where there is something to show; says what was written."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plots: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    shares = [r for r in report["kernels"].get("results", []) if r["share"] is not None]
    if shares:
        figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(shares) + 1))
        axes.barh([f"{r['group']}: {r['name']}" for r in reversed(shares)], [100 * r["share"] for r in reversed(shares)])
        axes.set_xlabel("% of measured copy bandwidth (decode, memory) or bf16 matmul rate (prefill, linear)")
        axes.grid(axis="x", alpha=0.4)
        figure.savefig(folder / "kernels.png", bbox_inches="tight", dpi=120)
        written.append("kernels.png")
    if report["engine"].get("pyengine"):
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for name in ("pyengine", "transformers"):
            rows = report["engine"].get(name, [])
            axes.plot([r["num_seqs"] for r in rows], [r["output_tokens_per_s"] for r in rows], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="sequences at once", ylabel="output tokens/s")
        axes.grid(alpha=0.4)
        axes.legend()
        figure.savefig(folder / "engine.png", bbox_inches="tight", dpi=120)
        written.append("engine.png")
    pyplot.close("all")
    return f"plots {' and '.join(written)}" if written else "no plots: nothing was measured"
