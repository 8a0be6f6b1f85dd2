"""Throughput of the whole engine on random weights in the shape of Llama 3 8B, beside Transformers' generate, to a JSON file.

PYTHONPATH=. python benchmarks/gpu/engine.py --device cuda --output engine.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pyengine import LLM, SamplingParams

from random_checkpoint import LLAMA_3_8B, TINY, draw_weights, write_checkpoint


def generate(llm: LLM, prompts: list[list[int]], num_output: int) -> dict[str, Any]:
    """Run one batch, greedy, to exactly `num_output` tokens each."""
    llm.llm_engine.reset_metrics()
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outputs)} requests failed: {failed[0]}")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "num_seqs": len(prompts),
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "kv_utilisation": llm.stats()["kv_utilisation"],
    }


def bench_engine(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """pyengine at each number of sequences, and once with lengths of all kinds for the KV utilisation."""
    on_gpu = options.device == "cuda"
    config = LLAMA_3_8B if on_gpu else TINY
    num_input, num_output = (128, 128) if on_gpu else (8, 4)
    batches = [1, 16, 64, 256] if on_gpu else [1, 2, 4]
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, config["vocab_size"]) for _ in range(length)]

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), config)
        start = time.perf_counter()
        arguments: dict[str, Any] = {} if on_gpu else {"num_kv_blocks": 64, "max_num_seqs": 8}
        llm = LLM(
            folder,
            device=options.device,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=2048 if on_gpu else 128,
            enable_prefix_caching=False,
            swap_space=0.0,
            **arguments,
        )
        report["load_seconds"] = time.perf_counter() - start
        draw_weights(llm, config, torch.device("cuda" if on_gpu else "cpu"))
        report["num_blocks"] = llm.stats()["num_blocks"]
        generate(llm, [prompt(num_input)], 4)  # warms up
        report["pyengine"] = []
        for num_seqs in batches:
            row = generate(llm, [prompt(num_input) for _ in range(num_seqs)], num_output)
            report["pyengine"].append(row)
            print(f"pyengine, {num_seqs} sequences: {row['output_tokens_per_s']:.0f} tokens/s", flush=True)
            options.output.write_text(json.dumps(report, indent=1))
        lengths = [rng.randint(4, 1024 if on_gpu else 20) for _ in range(batches[-1])]
        report["ragged"] = generate(llm, [prompt(length) for length in lengths], num_output)
        options.output.write_text(json.dumps(report, indent=1))
        llm.shutdown()
        del llm
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def bench_transformers(options: argparse.Namespace, report: dict[str, Any], deadline: float) -> None:
    """Transformers' generate on the same shapes, as long as there is time."""
    import transformers

    on_gpu = options.device == "cuda"
    config = LLAMA_3_8B if on_gpu else TINY
    num_input, num_output = (128, 128) if on_gpu else (8, 4)
    device = torch.device("cuda" if on_gpu else "cpu")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**config, tie_word_embeddings=False), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval()
    report["transformers"] = []
    model.generate(torch.full((1, 4), 10, device=device), max_new_tokens=2, do_sample=False, pad_token_id=0)  # warms up
    for row in report["pyengine"]:
        if time.monotonic() > deadline:
            report["transformers_note"] = f"no time left for {row['num_seqs']} sequences"
            break
        ids = torch.randint(10, config["vocab_size"], (row["num_seqs"], num_input), device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start  # the tokens are on the host: everything is done
        tokens = out.cpu().numel() - ids.numel()
        report["transformers"].append(
            {"num_seqs": row["num_seqs"], "seconds": seconds, "output_tokens_per_s": tokens / seconds}
        )
        print(f"Transformers, {row['num_seqs']} sequences: {tokens / seconds:.0f} tokens/s", flush=True)
        options.output.write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--seconds", type=float, default=150.0, help="no run of Transformers starts after this many")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    torch.manual_seed(0)
    report: dict[str, Any] = {}
    bench_engine(options, report)
    bench_transformers(options, report, deadline)
    options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
