"""paged_attention against the float64 reference, on every backend."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from checks import ATTENTION_TOLERANCE, assert_close, pairwise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import ATTENTION_ISAS, KernelBackend
from paged_case import CaseShape, make_case, multiplies_in_bf16, solved_case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

ISAS = ATTENTION_ISAS
HEADS = [(4, 4), (8, 2), (9, 3), (40, 40), (64, 8), (5, 1)]
HEAD_DIMS = [32, 64, 80, 96, 112, 120, 128, 192, 256]
BLOCK_SIZES = [8, 16, 32]
TYPES = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, E4M3), (FP16, E5M2), (FP32, E4M3), (FP32, INT8), (BF16, INT8)]
WINDOWS = [0, 16, 256]
SOFTCAPS = [0.0, 50.0]
EXTRAS = [(False, False), (True, False), (False, True)]  # ALiBi, sinks
#: (query_len, seq_len) of each sequence: decodes, prefills, chunks and several query tokens, at and across block borders.
BATCHES = [
    ((1, 1),),
    ((1, 15), (1, 16), (1, 17)),
    ((5, 5), (1, 128), (7, 129)),
    ((64, 64), (1, 257)),
    ((33, 290), (1, 31), (3, 256), (2, 2)),
    ((1, 8), (1, 63), (1, 65), (1, 127), (1, 33), (1, 255), (1, 40)),
    ((17, 17), (0, 20), (48, 100), (1, 7), (1, 2)),
]
GRID = pairwise(HEADS, HEAD_DIMS, BLOCK_SIZES, TYPES, WINDOWS, SOFTCAPS, EXTRAS, BATCHES)
MIXED_TYPES = [(FP32, BF16), (FP32, FP16), (BF16, FP32), (FP16, BF16)]  # the CPU kernels convert, the GPU's do not


def case_shape(heads, head_dim, block_size, types, window, softcap, extras, batch, **more) -> CaseShape:
    return CaseShape(
        sequences=batch,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=types[0],
        kv_dtype=types[1],
        sliding_window=window,
        logit_softcap=softcap,
        alibi=extras[0],
        sinks=extras[1],
        query_scale=8.0 if softcap else 1.0,
        **more,
    )


def check(backend: KernelBackend, shape: CaseShape) -> None:
    in_bf16 = multiplies_in_bf16(backend, shape)
    case, expected, expected_lse = solved_case(shape, in_bf16)
    out, lse = case.run(backend)
    # Weights rounded to bf16 are off by what the outputs of a bf16 model are, and those may be rounded to bf16 besides. A sum
    # of values of both signs may be as small as what its terms are off by.
    atol, rtol = ATTENTION_TOLERANCE[BF16 if in_bf16 else shape.dtype]
    if in_bf16:
        atol *= 2
    if case.k_cache.dtype.itemsize == 1:
        atol = max(atol, 1e-2 if not backend.is_cpu else 1e-4)
    assert torch.isfinite(out).all()
    assert_close(out, expected, atol, rtol)
    assert_close(lse, expected_lse, 1e-4 if shape.dtype == FP32 and not in_bf16 else 5e-3, 1e-5)


def small_enough(backend: KernelBackend, shape: CaseShape) -> bool:
    """Emulation runs thread by thread: it gets the smaller half of the work."""
    work = sum(q * s for q, s in shape.sequences) * shape.num_heads * shape.head_dim
    return not backend.is_slow or work <= 600_000


@pytest.mark.parametrize("index", range(len(GRID)))
def test_grid(backend: KernelBackend, index: int) -> None:
    shape = case_shape(*GRID[index], seed=index)
    if not small_enough(backend, shape):
        shape = case_shape(*GRID[index][:-1], BATCHES[index % 2], seed=index)
    check(backend, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), list(product(HEADS, HEAD_DIMS)))
def test_full_grid(cpu_backend: KernelBackend, heads: tuple[int, int], head_dim: int) -> None:
    for i, rest in enumerate(product(BLOCK_SIZES, TYPES, WINDOWS, SOFTCAPS)):
        check(cpu_backend, case_shape(heads, head_dim, *rest, EXTRAS[i % 3], BATCHES[i % 4], seed=i))


@pytest.mark.parametrize("types", MIXED_TYPES)
@pytest.mark.parametrize("batch", [BATCHES[1], BATCHES[4]])
def test_cache_of_another_float_type(cpu_backend: KernelBackend, types, batch) -> None:
    check(cpu_backend, case_shape((9, 3), 64, 16, types, 0, 0.0, (False, False), batch))


@pytest.mark.parametrize("kv_dtype", [FP32, BF16])
@pytest.mark.parametrize("window", [2048, 256, 0])
def test_long_sequences(cpu_backend: KernelBackend, window: int, kv_dtype: torch.dtype) -> None:
    heads = {"num_heads": 3, "num_kv_heads": 1}
    check(cpu_backend, CaseShape(sequences=((1, 2300), (40, 2100)), kv_dtype=kv_dtype, sliding_window=window, **heads))


@pytest.mark.parametrize("kv_dtype", [FP32, BF16])
@pytest.mark.parametrize("block_size", [1, 2, 4, 64, 128, 256])
def test_other_block_sizes(cpu_backend: KernelBackend, block_size: int, kv_dtype: torch.dtype) -> None:
    check(cpu_backend, CaseShape(sequences=((70, 300), (1, 131)), block_size=block_size, kv_dtype=kv_dtype))


@pytest.mark.parametrize("kv_dtype", [FP32, BF16])
@pytest.mark.parametrize("group", [1, 2, 7, 16, 71, 128])
def test_group_sizes(cpu_backend: KernelBackend, group: int, kv_dtype: torch.dtype) -> None:
    check(cpu_backend, CaseShape(sequences=((3, 150), (1, 90), (40, 40)), num_heads=2 * group, head_dim=32, kv_dtype=kv_dtype))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(cpu_backend: KernelBackend, data: st.DataObject) -> None:
    sequences = []
    for _ in range(data.draw(st.integers(1, 7))):
        seq_len = data.draw(st.integers(1, 400))
        sequences.append((data.draw(st.one_of(st.just(1), st.integers(1, min(seq_len, 150)))), seq_len))
    num_kv_heads = data.draw(st.integers(1, 4))
    dtype, kv_dtype = data.draw(st.sampled_from(TYPES + MIXED_TYPES))
    shape = CaseShape(
        sequences=tuple(sequences),
        num_heads=num_kv_heads * data.draw(st.integers(1, 6)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from(HEAD_DIMS)),
        block_size=data.draw(st.sampled_from([8, 16, 32, 64])),
        dtype=dtype,
        kv_dtype=kv_dtype,
        sliding_window=data.draw(st.sampled_from([0, 1, 5, 64, 200])),
        logit_softcap=data.draw(st.sampled_from([0.0, 5.0])),
        alibi=data.draw(st.booleans()),
        sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 10_000)),
    )
    check(cpu_backend, shape)


def check_bad_value(backend: KernelBackend, bad: float, query_len: int, dtype: torch.dtype) -> None:
    """A value that is not finite reaches the rows that see it, and no other."""
    case = make_case(CaseShape(sequences=((query_len, 140), (1, 20)), sliding_window=20, block_size=16, dtype=dtype))
    position = 119
    block = int(case.block_table[0, position // 16])
    case.v_cache[block, :, position % 16, 3] = bad
    out, _ = case.run(backend)
    expected, _ = case.reference()
    spoilt_rows = torch.isfinite(expected[:query_len]).logical_not().any(dim=-1).sum()
    assert query_len <= spoilt_rows < query_len * 4
    assert_close(out, expected, *ATTENTION_TOLERANCE[dtype])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_reaches_only_the_rows_that_see_it(backend: KernelBackend, bad: float) -> None:
    check_bad_value(backend, bad, 40, FP32)


@pytest.mark.parametrize("query_len", [40, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_in_bf16(cpu_backend: KernelBackend, bad: float, query_len: int) -> None:
    check_bad_value(cpu_backend, bad, query_len, BF16)


def check_bad_query(backend: KernelBackend, dtype: torch.dtype) -> None:
    case = make_case(CaseShape(sequences=((20, 140), (1, 20)), dtype=dtype))
    case.query[7, 1, 5] = math.nan
    out, _ = case.run(backend)
    expected, _ = case.reference()
    assert expected.isnan().any(dim=-1).sum() == 1
    assert_close(out, expected, *ATTENTION_TOLERANCE[dtype])


def test_a_bad_query_stays_alone(backend: KernelBackend) -> None:
    check_bad_query(backend, FP32)


def test_a_bad_query_in_bf16(cpu_backend: KernelBackend) -> None:
    check_bad_query(cpu_backend, BF16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_bad_key_that_is_alone_in_its_block_shows(cpu_backend: KernelBackend, dtype: torch.dtype) -> None:
    case = make_case(CaseShape(sequences=((1, 129), (1, 257)), dtype=dtype))
    for seq, position in ((0, 128), (1, 256)):
        case.k_cache[int(case.block_table[seq, position // 16]), :, 0] = math.nan
    assert case.run(cpu_backend)[0].isnan().all()


def test_large_logits_do_not_overflow(backend: KernelBackend) -> None:
    case = make_case(CaseShape(sequences=((9, 70),), query_scale=300.0))
    expected, _ = case.reference()
    assert_close(case.run(backend)[0], expected, 2e-3, 1e-3)


def test_without_lse(backend: KernelBackend) -> None:
    case = make_case(CaseShape(sequences=((3, 20),)))
    out, lse = case.run(backend, with_lse=False)
    assert lse.isnan().all()
    assert_close(out, case.reference()[0], *ATTENTION_TOLERANCE[FP32])
