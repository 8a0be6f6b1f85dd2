"""The split-KV planner, and paged attention under its plans."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from paged_case import CaseShape, PagedCase, make_case
from torch import Tensor

from pyengine.ops import get_ops
from pyengine.worker.backends.attention_plan import AttentionPlan, is_short, plan_attention, workspace_size

SPLIT = 64
HEADS = (4, 2)


def run(case: PagedCase, plan: AttentionPlan | None, seqs: list[int] | None = None) -> list[Tensor]:
    """Outputs [query_len, num_heads, head_dim] of each sequence; with `seqs`, of a batch of those sequences alone."""
    seqs = list(range(len(case.seq_lens))) if seqs is None else seqs
    starts = case.query_start_loc.tolist()
    rows = [case.query[starts[seq] : starts[seq + 1]] for seq in seqs]
    query = torch.cat(rows)
    out = torch.full_like(query, float("nan"))
    query_lens = torch.tensor([0] + [len(row) for row in rows])
    work = workspace = None
    if plan is not None:
        work = torch.tensor(plan.work, dtype=torch.int32).reshape(-1, 4)
        workspace = torch.full((workspace_size(plan.num_slots, *query.shape[1:]),), float("nan"))
    get_ops("emulated").paged_attention(
        out,
        query,
        case.k_cache,
        case.v_cache,
        case.block_table[seqs],
        query_lens.cumsum(0).to(torch.int32),
        case.seq_lens[seqs],
        max(len(row) for row in rows),
        int(case.seq_lens[seqs].max()),
        case.options.scale,
        case.options.sliding_window,
        plan=work,
        workspace=workspace,
    )
    return list(out.split([len(row) for row in rows]))


def plan_of(case: PagedCase, seqs: list[int], **options: int) -> AttentionPlan:
    query_lens = case.query_start_loc.diff()[seqs].tolist()
    return plan_attention(query_lens, case.seq_lens[seqs].tolist(), *HEADS, split_size=SPLIT, **options)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 90)])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, window: int) -> None:
    shape = CaseShape(
        sequences=((1, 300), (2, 129), (1, 64), (40, 70), (1, 65), (1, 5)),
        num_heads=HEADS[0],
        num_kv_heads=HEADS[1],
        dtype=dtype,
        sliding_window=window,
    )
    case = make_case(shape)
    batch = run(case, plan_of(case, [0, 1, 2, 3, 4, 5]))
    padded = run(case, plan_of(case, [0, 1, 2, 3, 4, 5], num_work=30))
    shuffled = [4, 2, 0, 5, 3, 1]
    other = dict(zip(shuffled, run(case, plan_of(case, shuffled), shuffled), strict=True))
    for seq in range(6):
        alone = run(case, plan_of(case, [seq]), [seq])[0]
        for result in (padded[seq], other[seq], alone):
            assert_same_bits(result, batch[seq])


def test_a_plan_changes_no_more_than_rounding() -> None:
    case = make_case(CaseShape(sequences=((1, 300), (3, 200)), num_heads=HEADS[0], num_kv_heads=HEADS[1]))
    split, whole = run(case, plan_of(case, [0, 1])), run(case, None)
    for a, b in zip(split, whole, strict=True):
        assert_close(a, b, 1e-6, 1e-5)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3000)), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 4), (8, 2), (64, 8), (40, 1)]),
    split_size=st.sampled_from([64, 512]),
)
def test_parts_cover_short_sequences_once(lengths: list[tuple[int, int]], heads: tuple[int, int], split_size: int) -> None:
    query_lens = [query for query, _ in lengths]
    seq_lens = [query + past for query, past in lengths]
    plan = plan_attention(query_lens, seq_lens, *heads, split_size=split_size)
    slots: list[int] = []
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        parts = [entry for entry in plan.work if entry[0] == seq]
        if query_len == 0 or not is_short(query_len, *heads):
            assert not parts
            continue
        assert [begin for _, begin, _, _ in parts] == list(range(0, seq_len, split_size))
        assert [end for _, _, end, _ in parts] == [*(begin for _, begin, _, _ in parts[1:]), seq_len]
        if len(parts) == 1:
            assert parts[0][3] == -1
        else:
            slots += [slot + i for _, _, _, slot in parts for i in range(query_len)]
    assert slots == list(range(plan.num_slots))


def test_padding_and_errors() -> None:
    plan = plan_attention([1], [100], 4, 2, split_size=64, num_work=5)
    assert plan.work[2:] == [(-1, 0, 0, -1)] * 3
    with pytest.raises(ValueError, match="num_work"):
        plan_attention([1], [1000], 4, 2, split_size=64, num_work=3)
    with pytest.raises(ValueError, match="multiple of 64"):
        plan_attention([1], [1000], 4, 2, split_size=100)


def test_workspace_size_is_the_kernels() -> None:
    assert workspace_size(3, 5, 64) == 3 * 328  # 5 * 65 floats, rounded up to a multiple of 4
