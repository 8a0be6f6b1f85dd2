"""llama.cpp through the server inside xllamacpp on a GGUF file; `--slots` sequences at once where a workload has several."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp

from runner import Request, Text, num_threads, parser, run

ROOM_FOR_ONE = 4096  # tokens of context where there is one sequence
ROOM_IN_A_SLOT = 1024


def main() -> None:
    arguments = parser()
    arguments.add_argument("--slots", type=int, default=16, help="the best of 4 to 32 is the fair one to compare with")
    flags = arguments.parse_args()
    servers: dict[int, Any] = {}

    def generate(name: str, requests: list[Request]) -> list[Text]:
        server = servers[flags.slots if len(requests) > 1 else 1]
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: complete(server, request), requests))

    names = flags.names
    for flags.names in ([name] for name in names):  # a server is started outside the timed part
        count = len(json.loads((flags.workloads / f"{flags.names[0]}.json").read_text()))
        slots = flags.slots if count > 1 else 1
        if slots not in servers:
            servers.clear()
            servers[slots] = start(flags.model, slots)
        run(flags, generate)
    sys.stdout.flush()
    os._exit(0)  # its destructor may hang


def start(model: str, slots: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.warmup, params.cont_batching = model, False, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads()
    params.n_parallel, params.kv_unified = slots, False
    params.n_ctx = ROOM_FOR_ONE if slots == 1 else slots * ROOM_IN_A_SLOT
    return xllamacpp.Server(params)


def complete(server: Any, request: Request) -> Text:
    """Text and token count: it gives token ids only with log-probabilities, which would slow it down."""
    options = {"temperature": 0, "ignore_eos": True, "cache_prompt": True}
    answer = server.handle_completions({"prompt": request["ids"], "n_predict": request["n"], **options})
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    if "usage" not in answer:
        raise RuntimeError(f"no completion, but {str(answer)[:300]}")
    return {"text": answer["choices"][0]["text"], "num_tokens": answer["usage"]["completion_tokens"]}


if __name__ == "__main__":
    main()
