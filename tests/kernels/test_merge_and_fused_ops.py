"""merge_attention_states and rotary_reshape_and_cache on every backend."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, assert_same_bits, poison
from kernel_backend import KernelBackend
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_lse", [True, False])
def test_merge(backend: KernelBackend, dtype: torch.dtype, with_lse: bool) -> None:
    heads, head_dim, starts = 5, 80, [0, 3, 3, 4, 9]
    part_out, part_lse = torch.randn(9, heads, head_dim), torch.randn(9, heads) * 10
    part_lse[1, 2] = -torch.inf  # an empty part, whose output does not count
    part_out[1, 2] = torch.nan
    part_lse[3, 4] = -torch.inf  # all of row 2's parts are empty for this head
    out = poison(4, heads, head_dim + 8, dtype=dtype)[:, :, :head_dim].contiguous()
    lse = torch.full((4, heads), torch.nan) if with_lse else None
    backend.ops.merge_attention_states(out, part_out, part_lse, torch.tensor(starts, dtype=torch.int32), lse)
    for row in range(4):
        parts = slice(starts[row], starts[row + 1])
        logs = part_lse[parts].double()
        total = torch.logsumexp(logs, 0) if len(logs) else torch.full((heads,), -torch.inf, dtype=torch.float64)
        weights = torch.exp(logs - total).nan_to_num(0.0)
        expected = (weights[..., None] * part_out[parts].double().nan_to_num(0.0)).sum(0)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        assert_close(out[row], expected, tolerance, tolerance)
        if lse is not None:
            assert_close(lse[row], total, 1e-5, 1e-6)


def test_merging_splits_is_attention_of_the_whole(backend: KernelBackend) -> None:
    torch.manual_seed(3)
    keys, values, query = torch.randn(50, 2, 16), torch.randn(50, 2, 16), torch.randn(2, 16)
    logits = torch.einsum("khd,hd->kh", keys, query)
    parts = [slice(0, 16), slice(16, 40), slice(40, 50)]
    part_lse = torch.stack([torch.logsumexp(logits[part], 0) for part in parts])
    part_out = torch.stack([torch.einsum("kh,khd->hd", torch.softmax(logits[part], 0), values[part]) for part in parts])
    out = torch.empty(1, 2, 16)
    backend.ops.merge_attention_states(out, part_out, part_lse, torch.tensor([0, 3], dtype=torch.int32))
    assert_close(out[0], torch.einsum("kh,khd->hd", torch.softmax(logits, 0), values), 1e-6, 1e-5)


def fused_inputs(dtype: torch.dtype, head_dim: int, rotary_dim: int, padding: int) -> dict[str, Tensor]:
    tokens, heads, kv_heads = 6, 4, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + padding).to(dtype)
    query, key, value = (
        qkv[:, begin * head_dim : end * head_dim].unflatten(1, (end - begin, head_dim))
        for begin, end in ((0, heads), (heads, heads + kv_heads), (heads + kv_heads, heads + 2 * kv_heads))
    )
    return {
        "positions": torch.tensor([4, 0, 19, 7, 7, 12]),
        "query": query,
        "key": key,
        "value": value,
        "cos_sin_cache": torch.rand(20, rotary_dim) * 2 - 1,
        "slot_mapping": torch.tensor([17, 3, -1, 40, 0, 25]),
    }


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "padding"), [(64, 64, 0), (80, 32, 8), (20, 12, 3)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
    ],
)
def test_fused_is_rotary_then_reshape(
    backend: KernelBackend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    padding: int,
    is_neox: bool,
) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(head_dim)
        x = fused_inputs(dtype, head_dim, rotary_dim, padding)
        key_before = x["key"].clone()
        caches = [poison(3, 2, 16, head_dim, dtype=kv_dtype) for _ in range(2)]
        k_cache = backend.key_cache(caches[0])
        scales: list[Tensor | None] = [None, None]
        if kv_dtype == torch.int8:
            scales = [torch.full((3, 2, 16), torch.nan) for _ in range(2)]
        elif kv_dtype.itemsize == 1:
            scales = [torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.04])]
        if fused:
            backend.ops.rotary_reshape_and_cache(
                *(x[name] for name in ("positions", "query", "key", "value", "cos_sin_cache")),
                *(k_cache, caches[1], x["slot_mapping"], is_neox, *scales),
            )
            assert_same_bits(x["key"], key_before)
        else:
            backend.ops.rotary_embedding(x["positions"], x["query"], x["key"], x["cos_sin_cache"], is_neox)
            backend.ops.reshape_and_cache(x["key"], x["value"], k_cache, caches[1], x["slot_mapping"], *scales)
        results.append([x["query"], k_cache, caches[1], *(scale for scale in scales if scale is not None)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
