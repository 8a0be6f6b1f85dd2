"""pack_quantized_weight, quantized_linear and quantized_embedding in every format, on each instruction set."""

from __future__ import annotations

import math

import pytest
import references
import torch
from checks import activated, assert_same_bits, pairwise, poison, strided_rows, turn_about
from gguf_blocks import FORMATS, block_sizes, dequantize_blocks, quantize_blocks, random_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import KernelBackend
from torch import Tensor

from pyengine.ops import get_ops, load_core

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [FP32, FP16, BF16]
ROUNDING = {FP32: 0.0, FP16: 2**-11, BF16: 2**-8}
TILE_BYTES = dict(zip(FORMATS, (288, 320, 352, 384, 544, 2368, 2880, 3360), strict=True))


def pack(backend: KernelBackend, blocks: Tensor, kind: str) -> Tensor:
    _, size = block_sizes(kind)
    panels = -(-len(blocks) // 16)
    packed = torch.full((panels, blocks.shape[1] // size, TILE_BYTES[kind]), 255, dtype=torch.uint8)
    backend.ops.pack_quantized_weight(packed, blocks, kind)
    return packed


def multiply(backend: KernelBackend, x: Tensor, packed: Tensor, kind: str, n: int, bias: Tensor | None = None) -> Tensor:
    out = poison(len(x), n, dtype=FP32)
    backend.ops.quantized_linear(out, x, packed, kind, bias)
    return out


def check(
    backend: KernelBackend,
    kind: str,
    x: Tensor,
    blocks: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = FP32,
) -> None:
    """Against float64 with the same rounding of x: the rest is a few roundings of fp32 for each 32 values."""
    n = len(blocks)
    out = poison(len(x), n + 5, dtype=out_dtype)
    backend.ops.quantized_linear(out[:, :n], x, pack(backend, blocks, kind), kind, bias)
    weight, rounded = dequantize_blocks(blocks, kind).double(), references.quantized_rows(x)
    expected = references.linear(rounded, weight, bias)
    # A value is scale * q + minimum, each of which may be twice the largest value of its block.
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    terms = rounded.abs() @ (3 * largest).T
    allowed = 2**-24 * (x.shape[1] / 32 + 8) * terms + ROUNDING[out_dtype] * expected.abs() + 1e-7
    error = (out[:, :n].double() - expected).abs()
    assert (error <= allowed).all(), f"off by up to {(error / allowed).max():.3g} times what is allowed"
    assert out[:, n:].isnan().all(), "wrote beyond its columns"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (1, 512), (50, 768)])
def test_packed_rows_are_dequantised_exactly(quantized_backend: KernelBackend, kind: str, rows: int, columns: int) -> None:
    blocks = random_blocks(kind, rows, columns, seed=rows)
    indices = torch.randperm(rows).repeat(3)
    out = poison(len(indices), columns + 3, dtype=FP32)
    packed = pack(quantized_backend, blocks, kind)
    quantized_backend.ops.quantized_embedding(out[:, :columns], indices, packed, kind)
    assert torch.equal(out[:, :columns], dequantize_blocks(blocks, kind)[indices])
    assert out[:, columns:].isnan().all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_embedding_in_half_precision(quantized_backend: KernelBackend, dtype: torch.dtype) -> None:
    blocks = random_blocks("Q8_0", 20, 64)
    out = poison(20, 64, dtype=dtype)
    quantized_backend.ops.quantized_embedding(out, torch.arange(20), pack(quantized_backend, blocks, "Q8_0"), "Q8_0")
    assert_same_bits(out, dequantize_blocks(blocks, "Q8_0").to(dtype))


GRID = pairwise(
    list(FORMATS),
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 64, 100],  # rows
    [256, 512, 1536],  # in
    [1, 15, 16, 33, 64, 130],  # out
    TYPES,  # input
    [True, False],  # fp32 output
    [True, False],  # bias
)


@pytest.mark.parametrize(("kind", "rows", "k", "n", "dtype", "wide_out", "has_bias"), GRID)
def test_against_float64(
    quantized_backend: KernelBackend,
    kind: str,
    rows: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    wide_out: bool,
    has_bias: bool,
) -> None:
    torch.manual_seed(rows * 1000 + k)
    x = strided_rows(rows, k, dtype, padding=rows % 3)
    bias = torch.randn(n).to(dtype) if has_bias else None
    check(quantized_backend, kind, x, random_blocks(kind, n, k, seed=n), bias, FP32 if wide_out else dtype)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(list(FORMATS)),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 9),
    n=st.integers(1, 70),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(
    quantized_backend: KernelBackend, kind: str, rows: int, blocks: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    k = blocks * block_sizes(kind)[0] if blocks < 4 else blocks // 4 * 256
    check(quantized_backend, kind, torch.randn(rows, k).to(dtype), random_blocks(kind, n, k, seed=seed))


@pytest.mark.parametrize("kind", FORMATS)
def test_extreme_values_do_not_overflow(quantized_backend: KernelBackend, kind: str) -> None:
    """All bits set or clear in the weights and +-127 in the activations: the largest integers that there are."""
    k = 512
    scales = torch.tensor([0.01], dtype=FP16).view(torch.uint8)
    x = torch.tensor([[127.0], [-127.0], [1.0]]).repeat(1, k)
    x[2, ::2] = -1.0
    for byte in (0, 255):
        values, size = block_sizes(kind)
        blocks = torch.full((16, k // values, size), byte, dtype=torch.uint8)
        for offset in FORMATS[kind]:
            blocks[..., offset : offset + 2] = scales
        check(quantized_backend, kind, x, blocks.flatten(1))


@pytest.mark.parametrize("kind", FORMATS)
def test_close_to_the_unrounded_product(quantized_backend: KernelBackend, kind: str) -> None:
    """Rounding normal activations to int8 costs about half a percent, and no more."""
    torch.manual_seed(1)
    weight, x = torch.randn(128, 768), torch.randn(40, 768)
    blocks = torch.from_numpy(quantize_blocks(weight.numpy(), kind))
    out = multiply(quantized_backend, x, pack(quantized_backend, blocks, kind), kind, 128).double()
    exact = references.linear(x, dequantize_blocks(blocks, kind), None)
    assert 0.003 < (out - exact).norm() / exact.norm() < 0.007


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_the_same_for_any_number_of_rows(quantized_backend: KernelBackend, kind: str) -> None:
    torch.manual_seed(2)
    k, n = 768, 72
    x = torch.randn(300, k)
    packed = pack(quantized_backend, random_blocks(kind, n, k), kind)
    alone = torch.cat([multiply(quantized_backend, x[i : i + 1], packed, kind, n) for i in range(64)])
    for rows in [*range(2, 65), 300]:
        out = multiply(quantized_backend, x[:rows], packed, kind, n)
        assert_same_bits(out[:64], alone[:rows])
    assert_same_bits(multiply(quantized_backend, x[5:47], packed, kind, n), alone[5:47])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("kind", FORMATS)
def test_any_number_of_threads(quantized_backend: KernelBackend, kind: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(90, 768)
    blocks = random_blocks(kind, 400, 768)
    results = []
    for count in (1, 2, 3):
        load_core().set_num_threads(count)
        packed = pack(quantized_backend, blocks, kind)
        results.append([packed, *(multiply(quantized_backend, x[:rows], packed, kind, 400) for rows in (1, 4, 30, 90))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same_bits(one, two)


@pytest.mark.parametrize("kind", FORMATS)
def test_instruction_sets_agree(kind: str) -> None:
    """The integers are the same everywhere; what adds with fused operations has the same bits."""
    core = load_core()
    torch.manual_seed(4)
    x = torch.randn(13, 768)
    blocks = random_blocks(kind, 33, 768)
    before, results = core.get_isa(), {}
    for isa in core.supported_isas():
        core.set_isa(isa)
        backend = KernelBackend(isa, get_ops("cpu"), isa)
        packed = pack(backend, blocks, kind)
        results[isa] = (packed, multiply(backend, x, packed, kind, 33))
    core.set_isa(before)
    packed, out = results.pop("scalar")
    fused = list(results.values())
    for other_packed, other in fused:
        assert torch.equal(other_packed, packed)
        torch.testing.assert_close(other, out, rtol=1e-5, atol=1e-4 * float(out.abs().max()))
        assert_same_bits(other, fused[0][1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K"])
def test_bad_values_stay_in_their_row(quantized_backend: KernelBackend, kind: str, bad: float) -> None:
    x = torch.randn(20, 256)
    x[3, 200] = bad
    out = multiply(quantized_backend, x, pack(quantized_backend, random_blocks(kind, 40, 256), kind), kind, 40)
    assert out[3].isnan().all()
    out[3] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_tiny_activations(quantized_backend: KernelBackend, kind: str) -> None:
    """Zeros and what is too small to divide by count as zero; what is small is as exact as anything."""
    packed = pack(quantized_backend, random_blocks(kind, 16, 288), kind)
    x = torch.randn(1, 288)
    unit = multiply(quantized_backend, x, packed, kind, 16)
    for factor, expected in ((0.0, 0.0), (2.0**-120, 0.0), (2.0**-149, 0.0), (2.0**-90, 2.0**-90)):
        assert torch.equal(multiply(quantized_backend, x * factor, packed, kind, 16), unit * expected)


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0", "Q6_K"])
def test_a_block_that_counts_as_zero_leaves_the_others(quantized_backend: KernelBackend, kind: str, rows: int) -> None:
    """Blocks that are rounded together are rounded as they are alone."""
    packed = pack(quantized_backend, random_blocks(kind, 40, 512), kind)
    x = torch.randn(rows, 512)
    for place in (0, 3, 9, 15):
        tiny, zero = x.clone(), x.clone()
        tiny[1, 32 * place : 32 * place + 32] *= 2.0**-120
        zero[1, 32 * place : 32 * place + 32] = 0.0
        assert_same_bits(
            multiply(quantized_backend, tiny, packed, kind, 40), multiply(quantized_backend, zero, packed, kind, 40)
        )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("kind", "rows", "n", "k", "dtype"),
    [
        ("Q4_1", 1, 64, 320, FP32),
        ("Q4_1", 5, 32, 64, BF16),
        ("Q8_0", 2, 16, 64, FP32),
        ("Q8_0", 7, 48, 320, FP16),
        ("Q5_0", 12, 96, 576, FP32),
        ("Q6_K", 70, 160, 256, FP32),
        ("Q4_1", 300, 400, 1600, FP32),
    ],
)
def test_gated_is_the_product_and_the_activation(
    quantized_backend: KernelBackend, kind: str, rows: int, n: int, k: int, dtype: torch.dtype, activation: str
) -> None:
    """The same bits, where neither rounds what lies between."""
    ops = quantized_backend.ops
    torch.manual_seed(rows)
    x, bias = strided_rows(rows, k, dtype, padding=2), torch.randn(2 * n).to(dtype) if rows != 12 else None
    gate, up = random_blocks(kind, n, k, seed=1), random_blocks(kind, n, k, seed=2)
    products = poison(rows, 2 * n, dtype=FP32)
    ops.quantized_linear(products, x, pack(quantized_backend, torch.cat([gate, up]), kind), kind, bias)
    out = poison(rows, n + 3, dtype=FP32)
    ops.quantized_gated_linear(out[:, :n], x, pack(quantized_backend, turn_about(gate, up), kind), kind, activation, bias)
    assert_same_bits(out[:, :n], activated(ops, products, activation))
    assert out[:, n:].isnan().all()


def test_nothing_to_do(quantized_backend: KernelBackend) -> None:
    packed = pack(quantized_backend, random_blocks("Q4_1", 20, 64), "Q4_1")
    ops = quantized_backend.ops
    ops.quantized_linear(torch.empty(0, 20), torch.empty(0, 64), packed, "Q4_1")
    ops.quantized_embedding(torch.empty(0, 64), torch.empty(0, dtype=torch.int64), packed, "Q4_1")
    ops.pack_quantized_weight(packed[:0], torch.empty(0, 40, dtype=torch.uint8), "Q4_1")
