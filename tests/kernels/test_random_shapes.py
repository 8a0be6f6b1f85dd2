"""Ops on problems of random shape, every backend: what the other files' grids may have left out."""

from __future__ import annotations

import references
import torch
from checks import ATTENTION_TOLERANCE, assert_close, assert_same_bits, poison
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import ATTENTION_ISAS, KernelBackend
from paged_case import CaseShape, make_case
from test_sampling_ops import reference_draw

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
#: What GPU kernels take.
TYPES = [(FP32, None), (FP16, None), (BF16, None), (BF16, E4M3), (FP16, E5M2), (FP32, E4M3), (BF16, INT8), (FP32, INT8)]
ISAS = ATTENTION_ISAS
random_shapes = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@random_shapes
@given(data=st.data())
def test_paged_attention(backend: KernelBackend, data: st.DataObject) -> None:
    sequences = []
    for _ in range(data.draw(st.integers(1, 4))):
        seq_len = data.draw(st.integers(1, 90))
        sequences.append((data.draw(st.one_of(st.just(1), st.integers(1, min(seq_len, 25)))), seq_len))
    num_kv_heads = data.draw(st.integers(1, 2))
    dtype, kv_dtype = data.draw(st.sampled_from(TYPES))
    shape = CaseShape(
        sequences=tuple(sequences),
        num_heads=num_kv_heads * data.draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from([32, 64, 80, 96, 112, 120, 128, 192, 256])),
        block_size=data.draw(st.sampled_from([8, 16, 32, 64])),
        dtype=dtype,
        kv_dtype=kv_dtype,
        sliding_window=data.draw(st.sampled_from([0, 1, 5, 64])),
        logit_softcap=data.draw(st.sampled_from([0.0, 5.0])),
        alibi=data.draw(st.booleans()),
        sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 10_000)),
    )
    case = make_case(shape)
    out, lse = case.run(backend)
    expected, expected_lse = case.reference()
    atol, rtol = ATTENTION_TOLERANCE[dtype]  # none of TYPES has a bf16 cache beside another query
    assert_close(out, expected, 1e-2 if kv_dtype is not None else atol, rtol)
    assert_close(lse, expected_lse, 1e-4 if dtype == FP32 else 5e-3, 1e-5)


@random_shapes
@given(data=st.data())
def test_copy_and_swap_blocks(backend: KernelBackend, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(2, 12))
    shape = (num_blocks, *data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([FP32, BF16, INT8]))
    pool, other = (torch.randint(-128, 128, shape).to(dtype) for _ in range(2))
    order = data.draw(st.permutations(range(num_blocks)))
    count = data.draw(st.integers(0, num_blocks // 2))
    mapping = torch.tensor([[order[i], order[-1 - i]] for i in range(count)], dtype=torch.int64).reshape(-1, 2)
    expected, swapped = pool.clone(), other.clone()
    expected[mapping[:, 1]] = pool[mapping[:, 0]]
    swapped[mapping[:, 1]] = expected[mapping[:, 0]]
    backend.ops.copy_blocks(pool, mapping)
    backend.ops.swap_blocks(pool, other, mapping)
    assert_same_bits(pool, expected)
    assert_same_bits(other, swapped)


@random_shapes
@given(data=st.data())
def test_merge_attention_states(backend: KernelBackend, data: st.DataObject) -> None:
    heads, head_dim = data.draw(st.integers(1, 9)), 8 * data.draw(st.integers(1, 32))
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    starts = torch.tensor([0, *counts]).cumsum(0)
    part_out, part_lse = torch.randn(int(starts[-1]), heads, head_dim), torch.randn(int(starts[-1]), heads) * 5
    out, lse = poison(len(counts), heads, head_dim, dtype=FP32), poison(len(counts), heads, dtype=FP32)
    backend.ops.merge_attention_states(out, part_out, part_lse, starts.to(torch.int32), lse)
    for row in range(len(counts)):
        parts = slice(int(starts[row]), int(starts[row + 1]))
        weights = torch.softmax(part_lse[parts].double(), 0)
        assert_close(out[row], (weights[..., None] * part_out[parts].double()).sum(0), 1e-5, 1e-5)
        assert_close(lse[row], torch.logsumexp(part_lse[parts].double(), 0), 1e-5, 1e-6)


@random_shapes
@given(data=st.data())
def test_fused_rotary_and_cache(backend: KernelBackend, data: st.DataObject) -> None:
    tokens, heads, kv_heads = (data.draw(st.integers(1, n)) for n in (9, 6, 3))
    head_dim = 8 * data.draw(st.integers(2, 32))
    rotary_dim = data.draw(st.sampled_from([head_dim, head_dim // 2]))
    dtype, is_neox = data.draw(st.sampled_from([FP32, FP16, BF16])), data.draw(st.booleans())
    query, key = torch.randn(tokens, heads, head_dim).to(dtype), torch.randn(tokens, kv_heads, head_dim).to(dtype)
    positions, table = torch.randint(0, 30, (tokens,)), torch.rand(30, rotary_dim) * 2 - 1
    caches = [poison(2, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2)]
    k_cache, slots = backend.key_cache(caches[0]), torch.randperm(32)[:tokens]
    rotated = [references.rotary_embedding(positions, x, table, is_neox) for x in (query, key)]
    backend.ops.rotary_reshape_and_cache(positions, query, key, key, table, k_cache, caches[1], slots, is_neox)
    tolerance = {FP32: 1e-5, FP16: 4e-3, BF16: 3e-2}[dtype]
    assert_close(query, rotated[0], tolerance, tolerance)
    for token, slot in enumerate(slots.tolist()):
        assert_close(k_cache[slot // 16, :, slot % 16], rotated[1][token], tolerance, tolerance)
        assert_same_bits(caches[1][slot // 16, :, slot % 16], key[token])


@random_shapes
@given(data=st.data())
def test_sampling(backend: KernelBackend, data: st.DataObject) -> None:
    rows, vocab = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 700))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, vocab + 3)[:, :vocab] * data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    temperature, top_p = torch.rand(rows) * 2 + 0.1, torch.rand(rows) * 0.95 + 0.05
    top_k, min_p = torch.randint(0, vocab + 2, (rows,), dtype=torch.int32), torch.rand(rows) * 0.1
    seeds, positions = torch.randint(-(2**60), 2**60, (rows,)), torch.randint(0, 2**40, (rows,))
    ids = torch.full((rows,), -7)
    backend.ops.sample_top_k_top_p(ids, logits, temperature, top_k, top_p, min_p, seeds, positions)
    parameters = zip(*(x.tolist() for x in (temperature, top_k, top_p, min_p, seeds, positions)), strict=True)
    expected = [reference_draw(logits[row].contiguous(), *values) for row, values in enumerate(parameters)]
    assert ids.tolist() == expected
