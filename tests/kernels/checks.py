"""How kernel tests make inputs, cover combinations and compare results."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyengine.ops import Ops

#: (atol, rtol) of an attention output against float64, by the query's type.
ATTENTION_TOLERANCE = {
    torch.float32: (3e-5, 1e-5),
    torch.bfloat16: (1e-3, 2**-8),
    torch.float16: (1e-3, 2**-11),
}


def pairwise(*axes: Sequence[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """Combinations such that every two values of two axes meet in one of them: far fewer than the full product."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations(range(len(axes)), 2))
    wanted = {(i, a, j, b) for i, j in pairs for a in range(len(axes[i])) for b in range(len(axes[j]))}
    rows = []
    while wanted:
        i, a, j, b = min(wanted)
        best: tuple[int, ...] = ()
        best_gain = set[tuple[int, int, int, int]]()
        for _ in range(12):
            row = [rng.randrange(len(axis)) for axis in axes]
            row[i], row[j] = a, b
            gain = {pair for pair in ((k, row[k], m, row[m]) for k, m in pairs) if pair in wanted}
            if len(gain) > len(best_gain):
                best, best_gain = tuple(row), gain
        wanted -= best_gain
        rows.append(tuple(axis[v] for axis, v in zip(axes, best, strict=True)))
    return rows


def assert_close(actual: Tensor, expected: Tensor, atol: float, rtol: float) -> None:
    """|actual - expected| <= atol + rtol |expected|; infinities and NaN must stand at the same places."""
    actual, expected = actual.to(torch.float64), expected.to(torch.float64)
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN at different places"
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), "infinities at different places"
    assert torch.equal(actual[infinite], expected[infinite]), "infinities of different signs"
    finite = torch.isfinite(expected)
    error = (actual - expected).abs()[finite]
    allowed = atol + rtol * expected.abs()[finite]
    worst = (error - allowed).max().item() if error.numel() else 0.0
    assert worst <= 0, f"off by up to {error.max().item():.3g}, {worst:.3g} more than allowed"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, NaN included."""
    assert actual.dtype == expected.dtype
    assert torch.equal(as_bits(actual), as_bits(expected))


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of NaN (codes of 127 where the type has none), so that an element never written shows."""
    if dtype == torch.int8:
        return torch.full(shape, 127, dtype=dtype)
    return torch.full(shape, float("nan")).to(dtype)


def strided_rows(rows: int, columns: int, dtype: torch.dtype, padding: int) -> Tensor:
    """Random [rows, columns] whose rows lie columns + padding elements apart; between them NaN."""
    whole = poison(rows, columns + padding, dtype=dtype)
    view = whole[:, :columns]
    view.copy_(torch.randn(rows, columns))
    return view


def activated(ops: Ops, products: Tensor, activation: str) -> Tensor:
    """What the activation makes of the products of gate and up: fp32 [rows, 2 n] -> [rows, n]."""
    out = poison(products.shape[0], products.shape[1] // 2, dtype=products.dtype)
    if activation == "silu":
        ops.silu_and_mul(out, products)
    else:
        ops.gelu_and_mul(out, products, True)
    return out


def turn_about(gate: Tensor, up: Tensor, panel: int = 16) -> Tensor:
    """gate, up [n, ...] -> [2 n, ...]: a panel of the gate's rows, one of up's, and so on."""
    return torch.stack([gate.unflatten(0, (-1, panel)), up.unflatten(0, (-1, panel))], 1).flatten(0, 2)
