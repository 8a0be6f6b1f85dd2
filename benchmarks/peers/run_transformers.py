"""Transformers on a Hugging Face folder, in fp32: static batches of `--batch` requests, padded on the left."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from runner import Request, num_threads, parser, run

PADDING_ID = 2


def main() -> None:
    arguments = parser()
    arguments.add_argument("--batch", type=int, default=16)
    flags = arguments.parse_args()
    torch.set_num_threads(num_threads())
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()

    def generate(name: str, requests: list[Request]) -> list[list[int]]:
        tokens: list[list[int]] = []
        for start in range(0, len(requests), flags.batch):
            part = requests[start : start + flags.batch]
            width, longest = max(len(request["ids"]) for request in part), max(request["n"] for request in part)
            padding = [width - len(request["ids"]) for request in part]
            ids = torch.tensor([[PADDING_ID] * pad + request["ids"] for pad, request in zip(padding, part, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
            with torch.inference_mode():
                output = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    do_sample=False,
                    pad_token_id=PADDING_ID,
                )
            rows = output[:, width:].tolist()  # [batch, longest]; what a request did not ask for is dropped
            tokens += [row[: request["n"]] for row, request in zip(rows, part, strict=True)]
        return tokens

    run(flags, generate)


if __name__ == "__main__":
    main()
