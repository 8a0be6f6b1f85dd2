"""Ops that only move bytes, and swapping: achieved bandwidth beside the device's copy bandwidth."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from pyengine.worker.backend import KVCacheSpec

from attention_bench import BLOCK_SIZE, Heads, random_cache
from bench_device import BenchDevice, Result


def bench_cache_ops(device: BenchDevice, bandwidth: float) -> Iterator[Result]:
    """Scattering new keys and values, copying blocks, norms, activations, sampling."""
    heads = device.pick(Heads(32, 8, 128), Heads(4, 2, 64))
    tokens = device.pick(65536, 20)
    shape = (tokens, heads.num_kv_heads, heads.head_dim)
    key, value = (torch.randn(shape, device=device.device).to(torch.bfloat16) for _ in range(2))
    slots = torch.randperm(tokens, device=device.device)

    def result(name: str, seconds: float, moved: int) -> Result:
        return Result("memory", name, seconds, bytes=moved, share=moved / seconds / bandwidth)

    for kv_dtype, element in (("bfloat16", 2), ("fp8_e4m3", 1), ("int8", 1)):
        cache = random_cache(device, heads, -(-tokens // BLOCK_SIZE), kv_dtype)
        scales = 8 * tokens * heads.num_kv_heads if kv_dtype == "int8" else 0
        seconds = device.time(lambda c=cache: device.ops.reshape_and_cache(key, value, c.k, c.v, slots, c.k_scale, c.v_scale))
        yield result(f"reshape_and_cache, {kv_dtype}", seconds, 2 * key.numel() * (2 + element) + scales)

    blocks, block_bytes = device.pick(2048, 8), device.pick(2**21, 4096)
    pool = torch.empty(blocks, block_bytes, dtype=torch.uint8, device=device.device).random_()
    order = torch.randperm(blocks)
    mapping = torch.stack([order[: blocks // 2], order[blocks // 2 :]], dim=1).to(device.device)
    seconds = device.time(lambda: device.ops.copy_blocks(pool, mapping))
    yield result("copy_blocks", seconds, blocks * block_bytes)

    rows, hidden = device.pick(65536, 3), device.pick(4096, 64)
    x, residual = (torch.randn(rows, hidden, device=device.device).to(torch.bfloat16) for _ in range(2))
    weight = torch.ones(hidden, device=device.device).to(torch.bfloat16)
    seconds = device.time(lambda: device.ops.fused_add_rms_norm(x, residual, weight, 1e-5))
    yield result("fused_add_rms_norm", seconds, 8 * x.numel())
    out = torch.empty(rows, hidden // 2, device=device.device).to(torch.bfloat16)
    seconds = device.time(lambda: device.ops.silu_and_mul(out, x))
    yield result("silu_and_mul", seconds, 3 * x.numel())

    rows, vocab = device.pick(256, 2), device.pick(128256, 300)
    logits = torch.randn(rows, vocab, device=device.device)
    full = {name: torch.full((rows,), value, device=device.device) for name, value in (("t", 0.8), ("p", 0.9), ("m", 0.0))}
    top_k = torch.full((rows,), 50, dtype=torch.int32, device=device.device)
    ids, seeds = (torch.arange(rows, device=device.device) for _ in range(2))
    seconds = device.time(
        lambda: device.ops.sample_top_k_top_p(ids, logits, full["t"], top_k, full["p"], full["m"], seeds, seeds)
    )
    yield result("sample_top_k_top_p", seconds, 4 * logits.numel())


def bench_swap(device: BenchDevice) -> Iterator[Result]:
    """Blocks of an 8B model between device and pinned memory on the copy stream; baseline: one torch copy as large."""
    spec = KVCacheSpec(num_layers=device.pick(32, 2), num_kv_heads=8, head_dim=128, block_size=BLOCK_SIZE, dtype="bfloat16")
    count = device.pick(512, 4)
    backend = device.backend
    pool = backend.allocate_pool(spec, count + 1, host=False)
    host = backend.allocate_pool(spec, count, host=True)
    for block in pool.data:
        block.copy_(torch.randn(block.shape, device=device.device))
    sums = pool.data[1:].view(torch.int16).flatten(1).sum(1, dtype=torch.int64).cpu()
    order = torch.randperm(count).tolist()
    moved = count * pool.data[0].numel() * 2

    def timed(name: str, run: object) -> float:
        assert callable(run)
        seconds = []
        for _ in range(3):
            device.synchronize()
            start = time.perf_counter()
            run().synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    device.synchronize()
    out = timed("out", lambda: backend.swap_blocks(pool, host, [(i + 1, j) for i, j in enumerate(order)]))
    pool.data.zero_()
    device.synchronize()
    back = timed("in", lambda: backend.swap_blocks(host, pool, [(j, i + 1) for i, j in enumerate(order)]))
    wrong = int((pool.data[1:].view(torch.int16).flatten(1).sum(1, dtype=torch.int64).cpu() != sums).sum())
    if wrong:
        raise RuntimeError(f"swap: {wrong} of {count} blocks came back changed")
    plain = {}
    for name, (to, source) in {"out": (host.data, pool.data[1:]), "in": (pool.data[1:], host.data)}.items():
        device.synchronize()
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        device.synchronize()
        plain[name] = time.perf_counter() - start
    for name, seconds in (("out", out), ("in", back)):
        yield Result(
            "swap",
            f"{name}, {count} shuffled blocks",
            seconds,
            bytes=moved,
            baseline="torch copy",
            baseline_seconds=plain[name],
        )
