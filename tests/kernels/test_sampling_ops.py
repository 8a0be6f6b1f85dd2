"""Sampling ops on every backend, against the Python sampler's own rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import assert_close, assert_same_bits
from kernel_backend import KernelBackend
from torch import Tensor

from pyengine.sampling.draw import TokenDrawer
from pyengine.sampling.philox import uniforms


def reference_draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    row = logits.numpy()
    uniform = float(uniforms(seed, position, 1)[0])
    drawer = TokenDrawer(len(row))
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    return drawer.draw(row, float(row.max()), **options)


def sample(backend: KernelBackend, logits: Tensor, **rows: list[float]) -> list[int]:
    """Token ids of each row; parameters that are not given are off."""
    n = len(logits)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 7, "positions": 0}
    types = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}
    values = {k: torch.tensor(rows.get(k, [v] * n), dtype=types.get(k, torch.float32)) for k, v in defaults.items()}
    token_ids = torch.full((n,), -7)
    backend.ops.sample_top_k_top_p(token_ids, logits, *values.values())
    return token_ids.tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 300, 2500])
def test_draws_are_the_samplers(backend: KernelBackend, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.3, 1.0, 2.5)
        for top_k in (0, 1, 4, 10_000)
        for top_p in (1.0, 0.9, 0.4, 1e-6)
        for min_p in (0.0, 0.05)
    ]
    n = len(settings)
    logits = torch.randn(n, vocab_size + 3)[:, :vocab_size] * 3
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*settings, strict=True))
    seeds, positions = [(-1) ** i * i * 10**15 for i in range(n)], [i * 7 + (2**33 if i % 5 == 0 else 0) for i in range(n)]
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    actual = sample(backend, logits, **parameters, seeds=seeds, positions=positions)
    expected = [
        reference_draw(logits[i].contiguous(), temperature[i], top_k[i], np.float32(top_p[i]), min_p[i], seeds[i], positions[i])
        for i in range(n)
    ]
    assert actual == expected


def test_equal_logits(backend: KernelBackend) -> None:
    """top_k keeps all ties; top_p the lowest ids of them."""
    logits = torch.zeros(200, 40)
    positions = list(range(200))
    ties = sample(backend, logits, top_k=[3] * 200, positions=positions)
    assert len(set(ties)) > 30
    nucleus = sample(backend, logits, top_p=[0.25] * 200, positions=positions)
    assert set(nucleus) == set(range(10))


def test_frequencies(backend: KernelBackend) -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    n = 1000 if backend.is_slow else 4000
    drawn = torch.tensor(sample(backend, probabilities.log().repeat(n, 1), positions=list(range(n))))
    assert_close(torch.bincount(drawn, minlength=4) / n, probabilities, 5 * 0.5 / n**0.5, 0)


def test_greedy_and_rows_that_cannot_be_sampled(backend: KernelBackend) -> None:
    logits = torch.randn(6, 70)
    logits[0, [13, 40]] = 9.0
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 66] = -3.0
    ids = sample(backend, logits, temperature=[0.0, 1.0, 1.0, 1.0, 1.0, 1e-35])
    assert ids == [13, -1, -1, -1, 66, int(logits[5].argmax())]


def test_penalties(backend: KernelBackend) -> None:
    rows, vocab = 4, 500
    logits = torch.randn(rows, vocab + 2)[:, :vocab]
    mask, counts = torch.rand(rows, vocab) < 0.2, torch.randint(0, 3, (rows, vocab), dtype=torch.int32)
    repetition, presence, frequency = torch.tensor([1.0, 1.3, 0.8, 2.0]), torch.randn(rows), torch.randn(rows)
    x = logits.double()
    scaled = torch.where(x > 0, x / repetition[:, None].double(), x * repetition[:, None].double())
    expected = torch.where(mask | (counts > 0), scaled, x)
    expected = expected - frequency[:, None].double() * counts - presence[:, None].double() * (counts > 0)
    backend.ops.apply_penalties(logits, mask, counts, repetition, presence, frequency)
    assert_close(logits, expected, 1e-6, 1e-6)


@pytest.mark.parametrize("vocab", [1, 32, 77, 1000])
def test_bitmask(backend: KernelBackend, vocab: int) -> None:
    allowed = torch.rand(3, vocab) < 0.5
    words = torch.zeros(3, -(-vocab // 32), dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] |= allowed[:, token].long() << token % 32
    bitmask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    logits = torch.randn(3, vocab)
    expected = logits.masked_fill(~allowed, -torch.inf)
    backend.ops.apply_bitmask(logits, bitmask)
    assert_same_bits(logits, expected)


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 255, 256, 257, 1000, 49_152])
def test_argmax_is_numpys(vocab_size: int, cpu_backend: KernelBackend) -> None:
    """Ties, infinities and NaNs at any place of a row."""
    generator = np.random.default_rng(vocab_size)
    rows = generator.integers(-50, 50, (40, vocab_size + 5)).astype(np.float32)[:, :vocab_size]
    for i, value in enumerate([np.nan, np.inf, -np.inf, np.nan, 77.0, np.inf] * 5):
        rows[i, generator.integers(0, vocab_size, 1 + i // 6)] = value
    rows[30, :] = -np.inf
    rows[31, :] = np.nan
    rows[32, vocab_size // 2 :] = np.nan
    rows[33, :] = np.inf
    token_ids, maxima = torch.full((40,), -7), torch.empty(40)
    cpu_backend.ops.argmax(token_ids, maxima, torch.from_numpy(rows))
    assert token_ids.tolist() == rows.argmax(axis=1).tolist()
    np.testing.assert_array_equal(maxima.numpy(), rows.max(axis=1))
