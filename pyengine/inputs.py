"""The three forms a prompt can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TextPrompt:
    """Text, tokenised with the model's special tokens."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class ChatPrompt:
    """Messages (`{"role": ..., "content": ...}`), put through the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None  # instead of the model's
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokensPrompt | ChatPrompt
