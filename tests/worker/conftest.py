"""Transformers' answers for the tiny checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from token_reference import Reference


@pytest.fixture(scope="session")
def transformers_reference(tiny_llama: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()

    class Transformers:
        @cache  # noqa: B019 - lives as long as the session
        def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
            """Greedy tokens. No step is a near tie, so that rounding cannot decide."""
            tokens = list(prompt)
            for _ in range(num_tokens):
                logits = self.logits(tokens)[-1]
                best = logits.topk(2)
                assert best.values[0] - best.values[1] > 1e-3, "choose another prompt: a near tie"
                tokens.append(int(best.indices[0]))
            return tokens[len(prompt) :]

        def logits(self, token_ids: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
            return logits

        def logprobs(self, token_ids: list[int]) -> torch.Tensor:
            """float64 [num_tokens, vocab_size]"""
            return self.logits(token_ids).double().log_softmax(-1)

    return Transformers()
