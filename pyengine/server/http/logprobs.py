"""Log-probabilities in the three forms that HTTP clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyengine.outputs import Logprob, PositionLogprobs

#: JSON has no infinity; vLLM's clients know this number for it.
LOWEST = -9999.0


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def _ranked(position: PositionLogprobs) -> list[Logprob]:
    return sorted(position.values(), key=lambda logprob: logprob.rank)


def chat_logprobs(token_ids: Sequence[int], positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion, with the `count` most likely tokens of each position."""

    def entry(logprob: Logprob) -> dict[str, Any]:
        data = logprob.bytes
        token = logprob.decoded_token or ""
        return {"token": token, "logprob": _value(logprob), "bytes": None if data is None else list(data)}

    content = [
        entry(position[token_id]) | {"top_logprobs": [entry(other) for other in _ranked(position)[:count]]}
        for token_id, position in zip(token_ids, positions, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, piece by piece: text offsets go on from one piece to the next."""

    def __init__(self) -> None:
        self._offset = 0

    def take(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], *, head: str = "", text: str = ""
    ) -> dict[str, Any]:
        """The next positions. Each one's `top_logprobs` has its own token beside the most likely ones.

        Args:
            token_ids: of the positions.
            positions: None for a prompt's first token, which nothing predicts.
            head: that token's text.
            text: of the prompt. It may lack the head, where that is a token which the tokenizer put before the prompt.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            own = None if position is None else position[token_id]
            tokens.append(head if own is None else own.decoded_token or "")
            values.append(None if own is None else _value(own))
            tops.append(None if position is None else self._top(position))
            offsets.append(self._offset)
            if own is not None or text.startswith(head):
                self._offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    @staticmethod
    def _top(position: PositionLogprobs) -> dict[str, float]:
        # Backwards, so that of tokens that look the same the most likely one stays.
        return {logprob.decoded_token or "": _value(logprob) for logprob in reversed(_ranked(position))}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two pieces of `CompletionLogprobs` as one."""
    return {key: first[key] + second[key] for key in first}


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM sends them: by token id."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _value(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}
            for token_id, logprob in position.items()
        }
        for position in positions
    ]
