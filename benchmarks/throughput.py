"""Offline throughput: every workload in a folder, greedy, to its exact output length.

    python benchmarks/throughput.py MODEL OUT [--device cpu] [any other engine flag]

Runs every `w*.json` in OUT by name (makes w1 to w4 there if there are none), prints `RES pyengine w1 TOKENS_PER_S SECONDS` a
workload, and writes the tokens to `OUT/pyengine-w1.json`, so that engines can be compared token by token.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path

from pyengine import LLM, SamplingParams
from pyengine.config import EngineArgs
from pyengine.server.flags import add_engine_flags

from workloads import load_workloads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_path", metavar="MODEL", help="Hugging Face folder, GGUF file or hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the workloads and of the results")
    parser.add_argument("--only", nargs="*", help="run these workloads only, say w1 w3")
    parser.add_argument("--stats", action="store_true", help="print the engine's counters after each workload")
    add_engine_flags(parser)
    flags = parser.parse_args()
    start = time.perf_counter()
    llm = LLM(**{f.name: getattr(flags, f.name) for f in fields(EngineArgs)} | {"model": flags.model_path})
    print(f"RES pyengine startup {time.perf_counter() - start:.1f}", flush=True)
    tokenizer = llm.get_tokenizer()
    for name, requests in load_workloads(flags.out, lambda text: tokenizer(text)["input_ids"]).items():
        if flags.only and name not in flags.only:
            continue
        prompts = [{"prompt_token_ids": request["ids"]} for request in requests]
        params = [SamplingParams(temperature=0, max_tokens=request["n"], ignore_eos=True) for request in requests]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(result.outputs[0].token_ids) for result in results]
        print(f"RES pyengine {name} {sum(map(len, tokens)) / seconds:.1f} {seconds:.2f}", flush=True)
        if flags.stats:
            print(f"STATS {name} {json.dumps(llm.stats())}", flush=True)
        (flags.out / f"pyengine-{name}.json").write_text(json.dumps(tokens))
    llm.shutdown()


if __name__ == "__main__":
    main()
