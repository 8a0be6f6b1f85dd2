"""pyengine, with the flags of its `LLM` as `--set name=value`."""

from __future__ import annotations

import json

from pyengine import LLM, SamplingParams

from runner import Request, parser, run


def main() -> None:
    arguments = parser()
    arguments.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help='an engine argument, say dtype="float32"'
    )
    flags = arguments.parse_args()
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in flags.set)}
    llm = LLM(None if flags.model == "default" else flags.model, device="cpu", disable_log_stats=True, **settings)

    def generate(name: str, requests: list[Request]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=request["n"], ignore_eos=True) for request in requests]
        results = llm.generate([{"prompt_token_ids": request["ids"]} for request in requests], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    run(flags, generate)
    llm.shutdown()


if __name__ == "__main__":
    main()
