"""One draw from one row of logits: temperature, min_p, top_k, top_p."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from pyengine.sampling.candidates import CHUNK, top_candidates
from pyengine.sampling.row import Row

# How many candidates top_p looks at before it takes the whole row. The nucleus of a language model is nearly always smaller.
_NUCLEUS_GUESS = 64


class TokenDrawer:
    """Draws tokens by inverting the cumulative distribution over token ids in ascending order.

    top_k keeps every token whose logit is at least the k-th largest, ties included. top_p keeps the fewest most likely
    tokens (of equally likely ones, lower ids first) whose probability, among the tokens that min_p and top_k left, is at
    least top_p. The draw runs over ids in ascending order whatever was cut off, so that a cut which removes next to nothing
    changes next to no draw.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        num_chunks = -(-vocab_size // CHUNK)
        self._padded = np.zeros(num_chunks * CHUNK, dtype=np.float32)  # the tail stays 0
        self._weights = self._padded[:vocab_size]
        self._chunks = self._padded.reshape(num_chunks, CHUNK)

    def draw(
        self, logits: Row, maximum: float, *, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
    ) -> int:
        """The token that `uniform` picks.

        Args:
            logits: [vocab_size], contiguous; -inf for excluded tokens.
            maximum: the largest logit, finite.
            temperature: more than 0.
            top_k: 0 for off.
            top_p: in (0, 1]; 1 for off.
            min_p: in [0, 1]; 0 for off.
            uniform: in [0, 1).
        """
        if min_p == 0 and not 0 < top_k < self._vocab_size:
            self._fill_weights(logits, maximum, temperature)
            sums = np.cumsum(self._chunks.sum(axis=1), dtype=np.float64)  # [num_chunks], weight up to each chunk's end
            if top_p == 1:
                return self._draw_from_all(sums, uniform)
            total = float(sums[-1])
            token_ids = self._nucleus_candidates(logits, top_p * total, total)
            weights = self._weights[token_ids]
        else:
            token_ids = _cut(logits, maximum, temperature, top_k, min_p)
            weights = np.exp((logits[token_ids] - np.float32(maximum)) * np.float32(1 / temperature))
            total = float(weights.sum(dtype=np.float64))
        if top_p < 1:
            kept = _nucleus(weights, top_p * total)
            token_ids, weights = token_ids[kept], weights[kept]
        return int(token_ids[_invert(np.cumsum(weights, dtype=np.float64), uniform)])

    def _fill_weights(self, logits: Row, maximum: float, temperature: float) -> None:
        np.subtract(logits, np.float32(maximum), out=self._weights)
        if temperature != 1:
            np.multiply(self._weights, np.float32(1 / temperature), out=self._weights)
        np.exp(self._weights, out=self._weights)

    def _draw_from_all(self, sums: npt.NDArray[np.float64], uniform: float) -> int:
        chunk = _invert(sums, uniform)
        before = float(sums[chunk - 1]) if chunk else 0.0
        inside = np.cumsum(self._chunks[chunk], dtype=np.float64)
        return chunk * CHUNK + _search(inside, uniform * float(sums[-1]) - before)

    def _nucleus_candidates(self, logits: Row, threshold: float, total: float) -> npt.NDArray[np.intp]:
        """Tokens, ascending, among which are the most likely ones that weigh `threshold` of `total` together."""
        token_ids = top_candidates(logits, _NUCLEUS_GUESS)
        if float(self._weights[token_ids].sum(dtype=np.float64)) < threshold:
            # All tokens below this weight together weigh less than what the nucleus may leave out.
            token_ids = np.flatnonzero(self._weights >= np.float32((total - threshold) / self._vocab_size))
        return token_ids


def _cut(logits: Row, maximum: float, temperature: float, top_k: int, min_p: float) -> npt.NDArray[np.intp]:
    """Tokens that min_p and top_k leave, ascending. Each keeps the top of one and the same order, so they may swap places."""
    # Probability >= min_p * the largest one, in logits.
    bound = maximum + temperature * math.log(min_p) if min_p > 0 else -math.inf
    if not 0 < top_k < logits.shape[0]:
        return np.flatnonzero(logits >= bound)
    token_ids = top_candidates(logits, top_k)
    values = logits[token_ids]
    if top_k < len(values):
        bound = max(bound, float(np.partition(values, len(values) - top_k)[len(values) - top_k]))
    return token_ids[values >= bound]


def _nucleus(weights: Row, threshold: float) -> npt.NDArray[np.intp]:
    """Positions, ascending, of the fewest largest weights that make up `threshold` together; of equals, the first ones.

    Weights are sorted without their positions, which is many times as fast; the smallest one kept says which these are.
    """
    descending = np.sort(weights)[::-1]
    size = _search(np.cumsum(descending, dtype=np.float64), threshold, side="left") + 1
    smallest = descending[size - 1]
    kept = np.flatnonzero(weights >= smallest)
    surplus = len(kept) - size
    if surplus:
        kept = np.delete(kept, np.flatnonzero(weights[kept] == smallest)[-surplus:])
    return kept


def _invert(cumulative: npt.NDArray[np.float64], uniform: float) -> int:
    """The first entry of `cumulative` that is more than uniform times its last."""
    return _search(cumulative, uniform * float(cumulative[-1]))


def _search(cumulative: npt.NDArray[np.float64], target: float, side: Literal["left", "right"] = "right") -> int:
    """Where `target` falls among entries that have weight: rounding alone could take it before the first or after the last."""
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, max(target, 0.0), side=side)), last)
