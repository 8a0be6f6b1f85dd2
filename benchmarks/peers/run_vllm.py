"""vLLM's CPU build on a Hugging Face folder, in fp32, compiled, with prefix caching, on all cores."""

from __future__ import annotations

import os

from runner import Request, num_threads, parser, run

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads() - 1}")  # by default it leaves a core unused
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from vllm import LLM, SamplingParams


def main() -> None:
    flags = parser().parse_args()
    llm = LLM(model=flags.model, dtype="float32", max_model_len=4096, max_num_seqs=64, enable_prefix_caching=True)

    def generate(name: str, requests: list[Request]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=request["n"], ignore_eos=True) for request in requests]
        results = llm.generate([{"prompt_token_ids": request["ids"]} for request in requests], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    run(flags, generate)


if __name__ == "__main__":  # its worker processes import this file
    main()
