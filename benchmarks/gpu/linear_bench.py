"""Products with quantised weights: few rows by bytes of the weight, many by operations, beside torch's bf16 product."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench_device import BenchDevice, Result

GROUP = 128


def quantised_products(device: BenchDevice, x: Tensor, n: int) -> dict[str, tuple[int, Callable[[], None]]]:
    """By op: bytes of its weight, scales included, and the product of x [rows, k] with random weights [n, k]."""
    rows, k = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, device=x.device).to(torch.int32)

    group = min(GROUP, k)
    scales = torch.rand(k // group, n, device=x.device).to(x.dtype) * 0.01
    zeros, gptq, awq = words(k // group, n // 8), words(k // 8, n), words(k, n // 8)
    int8 = torch.randint(-127, 128, (n, k), device=x.device).to(torch.int8)
    fp8 = torch.randn(n, k, device=x.device).to(torch.float8_e4m3fn)
    row_scale = torch.rand(n, device=x.device) * 0.01
    codes, input_scale = torch.empty(rows, k, dtype=torch.int8, device=x.device), torch.empty(rows, device=x.device)

    def int8_product() -> None:
        device.ops.quantize_int8_rows(codes, input_scale, x)
        device.ops.int8_linear(out, codes, input_scale, int8, row_scale)

    four_bits = n * k // 2 + 2 * scales.numel() + 4 * zeros.numel()
    return {
        "gptq": (four_bits, lambda: device.ops.gptq_linear(out, x, gptq, scales, zeros, group)),
        "awq": (four_bits, lambda: device.ops.awq_linear(out, x, awq, scales, zeros, group)),
        "fp8": (n * k + 4 * n, lambda: device.ops.fp8_linear(out, x, fp8, row_scale)),
        "int8": (n * k + 4 * n, int8_product),
    }


def bench_linear(device: BenchDevice, bandwidth: float, rate: float) -> Iterator[Result]:
    """An 8B model's down projection: 14336 to 4096, and its gate and up: 4096 to 28672."""
    for k, n in device.pick([(14336, 4096), (4096, 28672)], [(128, 64)]):
        weight = torch.randn(n, k, device=device.device).to(torch.bfloat16)
        for rows in device.pick([1, 16, 64, 512, 2048], [2, 20]):
            x = torch.randn(rows, k, device=device.device).to(torch.bfloat16)
            plain = device.time(lambda x=x, w=weight: torch.nn.functional.linear(x, w))
            for name, (weight_bytes, product) in quantised_products(device, x, n).items():
                seconds = device.time(product)
                flops, moved = 2 * rows * n * k, weight_bytes + 2 * rows * (n + k)
                by_bytes = moved / bandwidth >= flops / rate
                yield Result(
                    "linear",
                    f"{name}, {rows} x {k} x {n}",
                    seconds,
                    bytes=moved if by_bytes else 0,
                    flops=0 if by_bytes else flops,
                    share=max(moved / bandwidth, flops / rate) / seconds,
                    baseline="torch bf16",
                    baseline_seconds=plain,
                )
