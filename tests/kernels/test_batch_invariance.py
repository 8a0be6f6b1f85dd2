"""The CPU kernels' promise: a row's bits depend on nothing but the row. On each instruction set."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_same_bits, poison
from kernel_backend import ATTENTION_ISAS, KernelBackend
from paged_case import CaseShape, PagedCase, make_case
from torch import Tensor

from pyengine.ops import load_core

ISAS = ATTENTION_ISAS
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def run_linear(backend: KernelBackend, x: Tensor, packed: Tensor, n: int) -> Tensor:
    out = poison(len(x), n, dtype=x.dtype)
    backend.ops.linear(out, x, packed)
    return out


@pytest.mark.parametrize(("dtype", "k", "n"), [(FP32, 576, 72), (FP32, 200, 40), (BF16, 576, 72), (FP16, 1600, 32)])
def test_linear_for_any_number_of_rows(cpu_backend: KernelBackend, dtype: torch.dtype, k: int, n: int) -> None:
    torch.manual_seed(k)
    x = torch.randn(400, k).to(dtype)
    packed = torch.empty(-(-n // 16), k, 16, dtype=dtype)
    cpu_backend.ops.pack_linear_weight(packed, torch.randn(n, k).to(dtype))
    alone = torch.cat([run_linear(cpu_backend, x[i : i + 1], packed, n) for i in range(64)])
    for rows in [*range(1, 65), 400]:
        out = run_linear(cpu_backend, x[:rows], packed, n)
        count = min(rows, 64)
        assert_same_bits(out[:count], alone[:count])
    shifted = run_linear(cpu_backend, x[5:47], packed, n)
    assert_same_bits(shifted, alone[5:47])


def with_queries(case: PagedCase, seq: int, begin: int, end: int) -> PagedCase:
    """The batch of one: sequence `seq`'s query tokens [begin, end) of `case`, with the keys that exist then."""
    first = int(case.query_start_loc[seq])
    query_len = case.shape.sequences[seq][0]
    seq_len = int(case.seq_lens[seq]) - query_len + end
    shape = CaseShape(**{**case.shape.__dict__, "sequences": ((end - begin, seq_len),)})
    return PagedCase(
        shape,
        case.query[first + begin : first + end],
        case.k_cache,
        case.v_cache,
        case.k_scale,
        case.v_scale,
        case.block_table[seq : seq + 1],
        torch.tensor([0, end - begin], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        case.options,
    )


ATTENTION_SHAPES = [
    CaseShape(sequences=((330, 330), (1, 700), (50, 300), (1, 20)), num_heads=9, num_kv_heads=3),
    CaseShape(sequences=((300, 560), (1, 40)), num_heads=4, num_kv_heads=4, head_dim=80, dtype=BF16, sliding_window=100),
    CaseShape(sequences=((140, 270), (1, 300)), num_heads=10, num_kv_heads=2, head_dim=120, dtype=FP16, logit_softcap=20.0),
    CaseShape(
        sequences=((70, 270), (1, 300)), num_heads=4, num_kv_heads=2, block_size=8, kv_dtype=torch.int8, alibi=True, sinks=True
    ),
    CaseShape(sequences=((330, 330), (1, 700), (50, 300), (1, 20)), num_heads=9, num_kv_heads=3, kv_dtype=BF16),
    CaseShape(sequences=((90, 400), (2, 270)), num_heads=4, num_kv_heads=2, head_dim=112, dtype=BF16, alibi=True, sinks=True),
]
SHAPE_IDS = [f"{shape.head_dim}-{shape.dtype}-{shape.kv_dtype or shape.dtype}" for shape in ATTENTION_SHAPES]


@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=SHAPE_IDS)
def test_attention_alone_and_in_a_batch(cpu_backend: KernelBackend, shape: CaseShape) -> None:
    case = make_case(shape)
    out, lse = case.run(cpu_backend)
    for seq, (query_len, _) in enumerate(shape.sequences):
        begin = int(case.query_start_loc[seq])
        alone, alone_lse = with_queries(case, seq, 0, query_len).run(cpu_backend)
        assert_same_bits(alone, out[begin : begin + query_len])
        assert_same_bits(alone_lse, lse[begin : begin + query_len])


@pytest.mark.parametrize("chunk", [1, 16, 63, 100])
@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=SHAPE_IDS)
def test_attention_for_any_chunking(cpu_backend: KernelBackend, shape: CaseShape, chunk: int) -> None:
    case = make_case(shape)
    query_len = shape.sequences[0][0]
    whole, _ = with_queries(case, 0, 0, query_len).run(cpu_backend)
    for begin in range(0, query_len, chunk):
        if chunk == 1 and begin % 7 > 0:
            continue
        end = min(begin + chunk, query_len)
        part, _ = with_queries(case, 0, begin, end).run(cpu_backend)
        assert_same_bits(part, whole[begin:end])


def spoil(case: PagedCase, how: str) -> None:
    """Numbers that arithmetic may treat in more than one way."""
    if how == "subnormal":  # products below the smallest normal number, and values that are subnormal themselves
        case.query *= 2.0**-70
        case.k_cache *= 2.0**-58
        case.v_cache *= 2.0**-128
        case.options = replace(case.options, scale=2.0**126)
    elif how == "not finite":
        for position, bad in ((3, math.inf), (40, math.nan), (200, -math.inf), (201, math.inf), (290, math.nan)):
            case.v_cache[int(case.block_table[0, position // 16]), :, position % 16, position % 7] = bad


@pytest.mark.parametrize("how", ["plain", "subnormal", "not finite"])
@pytest.mark.parametrize(("group", "head_dim", "dtype", "window"), [(3, 64, FP32, 0), (1, 80, BF16, 37), (5, 96, FP16, 0)])
def test_decodes_equal_prefills(
    cpu_backend: KernelBackend, group: int, head_dim: int, dtype: torch.dtype, window: int, how: str
) -> None:
    """A few rows are multiplied in other ways than many: with a bf16 cache, in tiles or not."""
    heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim}
    shape = CaseShape(sequences=((317, 317),), dtype=dtype, kv_dtype=BF16, sliding_window=window, **heads)
    case = make_case(shape)
    spoil(case, how)
    whole, whole_lse = case.run(cpu_backend)
    assert whole.isfinite().any()
    assert whole.isfinite().all() == (how != "not finite")
    for length in (1, 2, 3, 7, 15, 31, 33, 63, 65, 127, 129, 201, 255, 256, 257, 289, 317):
        for query_len in range(1, min(length, 4) + 1):
            rows = slice(length - query_len, length)
            few, lse = with_queries(case, 0, rows.start, rows.stop).run(cpu_backend)
            assert_same_bits(few.isnan(), whole[rows].isnan())
            assert_same_bits(few.nan_to_num(nan=0.0), whole[rows].nan_to_num(nan=0.0))  # whatever a NaN's other bits are
            assert_same_bits(lse, whole_lse[rows])


@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=SHAPE_IDS)
def test_attention_wherever_the_blocks_lie(cpu_backend: KernelBackend, shape: CaseShape) -> None:
    case = make_case(shape)
    before, _ = case.run(cpu_backend)
    order = torch.randperm(len(case.k_cache) - 1) + 1
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), order])
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        tensor = getattr(case, name)
        if tensor is not None:
            target = tensor.clone()
            target[moved] = tensor
            setattr(case, name, target)
    case.block_table = moved[case.block_table.long()].to(torch.int32)
    after, _ = case.run(cpu_backend)
    assert_same_bits(after, before)


@pytest.mark.usefixtures("num_threads")
def test_any_number_of_threads(cpu_backend: KernelBackend) -> None:
    torch.manual_seed(0)
    cases = [make_case(shape) for shape in ATTENTION_SHAPES]
    long_decode = make_case(CaseShape(sequences=((1, 1500), (2, 900)), num_heads=3, num_kv_heads=1))
    x = torch.randn(90, 576)
    packed = torch.empty(20, 576, 16)
    cpu_backend.ops.pack_linear_weight(packed, torch.randn(320, 576))
    results = []
    for count in (1, 2, 3):
        load_core().set_num_threads(count)
        outputs = [case.run(cpu_backend)[0] for case in [*cases, long_decode]]
        outputs += [run_linear(cpu_backend, x[:rows], packed, 320) for rows in (1, 20, 90)]
        norm, act = torch.empty(90, 576), torch.empty(90, 288)
        cpu_backend.ops.rms_norm(norm, x, torch.ones(576), 1e-5)
        cpu_backend.ops.silu_and_mul(act, x)
        results.append([*outputs, norm, act])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same_bits(one, two)


def test_row_ops_for_any_number_of_rows(cpu_backend: KernelBackend) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 600)
    weight, positions = torch.rand(600), torch.arange(64)
    cos_sin = torch.randn(64, 40)
    heads = x[:, :400].reshape(64, 10, 40)

    def all_ops(rows: slice) -> list[Tensor]:
        count = len(x[rows])
        norm, act, gelu = torch.empty(count, 600), torch.empty(count, 300), torch.empty(count, 300)
        cpu_backend.ops.rms_norm(norm, x[rows], weight, 1e-5)
        cpu_backend.ops.silu_and_mul(act, x[rows])
        cpu_backend.ops.gelu_and_mul(gelu, x[rows])
        rotated = heads[rows].clone()
        cpu_backend.ops.rotary_embedding(positions[rows], rotated, None, cos_sin)
        return [norm, act, gelu, rotated]

    together = all_ops(slice(0, 64))
    for i in (0, 1, 31, 63):
        for one, many in zip(all_ops(slice(i, i + 1)), together, strict=True):
            assert_same_bits(one, many[i : i + 1])
