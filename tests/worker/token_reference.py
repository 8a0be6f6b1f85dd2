"""What tests of steps compare with."""

from __future__ import annotations

from typing import Protocol

import torch


class Reference(Protocol):
    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]: ...

    def logprobs(self, token_ids: list[int]) -> torch.Tensor: ...
