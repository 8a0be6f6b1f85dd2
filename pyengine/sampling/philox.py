"""Philox 4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a pure function of (key, counter). With the request's seed as key and the output position as counter, a draw does
not depend on what was drawn before, on the batch, or on whether the sequence was preempted in between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]  # 32-bit words in 64-bit integers, so that products do not overflow


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words a counter.

    Args:
        counter: four arrays [n] of 32-bit words.
        key: two 32-bit words, shared by all n.

    Returns:
        four arrays [n] of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(seed: int, first_position: int, count: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), 53 bits each, for `count` output positions from `first_position` on.

    Args:
        seed: any integer; taken modulo 2**64.
        first_position: 0 or more.
        count: how many.

    Returns:
        float64 [count]; entry i depends on (seed, first_position + i) only.
    """
    seed %= 2**64
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    zeros = np.zeros(count, dtype=np.uint64)
    high, low, _, _ = philox4x32((positions & _LOW, positions >> _HALF, zeros, zeros), (seed & 0xFFFFFFFF, seed >> 32))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return bits * 2.0**-53


class UniformSource:
    """The uniform numbers of one request, made in pages because a call for one costs as much as a call for many."""

    _PAGE = 64

    __slots__ = ("_first", "_page", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = -1
        self._page: list[float] = []

    def at(self, position: int) -> float:
        """The number in [0, 1) that belongs to output position `position`."""
        first = position - position % self._PAGE
        if first != self._first:
            self._page = uniforms(self._seed, first, self._PAGE).tolist()
            self._first = first
        return self._page[position - first]
