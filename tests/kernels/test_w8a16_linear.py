"""pack_w8a16_weight, w8a16_linear and w8a16_embedding on each instruction set."""

from __future__ import annotations

import math

import pytest
import references
import torch
from checks import activated, assert_same_bits, pairwise, poison, strided_rows, turn_about
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import KernelBackend
from torch import Tensor

from pyengine.ops import get_ops, load_core

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [FP32, FP16, BF16]
ROUNDING = {FP32: 0.0, FP16: 2**-11, BF16: 2**-8}


def num_groups(in_features: int) -> int:
    return math.ceil(math.ceil(in_features / 64) / 9)


def group_size(in_features: int) -> int:
    """The fewest groups of at most 9 steps of 64, as even as they can be."""
    return math.ceil(math.ceil(in_features / 64) / num_groups(in_features)) * 64


# Rows that are multiplied in vectors on AMX and not, in one tile and several, in one block of rows and several.
ROWS = [1, 2, 3, 4, 5, 6, 15, 16, 17, 31, 33, 64, 100]


def pack(backend: KernelBackend, weight: Tensor) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    packed = torch.full((-(-n // 32), -(-k // 64), 2048), 99, dtype=torch.int8)
    factors = poison(-(-n // 32), num_groups(k), 64, dtype=FP32)
    backend.ops.pack_w8a16_weight(packed, factors, weight)
    return packed, factors


def multiply(backend: KernelBackend, x: Tensor, weight: tuple[Tensor, Tensor], n: int) -> Tensor:
    out = poison(len(x), n, dtype=FP32)
    backend.ops.w8a16_linear(out, x, *weight)
    return out


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (float64) [out, groups, group size] and scales (fp32) [out, groups] of a weight [out, in]."""
    size = group_size(weight.shape[1])
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    magnitude = groups.abs().amax(-1, keepdim=True)
    integers = torch.where(magnitude < 2**-100, 0, torch.round(groups * (torch.full_like(magnitude, 127.0) / magnitude)))
    return integers.double(), torch.where(magnitude < 2**-100, 0, magnitude / 127)[..., 0]


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (float64) and scales (fp32 [rows, 1]) of x [rows, in]."""
    x = x.float()
    magnitude = x.abs().amax(-1, keepdim=True)
    return torch.round(x * (torch.full_like(magnitude, 32767.0) / magnitude)).double(), magnitude / 32767


def check(backend: KernelBackend, x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = FP32) -> None:
    """Against float64 with the same rounding of both: the rest is a few roundings of fp32 for each group."""
    n, k = weight.shape
    out = poison(len(x), n + 5, dtype=out_dtype)
    backend.ops.w8a16_linear(out[:, :n], x, *pack(backend, weight), bias)
    (integers, scales), (rows, row_scales) = rounded_weight(weight), rounded_rows(x)
    values = (integers * scales.double()[..., None]).flatten(1)[:, :k]
    expected = references.linear(rows * row_scales.double(), values, bias)
    terms = (rows * row_scales.double()).abs() @ values.abs().T
    allowed = 2**-24 * (2 * num_groups(k) + 6) * terms + ROUNDING[out_dtype] * expected.abs() + 1e-9
    error = (out[:, :n].double() - expected).abs()
    assert (error <= allowed).all(), f"off by up to {(error / allowed).max():.3g} times what is allowed"
    assert out[:, n:].isnan().all(), "wrote beyond its columns"


@pytest.mark.parametrize(("n", "k"), [(32, 64), (1, 256), (50, 576), (70, 40), (33, 300)])
def test_layout(quantized_backend: KernelBackend, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight = torch.randn(n, k) * torch.rand(n, 1)
    weight[n // 2] = 0
    packed, factors = pack(quantized_backend, weight)
    integers, scales = rounded_weight(weight)
    # [panels, steps, column / 16, value / 4, column % 16, value % 4] -> [rows, values]
    values = packed.view(len(packed), -1, 2, 16, 16, 4).permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(1)
    expected = torch.zeros(values.shape, dtype=torch.float64)
    expected[:n, :k] = integers.flatten(1)[:, :k]
    assert torch.equal(values.double(), expected)
    stored = factors.view(len(packed), -1, 2, 32).permute(2, 0, 3, 1).flatten(1, 2)  # [2, rows, groups]
    assert torch.equal(stored[0, :n], scales)
    assert torch.equal(stored[1, :n].double(), integers.sum(-1))
    assert not stored[:, n:].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_embedding(quantized_backend: KernelBackend, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 300)
    integers, scales = rounded_weight(weight)
    indices = torch.randperm(70).repeat(2)
    out = poison(140, 305, dtype=dtype)
    quantized_backend.ops.w8a16_embedding(out[:, :300], indices, *pack(quantized_backend, weight))
    assert torch.equal(out[:, :300], (integers.float() * scales[..., None]).flatten(1)[indices, :300].to(dtype))
    assert out[:, 300:].isnan().all()


GRID = pairwise(
    ROWS,
    [64, 100, 256, 300, 576, 1536],  # in
    [1, 31, 32, 33, 64, 130],  # out
    TYPES,  # input
    [True, False],  # fp32 output
    [True, False],  # bias
)


@pytest.mark.parametrize(("rows", "k", "n", "dtype", "wide_out", "has_bias"), GRID)
def test_against_float64(
    quantized_backend: KernelBackend, rows: int, k: int, n: int, dtype: torch.dtype, wide_out: bool, has_bias: bool
) -> None:
    torch.manual_seed(rows * 1000 + k)
    x = strided_rows(rows, k, dtype, padding=rows % 3)
    bias = torch.randn(n).to(dtype) if has_bias else None
    check(quantized_backend, x, torch.randn(n, k), bias, FP32 if wide_out else dtype)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    k=st.integers(1, 700),
    n=st.integers(1, 140),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(quantized_backend: KernelBackend, rows: int, k: int, n: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    check(quantized_backend, torch.randn(rows, k).to(dtype), torch.randn(n, k))


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_extreme_values_do_not_overflow(quantized_backend: KernelBackend, rows: int) -> None:
    """The largest integers that there are, in groups of the most values."""
    assert group_size(1152) == 576
    for sign in (1.0, -1.0):
        x = torch.full((rows, 1152), sign)
        x[rows // 2, ::2] = -1.0
        for weight in (torch.full((32, 1152), 1.0), torch.full((32, 1152), -1.0)):
            check(quantized_backend, x, weight)


def test_close_to_the_unrounded_product(quantized_backend: KernelBackend) -> None:
    """Rounding normal weights to 8 bits costs about 0.7%, the activations' 16 bits nothing beside it."""
    torch.manual_seed(1)
    weight, x = torch.randn(128, 768), torch.randn(40, 768)
    exact = references.linear(x, weight, None)
    out = multiply(quantized_backend, x, pack(quantized_backend, weight), 128).double()
    assert 0.005 < (out - exact).norm() / exact.norm() < 0.009
    integers, scales = rounded_weight(weight)
    exact = references.linear(x, (integers * scales.double()[..., None]).flatten(1), None)
    assert (out - exact).norm() / exact.norm() < 1e-4


def test_a_row_is_the_same_for_any_number_of_rows(quantized_backend: KernelBackend) -> None:
    torch.manual_seed(2)
    k, n = 600, 100
    x = torch.randn(1500, k)
    packed = pack(quantized_backend, torch.randn(n, k))
    alone = torch.cat([multiply(quantized_backend, x[i : i + 1], packed, n) for i in range(64)])
    for rows in [*range(2, 65), 300, 1500]:
        out = multiply(quantized_backend, x[:rows], packed, n)
        assert_same_bits(out[:64], alone[:rows])
    assert_same_bits(multiply(quantized_backend, x[5:47], packed, n), alone[5:47])


@pytest.mark.usefixtures("num_threads")
def test_any_number_of_threads(quantized_backend: KernelBackend) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(90, 768), torch.randn(400, 768)
    results = []
    for count in (1, 2, 3):
        load_core().set_num_threads(count)
        packed = pack(quantized_backend, weight)
        results.append([*packed, *(multiply(quantized_backend, x[:rows], packed, 400) for rows in (1, 4, 30, 90))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same_bits(one, two)


def test_instruction_sets_agree() -> None:
    """The integers are the same everywhere; what adds with fused operations has the same bits."""
    core = load_core()
    torch.manual_seed(4)
    x, weight = torch.randn(21, 700), torch.randn(70, 700)
    before, results = core.get_isa(), {}
    for isa in core.supported_isas():
        core.set_isa(isa)
        backend = KernelBackend(isa, get_ops("cpu"), isa)
        packed = pack(backend, weight)
        results[isa] = (*packed, *(multiply(backend, x[:rows], packed, 70) for rows in (1, 2, 3, 21)))
    core.set_isa(before)
    plain = results.pop("scalar")
    fused = list(results.values())
    for other in fused:
        assert torch.equal(other[0], plain[0])
        assert_same_bits(other[1], plain[1])
        for out, expected, first in zip(other[2:], plain[2:], fused[0][2:], strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            assert_same_bits(out, first)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [2, 20])
def test_bad_values_stay_in_their_row(quantized_backend: KernelBackend, bad: float, rows: int) -> None:
    x = torch.randn(rows, 300)
    x[1, 299] = bad
    out = multiply(quantized_backend, x, pack(quantized_backend, torch.randn(40, 300)), 40)
    assert out[1].isnan().all()
    out[1] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weights_stay_in_their_column(quantized_backend: KernelBackend, bad: float) -> None:
    weight = torch.randn(40, 300)
    weight[3, 299] = bad
    out = multiply(quantized_backend, torch.randn(20, 300), pack(quantized_backend, weight), 40)
    assert out[:, 3].isnan().all()
    out[:, 3] = 0
    assert out.isfinite().all()


def test_tiny_activations(quantized_backend: KernelBackend) -> None:
    """Zeros and what is too small to divide by count as zero; what is small is as exact as anything."""
    packed = pack(quantized_backend, torch.randn(16, 64))
    x = torch.randn(1, 64)
    unit = multiply(quantized_backend, x, packed, 16)
    for factor, expected in ((0.0, 0.0), (2.0**-120, 0.0), (2.0**-149, 0.0), (2.0**-90, 2.0**-90)):
        assert torch.equal(multiply(quantized_backend, x * factor, packed, 16), unit * expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"), [(1, 64, 300, FP32), (2, 32, 64, BF16), (3, 96, 576, FP16), (70, 160, 300, FP32)]
)
def test_gated_is_the_product_and_the_activation(
    quantized_backend: KernelBackend, rows: int, n: int, k: int, dtype: torch.dtype, activation: str
) -> None:
    """The same bits, where neither rounds what lies between."""
    ops = quantized_backend.ops
    torch.manual_seed(rows)
    x, gate, up, bias = (
        strided_rows(rows, k, dtype, padding=2),
        torch.randn(n, k),
        torch.randn(n, k),
        torch.randn(2 * n).to(dtype),
    )
    products = poison(rows, 2 * n, dtype=FP32)
    ops.w8a16_linear(products, x, *pack(quantized_backend, torch.cat([gate, up])), bias)
    out = poison(rows, n + 3, dtype=FP32)
    ops.w8a16_gated_linear(out[:, :n], x, *pack(quantized_backend, turn_about(gate, up, panel=32)), activation, bias)
    assert_same_bits(out[:, :n], activated(ops, products, activation))
    assert out[:, n:].isnan().all()


def test_nothing_to_do(quantized_backend: KernelBackend) -> None:
    packed, factors = pack(quantized_backend, torch.randn(20, 64))
    ops = quantized_backend.ops
    ops.w8a16_linear(torch.empty(0, 20), torch.empty(0, 64), packed, factors)
    ops.w8a16_embedding(torch.empty(0, 64), torch.empty(0, dtype=torch.int64), packed, factors)
    ops.pack_w8a16_weight(packed[:0], factors[:0], torch.empty(0, 64))
