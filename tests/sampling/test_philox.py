"""The random numbers: the published vectors, and what rule 10 needs of them."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.sampling.philox import UniformSource, philox4x32, uniforms

# From the authors' own known-answer file (Random123, kat_vectors, philox4x32 10 rounds).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (np.array([word, 0], dtype=np.uint64) for word in words(counter))
    k0, k1 = words(key)
    result = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert [int(word[0]) for word in result] == words(expected)


def test_rule_10_a_number_depends_on_seed_and_position_only() -> None:
    whole = uniforms(1234, 0, 300)
    for first, count in [(0, 1), (63, 2), (64, 64), (299, 1), (17, 200)]:
        assert np.array_equal(uniforms(1234, first, count), whole[first : first + count])
    source = UniformSource(1234)
    for position in [0, 299, 1, 64, 63, 128, 5]:
        assert source.at(position) == whole[position]


def test_seeds_give_different_numbers() -> None:
    seeds = [0, 1, 2, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63) + 1]
    rows = [tuple(uniforms(seed, 0, 8)) for seed in seeds]
    assert len(set(rows)) == len(seeds)
    assert len({value for row in rows for value in row}) == 8 * len(seeds)


def test_a_seed_beyond_64_bits_wraps() -> None:
    # Choice i of n draws with seed + i, which may pass the largest seed.
    assert np.array_equal(uniforms(2**64 + 5, 0, 4), uniforms(5, 0, 4))
    assert np.array_equal(uniforms(-1, 0, 4), uniforms(2**64 - 1, 0, 4))


def test_numbers_are_uniform_and_uncorrelated() -> None:
    values = uniforms(7, 0, 40_000)
    assert 0 <= values.min() < values.max() < 1
    # 100 bins, expected 400 each: chi-square with 99 degrees of freedom has deviation sqrt(198); six of them.
    counts = np.bincount((values * 100).astype(int), minlength=100)
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 6 * 198**0.5
    other = uniforms(8, 0, 40_000)
    for a, b in [(values[:-1], values[1:]), (values, other)]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / 40_000**0.5
