"""Sequences that begin with the same blocks: read once for all of them, without a trace in any row's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import ATTENTION_TOLERANCE, assert_same_bits
from kernel_backend import ATTENTION_ISAS, KernelBackend
from native import ROOT, compile_cpp, run_program
from paged_case import CaseShape, PagedCase, make_case, multiplies_in_bf16
from torch import Tensor

from pyengine.ops import load_core

ISAS = ATTENTION_ISAS
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")
#: (sequences, who shares with whom): (sequence, an earlier one, positions that both begin with).
Shares = tuple[tuple[int, int, int], ...]

SEQUENCES = (
    (1, 560),  # 0: two partitions with 1, 2, 7 and 8; one with 3 and 4
    (1, 544),
    (1, 700),  # 2: another partition with 7
    (1, 300),
    (2, 470),  # 4: two tokens, of which the first sees one partition
    (1, 20),
    (1, 600),  # 6: on its own
    (1, 800),
    (1, 512),  # 8: nothing beyond what is shared
    (60, 600),  # 9: a chunk of a prompt that shares blocks
    (1, 290),  # 10: one partition with 11, not 0's
    (1, 300),
    (1, 255),  # 12: a position short of a partition
)
SHARES: Shares = (
    (1, 0, 512), (2, 0, 512), (3, 0, 288), (4, 0, 448), (7, 2, 672), (8, 0, 512), (9, 0, 512), (11, 10, 288), (12, 0, 224)
)  # fmt: skip
SHAPES = [
    CaseShape(SEQUENCES, num_heads=9, num_kv_heads=3, kv_dtype=BF16),
    CaseShape(SEQUENCES, num_heads=9, num_kv_heads=3),
    CaseShape(SEQUENCES, num_heads=4, num_kv_heads=2, head_dim=80, dtype=BF16, alibi=True, sinks=True, logit_softcap=20.0),
    CaseShape(SEQUENCES, num_heads=20, num_kv_heads=1, head_dim=32, dtype=FP16, alibi=True),
    CaseShape(SEQUENCES, num_heads=4, num_kv_heads=4, block_size=32, dtype=BF16, sliding_window=300),
    CaseShape(SEQUENCES, num_heads=4, num_kv_heads=2, block_size=8, kv_dtype=torch.int8, sinks=True),
    CaseShape(((1, 600), (1, 530), (3, 520)), num_heads=6, num_kv_heads=2, block_size=512, kv_dtype=BF16),
]
SHAPE_IDS = [f"{shape.head_dim}-{shape.block_size}-{shape.kv_dtype or shape.dtype}" for shape in SHAPES]


def shares_of(shape: CaseShape) -> Shares:
    return SHARES if shape.sequences is SEQUENCES else ((1, 0, 512), (2, 1, 512))


def both_ways(shape: CaseShape, shares: Shares) -> tuple[PagedCase, PagedCase]:
    """A batch whose sequences share blocks, and the same one with a copy of such blocks for each."""
    apart = make_case(shape)
    shared = replace(apart, block_table=apart.block_table.clone())
    for seq, other, positions in shares:
        assert positions % shape.block_size == 0
        count = positions // shape.block_size
        source, target = (apart.block_table[i, :count].long() for i in (other, seq))
        for cache in (getattr(apart, name) for name in CACHES):
            if cache is not None and (cache.dim() == 4 or shape.kv_dtype == torch.int8):
                cache[target] = cache[source]
        shared.block_table[seq, :count] = shared.block_table[other, :count]
    return shared, apart


def only(case: PagedCase, seqs: Sequence[int]) -> PagedCase:
    """The batch of these sequences."""
    rows = [torch.arange(int(case.query_start_loc[i]), int(case.query_start_loc[i + 1])) for i in seqs]
    starts = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).to(torch.int32)
    return replace(
        case,
        shape=replace(case.shape, sequences=tuple(case.shape.sequences[i] for i in seqs)),
        query=case.query[torch.cat(rows)],
        block_table=case.block_table[list(seqs)],
        query_start_loc=starts,
        seq_lens=case.seq_lens[list(seqs)],
    )


def assert_same_results(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(one, two, strict=True):
        assert_same_bits(a.isnan(), b.isnan())
        assert_same_bits(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))  # whatever a NaN's other bits are


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_shared_blocks_or_copies_or_alone(cpu_backend: KernelBackend, shape: CaseShape) -> None:
    shared, apart = both_ways(shape, shares_of(shape))
    out, lse = shared.run(cpu_backend)
    assert out.isfinite().all()
    assert_same_results((out, lse), apart.run(cpu_backend))
    for seq, _ in enumerate(shape.sequences):
        rows = slice(int(shared.query_start_loc[seq]), int(shared.query_start_loc[seq + 1]))
        assert_same_results((out[rows], lse[rows]), only(shared, [seq]).run(cpu_backend))
    for seqs in ([0, 1], [1, 8, 0], [7, 6, 2], [12, 11, 10, 4, 0, 3]) if len(shape.sequences) > 3 else ([2, 0],):
        assert_same_results(only(shared, seqs).run(cpu_backend), only(apart, seqs).run(cpu_backend))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=[SHAPE_IDS[0], SHAPE_IDS[2]])
def test_against_float64(cpu_backend: KernelBackend, shape: CaseShape) -> None:
    shared, _ = both_ways(shape, shares_of(shape))
    exact = replace(shared, query=shared.query.bfloat16()) if multiplies_in_bf16(cpu_backend, shape) else shared
    atol, rtol = ATTENTION_TOLERANCE[BF16 if multiplies_in_bf16(cpu_backend, shape) else shape.dtype]
    torch.testing.assert_close(shared.run(cpu_backend)[0].double(), exact.reference()[0].double(), atol=atol, rtol=rtol)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("query_len", [1, 3])
def test_many_sequences(cpu_backend: KernelBackend, query_len: int) -> None:
    """More rows than one tile takes, and as many threads as cut them otherwise."""
    shape = CaseShape(((query_len, 270),) * 75, num_heads=3, num_kv_heads=1, head_dim=32, kv_dtype=BF16)
    shared, apart = both_ways(shape, tuple((seq, 0, 256) for seq in range(1, 75)))
    load_core().set_num_threads(1)
    expected = apart.run(cpu_backend)
    for threads in (1, 2, 5):
        load_core().set_num_threads(threads)
        assert_same_results(shared.run(cpu_backend), expected)


@pytest.mark.parametrize("num_seqs", [2, 4])
def test_numbers_that_are_not_finite(cpu_backend: KernelBackend, num_seqs: int) -> None:
    shape = CaseShape(((1, 290),) * num_seqs, num_heads=9, num_kv_heads=3, kv_dtype=BF16)
    shared, apart = both_ways(shape, tuple((seq, 0, 256) for seq in range(1, num_seqs)))
    for position, bad in ((3, math.inf), (40, math.nan), (200, -math.inf)):
        for case in (shared, apart):
            for seq in range(num_seqs):
                case.v_cache[int(case.block_table[seq, position // 16]), position % 3, position % 16, position % 7] = bad
    out, lse = shared.run(cpu_backend)
    assert not out.isfinite().all()
    assert out.isfinite().any()
    assert_same_results((out, lse), apart.run(cpu_backend))


def test_what_is_found(tmp_path: Path) -> None:
    sources = [ROOT / "tests/csrc/shared_prefix_test.cpp", ROOT / "csrc/attention/cpu/plan/shared_prefix.cpp"]
    run_program(compile_cpp(tmp_path / "shared_prefix_test", sources, ["-fsanitize=address,undefined"]))
