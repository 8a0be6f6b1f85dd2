"""What quantisation does to a model's predictions, on real text: KL divergence, top-1 agreement and perplexity.

    python benchmarks/quality.py --tokens 4096
    python benchmarks/quality.py --model FOLDER --variant int8:quantization=int8 --variant int4:quantization=int4

Each variant is the model with other engine arguments; what it is compared with is the same model with `--reference`, by default
dequantised fp32 weights, activations and KV cache. The text (documentation of Python's standard library, or --text) is run in
windows, each from an empty context; every position counts but a window's last. KL is of the variant's distribution from the
reference's, in nats, mean over positions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pyengine.config import EngineArgs
from pyengine.loader.tokenizer import load_tokenizer
from pyengine.worker.evaluate import Evaluator

from workloads import documentation

REFERENCE = "quantization=none,dtype=float32,kv_cache_dtype=float32"
VARIANTS = ("default:", "KV in int8:kv_cache_dtype=int8", "only KV in bfloat16:quantization=none,kv_cache_dtype=bfloat16")


def evaluator(model: str | None, settings: str) -> Evaluator:
    pairs = [item.partition("=") for item in settings.split(",") if item]
    arguments = {name: value for name, _, value in pairs}
    return Evaluator(EngineArgs(model=model, device="cpu", **arguments))  # type: ignore[arg-type]


def windows(token_ids: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(token_ids) - 1, size):
        yield token_ids[start : start + size]


class Comparison:
    """Sums over positions of two models' predictions."""

    def __init__(self) -> None:
        self.divergences: list[Tensor] = []  # fp64 [rows] each
        self.same, self.losses = 0, [0.0, 0.0]

    def add(self, reference: Tensor, variant: Tensor, targets: Tensor) -> None:
        """reference, variant: fp32 [rows, vocab]; targets: int64 [rows], the tokens that did come next."""
        p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(variant.double(), -1)
        self.divergences.append((p.exp() * (p - q)).sum(-1))
        self.same += int((p.argmax(-1) == q.argmax(-1)).sum())
        for index, logprobs in enumerate((p, q)):
            self.losses[index] -= float(logprobs.gather(1, targets[:, None]).sum())

    def figures(self) -> dict[str, float]:
        divergences = torch.cat(self.divergences)
        count = len(divergences)
        reference, variant = (math.exp(loss / count) for loss in self.losses)
        return {
            "positions": count,
            "mean_kl": float(divergences.mean()),
            "p99_kl": float(divergences.quantile(0.99)),
            "same_top_1": self.same / count,
            "reference_perplexity": reference,
            "perplexity": variant,
            "perplexity_change": variant / reference - 1,
        }


def compare(reference: Evaluator, variant: Evaluator, token_ids: list[int], window: int) -> dict[str, float]:
    comparison = Comparison()
    for part in windows(token_ids, window):
        targets, start = torch.tensor(part[1:]), 0
        for expected, got in zip(reference.logits(part), variant.logits(part), strict=True):
            rows = min(len(got), len(targets) - start)  # the last position's next token is in the next window
            comparison.add(expected[:rows], got[:rows], targets[start : start + rows])
            start += rows
    return comparison.figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or Hugging Face folder; the default model by default")
    parser.add_argument("--reference", default=REFERENCE, help="engine arguments, NAME=VALUE,...")
    parser.add_argument("--variant", action="append", metavar="LABEL:NAME=VALUE,...", help="may be repeated")
    parser.add_argument("--text", type=Path, help="a UTF-8 file to run instead of Python's documentation")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=1024, help="tokens of context that are built up before it starts anew")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    flags = parser.parse_args()
    reference = evaluator(flags.model, flags.reference)
    text = documentation() if flags.text is None else flags.text.read_text(encoding="utf-8")
    token_ids = load_tokenizer(reference.checkpoint)(text, verbose=False)["input_ids"][: flags.tokens]
    results = {}
    print(f"{len(token_ids)} tokens in windows of {flags.window}, against {flags.reference}")
    print(f"{'':24} {'mean KL':>9} {'p99 KL':>9} {'same top-1':>11} {'perplexity':>20} {'change':>8}")
    for label, _, settings in (item.partition(":") for item in flags.variant or VARIANTS):
        figures = results[label] = compare(reference, evaluator(flags.model, settings), token_ids, flags.window)
        print(
            "{label:24} {mean_kl:9.2e} {p99_kl:9.2e} {same_top_1:11.2%} {reference_perplexity:8.3f} -> {perplexity:8.3f} "
            "{perplexity_change:8.3%}".format(label=label, **figures),
            flush=True,
        )
    if flags.out is not None:
        flags.out.write_text(json.dumps({"tokens": len(token_ids), "window": flags.window, "variants": results}, indent=2))


if __name__ == "__main__":
    main()
