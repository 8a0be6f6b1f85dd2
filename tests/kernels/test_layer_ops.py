"""rms_norm, fused_add_rms_norm, rotary_embedding and the gated activations against float64, on every backend."""

from __future__ import annotations

import math

import pytest
import references
import torch
from checks import assert_close, assert_same_bits, pairwise, poison, strided_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import KernelBackend
from torch import Tensor

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [FP32, FP16, BF16]
#: (atol, rtol): the result rounded to its type, and float32 arithmetic before it.
ROUNDED = {FP32: (1e-6, 2e-6), FP16: (1e-6, 2**-10), BF16: (1e-6, 2**-7)}
ROTARY = {FP32: (1e-5, 1.3e-6), FP16: (1e-3, 2**-10), BF16: (1e-2, 2**-7)}

TOKENS = [1, 2, 7, 83]
SIZES = [8, 64, 200, 576, 1536, 5120]
NORM_GRID = pairwise(TOKENS, SIZES, TYPES, [0, 8, 64])


def random_rows(rows: int, columns: int, dtype: torch.dtype, padding: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return strided_rows(rows, columns, dtype, padding)


@pytest.mark.parametrize(("tokens", "size", "dtype", "padding"), NORM_GRID)
def test_rms_norm(backend: KernelBackend, tokens: int, size: int, dtype: torch.dtype, padding: int) -> None:
    x = random_rows(tokens, size, dtype, padding, seed=size)
    weight = (torch.rand(size) + 0.5).to(dtype)
    out = poison(tokens, size + 8, dtype=dtype)[:, :size]
    backend.ops.rms_norm(out, x, weight, 1e-5)
    assert_close(out, references.rms_norm(x, weight, 1e-5), *ROUNDED[dtype])


@pytest.mark.parametrize(("tokens", "size", "dtype", "padding"), NORM_GRID)
def test_fused_add_rms_norm(backend: KernelBackend, tokens: int, size: int, dtype: torch.dtype, padding: int) -> None:
    x = random_rows(tokens, size, dtype, padding, seed=size)
    residual = random_rows(tokens, size, dtype, 16, seed=size + 1)
    weight = (torch.rand(size) + 0.5).to(dtype)
    summed = (x.float() + residual.float()).to(dtype)
    expected = references.rms_norm(summed, weight, 1e-6)
    backend.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert_same_bits(residual, summed)
    # Backends may normalise the sum before or after it is rounded.
    atol, rtol = ROUNDED[dtype]
    assert_close(x, expected, max(atol, rtol) if dtype != FP32 else atol, 2 * rtol)


def test_rms_norm_of_zeros_and_tiny_rows(backend: KernelBackend) -> None:
    x = torch.zeros(3, 64)
    x[1] = 1e-12
    x[2] = 1e15
    out = poison(3, 64, dtype=FP32)
    weight = torch.ones(64)
    backend.ops.rms_norm(out, x, weight, 1e-5)
    assert_close(out, references.rms_norm(x, weight, 1e-5), 1e-7, 2e-6)


def test_rms_norm_spreads_nan_over_its_row_only(backend: KernelBackend) -> None:
    x = torch.randn(4, 128)
    x[2, 77] = math.nan
    out = poison(4, 128, dtype=FP32)
    backend.ops.rms_norm(out, x, torch.ones(128), 1e-5)
    assert out.isnan().any(dim=1).tolist() == [False, False, True, False]
    assert out[2].isnan().all()


def rotary_cache(max_position: int, rotary_dim: int) -> Tensor:
    """fp32 [max_position, rotary_dim]: cosines, then sines."""
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(max_position).double()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


ROTARY_GRID = pairwise([1, 5, 42], [(4, 2), (9, 3), (5, 1)], [32, 64, 80, 96, 120, 128, 256], TYPES, [True, False], [1.0, 0.5])


@pytest.mark.parametrize(("tokens", "heads", "head_dim", "dtype", "is_neox", "fraction"), ROTARY_GRID)
def test_rotary_embedding(
    backend: KernelBackend,
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    is_neox: bool,
    fraction: float,
) -> None:
    torch.manual_seed(tokens)
    rotary_dim = int(head_dim * fraction) // 8 * 8
    positions = torch.randint(0, 500, (tokens,))
    cos_sin = rotary_cache(500, rotary_dim)
    qkv = torch.randn(tokens, heads[0] + 2 * heads[1], head_dim).to(dtype)
    query, key, value = qkv.split([heads[0], heads[1], heads[1]], dim=1)
    expected = [references.rotary_embedding(positions, x, cos_sin, is_neox) for x in (query, key)]
    untouched = value.clone()
    backend.ops.rotary_embedding(positions, query, key, cos_sin, is_neox)
    assert_close(query, expected[0], *ROTARY[dtype])
    assert_close(key, expected[1], *ROTARY[dtype])
    assert_same_bits(value, untouched)


def test_rotary_embedding_without_key(backend: KernelBackend) -> None:
    positions, cos_sin = torch.tensor([3, 0, 9]), rotary_cache(10, 64)
    query = torch.randn(3, 4, 64)
    expected = references.rotary_embedding(positions, query, cos_sin, True)
    backend.ops.rotary_embedding(positions, query, None, cos_sin)
    assert_close(query, expected, *ROTARY[FP32])


ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]
ACTIVATION_GRID = pairwise(ACTIVATIONS, [1, 3, 42], [8, 64, 200, 1536, 9000], TYPES, [0, 24])


def activate(backend: KernelBackend, name: str, out: Tensor, x: Tensor) -> None:
    if name == "silu":
        backend.ops.silu_and_mul(out, x)
    else:
        backend.ops.gelu_and_mul(out, x, name == "gelu_tanh")


def activation_reference(name: str, x: Tensor) -> Tensor:
    return references.silu_and_mul(x) if name == "silu" else references.gelu_and_mul(x, name == "gelu_tanh")


@pytest.mark.parametrize(("name", "tokens", "d", "dtype", "padding"), ACTIVATION_GRID)
def test_gated_activation(backend: KernelBackend, name: str, tokens: int, d: int, dtype: torch.dtype, padding: int) -> None:
    x = random_rows(tokens, 2 * d, dtype, padding, seed=d)
    out = poison(tokens, d + padding, dtype=dtype)[:, :d]
    activate(backend, name, out, x)
    assert_close(out, activation_reference(name, x), *ROUNDED[dtype])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation_over_the_whole_range(backend: KernelBackend, name: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4093), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4, math.nan])])
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    out = poison(1, len(gate), dtype=FP32)
    activate(backend, name, out, x)
    assert_close(out, activation_reference(name, x), 2e-6, 2e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 90).map(lambda n: 8 * n),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(backend: KernelBackend, tokens: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x = random_rows(tokens, size, dtype, 8, seed)
    weight = (torch.rand(size) + 0.5).to(dtype)
    out = poison(tokens, size, dtype=dtype)
    backend.ops.rms_norm(out, x, weight, 1e-5)
    assert_close(out, references.rms_norm(x, weight, 1e-5), *ROUNDED[dtype])
    gated = random_rows(tokens, 2 * size, dtype, 8, seed)
    backend.ops.silu_and_mul(out, gated)
    assert_close(out, references.silu_and_mul(gated), *ROUNDED[dtype])


@pytest.mark.parametrize("size", [1, 3, 13, 17, 31, 577])
def test_odd_sizes(cpu_backend: KernelBackend, size: int) -> None:
    x = random_rows(5, size, FP32, 3, size)
    weight = torch.rand(size)
    out = poison(5, size, dtype=FP32)
    cpu_backend.ops.rms_norm(out, x, weight, 1e-5)
    assert_close(out, references.rms_norm(x, weight, 1e-5), *ROUNDED[FP32])
    gated = random_rows(5, 2 * size, FP32, 1, size)
    cpu_backend.ops.gelu_and_mul(out, gated)
    assert_close(out, references.gelu_and_mul(gated, True), *ROUNDED[FP32])
