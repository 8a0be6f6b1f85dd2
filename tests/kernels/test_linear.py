"""pack_linear_weight and linear against float64, on each instruction set."""

from __future__ import annotations

import math

import pytest
import references
import torch
from checks import activated, assert_close, assert_same_bits, pairwise, poison, strided_rows, turn_about
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import ATTENTION_ISAS, KernelBackend
from torch import Tensor

ISAS = ATTENTION_ISAS
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [FP32, FP16, BF16]
ROUNDING = {FP32: 0.0, FP16: 2**-11, BF16: 2**-8}

ROWS = [1, 2, 3, 5, 6, 7, 8, 13, 14, 15, 28, 29, 64, 100]
GRID = pairwise(
    ROWS,
    [1, 16, 60, 64, 192, 200, 576],  # in
    [1, 15, 16, 33, 64, 130],  # out
    TYPES,  # input
    TYPES,  # weight
    [True, False],  # fp32 output
    [True, False],  # bias
)


def pack(backend: KernelBackend, weight: Tensor) -> Tensor:
    out_features, in_features = weight.shape
    packed = poison(-(-out_features // 16), in_features, 16, dtype=weight.dtype)
    backend.ops.pack_linear_weight(packed, weight)
    return packed


def check(backend: KernelBackend, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    out = poison(len(x), len(weight) + 5, dtype=out_dtype)
    backend.ops.linear(out[:, : len(weight)], x, pack(backend, weight), bias)
    expected = references.linear(x, weight, bias)
    # Float32 sums of k terms: the error grows with the terms' magnitudes, not with the result's.
    magnitude = x.double().abs() @ weight.double().abs().T
    bound = 1e-6 * (magnitude.max().item() + 1)
    assert_close(out[:, : len(weight)], expected, bound, ROUNDING[out_dtype])
    assert out[:, len(weight) :].isnan().all(), "wrote beyond its columns"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (17, 20), (100, 64)])
def test_pack_linear_weight(cpu_backend: KernelBackend, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = strided_rows(*shape, dtype, padding=3)
    assert_same_bits(pack(cpu_backend, weight), references.pack_linear_weight(weight))


@pytest.mark.parametrize(("rows", "k", "n", "dtype", "weight_dtype", "wide_out", "has_bias"), GRID)
def test_linear(
    cpu_backend: KernelBackend,
    rows: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    wide_out: bool,
    has_bias: bool,
) -> None:
    torch.manual_seed(rows * 1000 + k)
    x = strided_rows(rows, k, dtype, padding=rows % 3)
    bias = torch.randn(n).to(dtype) if has_bias else None
    check(cpu_backend, x, torch.randn(n, k).to(weight_dtype), bias, FP32 if wide_out else dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "k", "n"), [(600, 1536, 40), (200, 4100, 33), (1, 4100, 100), (40, 576, 1000)])
def test_several_blocks(cpu_backend: KernelBackend, rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k)
    check(cpu_backend, torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), None, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 16, 20), (2, 48, 64), (3, 80, 576), (7, 32, 17), (64, 160, 640), (300, 400, 600), (40, 1520, 96)]
)
def test_gated_is_the_product_and_the_activation(
    cpu_backend: KernelBackend, rows: int, n: int, k: int, activation: str
) -> None:
    """The same bits, with any number of panels to a unit of work."""
    ops = cpu_backend.ops
    torch.manual_seed(rows)
    x, gate, up = strided_rows(rows, k, FP32, padding=2), torch.randn(n, k), torch.randn(n, k)
    bias = torch.randn(2 * n) if rows != 7 else None
    products = poison(rows, 2 * n, dtype=FP32)
    ops.linear(products, x, pack(cpu_backend, torch.cat([gate, up])), bias)
    out = poison(rows, n + 3, dtype=FP32)
    ops.gated_linear(out[:, :n], x, pack(cpu_backend, turn_about(gate, up)), activation, bias)
    assert_same_bits(out[:, :n], activated(ops, products, activation))
    assert out[:, n:].isnan().all()


@pytest.mark.parametrize("rows", [2, 20])
def test_gated_with_a_last_panel_in_part(cpu_backend: KernelBackend, rows: int) -> None:
    """Of 24 columns, in panels of 16: the gate's, what it gates, the gate's rest, the rest of what it gates."""
    ops = cpu_backend.ops
    x, gate, up, bias = torch.randn(rows, 40), torch.randn(32, 40), torch.randn(32, 40), torch.randn(48)
    gate[24:] = up[24:] = 0.0
    products = poison(rows, 48, dtype=FP32)
    ops.linear(products, x, pack(cpu_backend, torch.cat([gate[:24], up[:24]])), bias)
    out = poison(rows, 30, dtype=FP32)
    panels = pack(cpu_backend, turn_about(gate, up))
    ops.gated_linear(out[:, :24], x, panels, "silu", bias)
    assert_same_bits(out[:, :24], activated(ops, products, "silu"))
    assert out[:, 24:].isnan().all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 450),
    n=st.integers(1, 150),
    dtype=st.sampled_from(TYPES),
    weight_dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(
    cpu_backend: KernelBackend, rows: int, k: int, n: int, dtype: torch.dtype, weight_dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    check(cpu_backend, torch.randn(rows, k).to(dtype), torch.randn(n, k).to(weight_dtype), None, dtype)


def test_no_rows(cpu_backend: KernelBackend) -> None:
    packed = pack(cpu_backend, torch.randn(20, 8))
    cpu_backend.ops.linear(torch.empty(0, 20), torch.empty(0, 8), packed)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_stay_in_their_row_and_column(cpu_backend: KernelBackend, bad: float) -> None:
    x, weight = torch.randn(20, 70), torch.randn(40, 70)
    x[3, 69] = bad
    weight[17, 2] = bad
    out = poison(20, 40, dtype=FP32)
    cpu_backend.ops.linear(out, x, pack(cpu_backend, weight))
    finite = torch.isfinite(out)
    assert not finite[3].any()
    assert not finite[:, 17].any()
    finite[3] = finite[:, 17] = True
    assert finite.all()
