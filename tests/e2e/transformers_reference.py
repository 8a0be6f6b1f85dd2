"""What Transformers thinks of a sequence: one forward pass in fp32 says whether each of its tokens is the greedy one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Judgement:
    """Of one sequence, by Transformers' logits before each of its tokens but the first."""

    logprobs: list[float]  # of tokens 1, 2, ...
    behind: list[float]  # of the same tokens: the best logit minus the token's; 0 for the greedy one
    gaps: list[float]  # the best logit minus the second best

    def first_difference(self, start: int) -> int | None:
        """First token from `start` on that greedy decoding would not have taken, near ties aside; None if there is none.

        A sequence is judged in its own context. So tokens before a difference are those of Transformers' own greedy run, up to
        a step whose two best logits are closer than NEAR_TIE.
        """
        return next((i + 1 for i, behind in enumerate(self.behind) if i + 1 >= start and behind >= NEAR_TIE), None)


class TransformersReference:
    """A checkpoint in Transformers, in fp32."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def judge(self, token_ids: list[int]) -> Judgement:
        """Look at a whole sequence, prompt and output."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more only wait for each other with a model this small
        try:
            logits = self._model(torch.tensor([token_ids])).logits[0, :-1].double()  # [tokens - 1, vocabulary]
        finally:
            torch.set_num_threads(num_threads)
        own = torch.tensor(token_ids[1:])[:, None]
        best = logits.topk(2, dim=-1).values
        return Judgement(
            logprobs=torch.log_softmax(logits, -1).gather(1, own)[:, 0].tolist(),
            behind=(best[:, :1] - logits.gather(1, own))[:, 0].tolist(),
            gaps=(best[:, 0] - best[:, 1]).tolist(),
        )
