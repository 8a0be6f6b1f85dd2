"""gptq_linear, awq_linear, fp8_linear, int8_linear and quantize_int8_rows against float64, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_weights import CheckpointWeight, pack_words, random_weight
from checks import assert_close, assert_same_bits, pairwise, poison, strided_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import KernelBackend
from torch import Tensor

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WEIGHT_ONLY = ["gptq_linear", "awq_linear", "fp8_linear"]
OPS = [*WEIGHT_ONLY, "int8_linear"]
ROUNDING = {FP32: 2e-6, FP16: 2**-10, BF16: 2**-7}
#: rows, in_features, out_features, group_size: one row tile, several, ragged; columns that fill no tile of 64.
GRID = pairwise([1, 5, 16, 17, 70], [64, 192, 512], [8, 64, 72, 200], [32, 64], OPS, [FP16, BF16])


def run(backend: KernelBackend, weight: CheckpointWeight, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The op's output [rows, out_features], poisoned first, rows apart; int8_linear's input is rounded by the op for that."""
    n = len(weight.dense)
    out = poison(len(x), n + 8, dtype=out_dtype)[:, :n]
    op = getattr(backend.ops, weight.op)
    if weight.op == "int8_linear":
        op(out, *quantized(backend, x), *weight.arguments, bias)
    else:
        op(out, x, *weight.arguments, bias)
    return out


def quantized(backend: KernelBackend, x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch.full(x.shape, 99, dtype=torch.int8), poison(len(x), dtype=FP32)
    backend.ops.quantize_int8_rows(codes, scale, x)
    return codes, scale


def check(backend: KernelBackend, weight: CheckpointWeight, x: Tensor, bias: Tensor | None) -> None:
    out = run(backend, weight, x, bias, x.dtype)
    wide = x.double()
    if weight.op == "int8_linear":
        codes, scale = quantized(backend, x)
        wide = codes.double() * scale.double()[:, None]
    expected = wide @ weight.dense.T
    magnitude = wide.abs() @ weight.dense.abs().T  # fp32 sums: an error in proportion to the sum of magnitudes
    if bias is not None:
        expected = expected + bias.double()
        magnitude = magnitude + bias.double().abs()
    allowed = 1e-6 * magnitude + ROUNDING[x.dtype] * expected.abs() + 1e-30
    error = (out.double() - expected).abs()
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times what is allowed"


def supported(backend: KernelBackend, op: str, dtype: torch.dtype) -> bool:
    return backend.is_cpu or op == "int8_linear" or dtype != FP32


@pytest.mark.parametrize(("rows", "k", "n", "group", "op", "dtype"), GRID)
def test_grid(backend: KernelBackend, rows: int, k: int, n: int, group: int, op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + k)
    weight = random_weight(op, k, n, group=group, dtype=dtype, one_scale=n == 64)
    x = strided_rows(rows, k, dtype, 16)
    bias = torch.randn(n).to(dtype) if rows % 2 else None
    check(backend, weight, x, bias)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(backend: KernelBackend, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(OPS))
    dtype = data.draw(st.sampled_from([d for d in (FP32, FP16, BF16) if supported(backend, op, d)]))
    group = data.draw(st.sampled_from([32, 64, 128]))
    k = data.draw(st.integers(1, 4)) * (group if op in ("gptq_linear", "awq_linear") else 16)
    n, rows = data.draw(st.integers(1, 20)) * 8, data.draw(st.integers(1, 40))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    weight = random_weight(op, k, n, group=group, dtype=dtype, one_scale=data.draw(st.booleans()))
    bias = torch.randn(n).to(dtype) if data.draw(st.booleans()) else None
    check(backend, weight, strided_rows(rows, k, dtype, data.draw(st.sampled_from([0, 8, 48])) * 2), bias)


@pytest.mark.parametrize("op", OPS)
def test_a_row_is_the_same_in_every_batch(backend: KernelBackend, op: str) -> None:
    torch.manual_seed(3)
    weight = random_weight(op, 320, 72, dtype=BF16)
    x = torch.randn(75, 320).to(BF16)
    whole = run(backend, weight, x, None, BF16)
    for rows in (1, 2, 16, 17, 33, 64, 65):
        assert_same_bits(run(backend, weight, x[:rows], None, BF16), whole[:rows].contiguous())
    assert_same_bits(run(backend, weight, x[40:41], None, BF16), whole[40:41].contiguous())


@pytest.mark.parametrize("op", WEIGHT_ONLY)
def test_exact_where_numbers_allow(backend: KernelBackend, op: str) -> None:
    """One input of 1 in a row picks one weight: each comes out as it is, so no two have changed places."""
    k, n = 96 if op != "fp8_linear" else 80, 136
    torch.manual_seed(5)
    weight = random_weight(op, k, n, dtype=BF16, one_scale=True)
    out = run(backend, weight, torch.eye(k).to(BF16), None, BF16)
    assert torch.equal(out, weight.dense.T.float().to(BF16))


def test_every_code_of_fp8(backend: KernelBackend) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN has no meaning in a weight
    weight = codes.view(torch.float8_e4m3fn).reshape(16, 16)
    for dtype in (FP16, BF16):
        out = poison(16, 16, dtype=dtype)
        backend.ops.fp8_linear(out, torch.eye(16).to(dtype), weight, torch.ones(1))
        assert torch.equal(out, weight.to(dtype).T)


def test_int8_sums_are_exact(backend: KernelBackend) -> None:
    codes, weight = torch.full((3, 4096), 127, dtype=torch.int8), torch.full((8, 4096), -127, dtype=torch.int8)
    weight[0, 0] = 126
    out = poison(3, 8, dtype=FP32)
    backend.ops.int8_linear(out, codes, torch.full((3,), 2.0**-20), weight, torch.ones(1))
    exact = codes.double() @ weight.double().T * 2.0**-20
    assert torch.equal(out, exact.float())


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("size", [16, 100, 1600])
def test_quantize_int8_rows(backend: KernelBackend, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x = strided_rows(9, size, dtype, 24)
    x[2], x[3] = 0, 1e-4
    codes, scale = quantized(backend, x)
    wide = x.double()
    assert_close(scale, wide.abs().amax(1) / 127, 0, 1e-6)
    steps = scale.double()[:, None]
    assert (codes[2] == 0).all()
    assert codes.abs().max() == 127
    assert ((codes.double() * steps - wide).abs() <= steps * 0.50001).all()  # nearest


def test_quantize_int8_rows_rounds_to_even_and_shows_bad_rows(backend: KernelBackend) -> None:
    x = torch.zeros(5, 16)
    x[0, :7] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0])
    x[1, 3], x[2, 15], x[3, 0] = torch.nan, torch.inf, -torch.inf
    codes, scale = quantized(backend, x)
    assert codes[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -127]
    assert scale[1:4].isnan().all()
    assert (codes[1:4] == 0).all()
    assert scale[4] == 0
    out = poison(5, 8, dtype=FP32)
    backend.ops.int8_linear(out, codes, scale, torch.ones(8, 16, dtype=torch.int8), torch.ones(1))
    assert out.isnan().any(1).tolist() == [False, True, True, True, False]


def test_quantize_int8_rows_takes_tiny_rows_for_zeros(backend: KernelBackend) -> None:
    """127 divided by the largest magnitude would be infinite."""
    x = torch.tensor([1e-38, 2.0**-101, 2.0**-100]).view(3, 1).repeat(1, 32)
    codes, scale = quantized(backend, x)
    assert codes.unique(dim=1).tolist() == [[0], [0], [127]]
    assert scale[:2].tolist() == [0, 0]
    assert_close(scale[2], torch.tensor(2.0**-100 / 127), 0, 1e-6)


def test_no_rows(backend: KernelBackend) -> None:
    for op in OPS:
        weight = random_weight(op, 64, 16, dtype=BF16)
        assert run(backend, weight, torch.empty(0, 64, dtype=BF16), None, BF16).shape == (0, 16)


# ---- refusals


def four_bit_arguments(**changes: Any) -> dict[str, Any]:
    weight, scales, zeros, group = random_weight("gptq_linear", 64, 16, dtype=BF16).arguments
    arguments = {
        "out": torch.empty(3, 16, dtype=BF16),
        "input": torch.zeros(3, 64, dtype=BF16),
        "qweight": weight,
        "scales": scales,
        "qzeros": zeros,
        "group_size": group,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(3, 64)}, "input is Float, out is BFloat16"),
        ({"scales": torch.zeros(2, 16)}, "scales is Float, out is BFloat16"),
        ({"scales": torch.zeros(3, 16, dtype=BF16)}, "scales has groups 3"),
        ({"qzeros": torch.zeros(2, 3, dtype=torch.int32)}, "qzeros has words 3"),
        ({"qzeros": torch.zeros(2, 2, dtype=torch.int64)}, "qzeros is Long, it must be Int"),
        ({"qweight": torch.zeros(64, 2, dtype=torch.int32)}, "qweight has rows 64"),
        ({"qweight": torch.zeros(8, 2, dtype=torch.int32)}, "qweight has columns 2"),
        ({"group_size": 48}, "scales has group_size 48, it must be a multiple of 32 that divides in_features 64"),
        ({"group_size": 0}, "scales has group_size 0"),
        ({"bias": torch.zeros(16)}, "bias is Float, out is BFloat16"),
        ({"bias": torch.zeros(15, dtype=BF16)}, "bias has out_features 15, out has 16"),
    ],
)
def test_four_bit_refusals(backend: KernelBackend, changes: dict[str, Any], message: str) -> None:
    backend.ops.gptq_linear(**four_bit_arguments())
    with pytest.raises((ValueError, RuntimeError), match=f"gptq_linear: {message}"):
        backend.ops.gptq_linear(**four_bit_arguments(**changes))


def test_row_scaled_refusals(backend: KernelBackend) -> None:
    weight, scale = random_weight("fp8_linear", 64, 16, dtype=BF16).arguments
    out, x = torch.empty(3, 16, dtype=BF16), torch.zeros(3, 64, dtype=BF16)
    with pytest.raises((ValueError, RuntimeError), match="fp8_linear: weight is Char, it must be Float8_e4m3fn"):
        backend.ops.fp8_linear(out, x, weight.view(torch.int8), scale)
    with pytest.raises((ValueError, RuntimeError), match="fp8_linear: weight_scale has out_features 5, out has 16"):
        backend.ops.fp8_linear(out, x, weight, torch.ones(5))
    with pytest.raises((ValueError, RuntimeError), match="int8_linear: input_scale has num_tokens 2, input has 3"):
        backend.ops.int8_linear(
            *(out, torch.zeros(3, 64, dtype=torch.int8), torch.ones(2), torch.zeros(16, 64, dtype=torch.int8), torch.ones(1))
        )
    with pytest.raises((ValueError, RuntimeError), match="quantize_int8_rows: out has in_features 32, input has 64"):
        backend.ops.quantize_int8_rows(torch.zeros(3, 32, dtype=torch.int8), torch.ones(3), x)


def test_packing_is_what_the_checkpoints_do() -> None:
    """Against words written out by hand."""
    values = torch.arange(8)[:, None]
    assert pack_words(values, 0).tolist() == [[0x76543210]]
    assert pack_words(values.T, 1, (0, 2, 4, 6, 1, 3, 5, 7)).tolist() == [[0x75316420]]
