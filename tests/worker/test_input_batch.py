"""The batch's rows and a step's inputs, against a straightforward model of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.worker.input_batch import InputBatch, RequestInputError, StepInputs

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS = 100, 60, 8, 5


def make_batch(**changes: Any) -> InputBatch:
    sizes = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 200,
        "block_size": BLOCK_SIZE,
        "vocab_size": VOCAB_SIZE,
    }
    return InputBatch(**(sizes | changes), device=torch.device("cpu"))


@dataclass
class Sequence:
    """The reference: a sequence as lists."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    order: int = field(default=0)


def check_step(batch: InputBatch, sequences: dict[str, Sequence], scheduled: dict[str, int]) -> StepInputs:
    """Prepare a step, and compare every input with what the lists say, token by token."""
    inputs = batch.prepare(scheduled)
    metadata = inputs.metadata
    assert sorted(inputs.req_ids) == sorted(scheduled)
    assert (metadata.num_seqs, metadata.num_tokens) == (len(scheduled), sum(scheduled.values()))
    assert metadata.max_query_len == max(scheduled.values())
    loc = metadata.query_start_loc.tolist()
    assert loc == inputs.query_start_loc.tolist()
    assert loc[0] == 0
    assert loc[-1] == metadata.num_tokens
    for i, req_id in enumerate(inputs.req_ids):
        sequence, count = sequences[req_id], scheduled[req_id]
        first, last = sequence.computed, sequence.computed + count
        assert loc[i + 1] - loc[i] == count
        tokens = slice(loc[i], loc[i + 1])
        assert inputs.input_ids[tokens].tolist() == sequence.tokens[first:last]
        assert inputs.positions[tokens].tolist() == list(range(first, last))
        slots = [sequence.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)]
        assert metadata.slot_mapping[tokens].tolist() == slots
        assert metadata.seq_lens[i] == last
        used = -(-last // BLOCK_SIZE)
        assert metadata.block_table[i, :used].tolist() == sequence.blocks[:used]
        assert inputs.samples[i] == (last == len(sequence.tokens))
        assert inputs.num_computed_tokens[i] == first
    assert metadata.max_seq_len == int(metadata.seq_lens.max())
    dtypes = {"query_start_loc": torch.int32, "seq_lens": torch.int32, "block_table": torch.int32, "slot_mapping": torch.int64}
    assert all(getattr(metadata, name).dtype == dtype for name, dtype in dtypes.items())
    assert inputs.input_ids.dtype == inputs.positions.dtype == torch.int64
    return inputs


def check_logits_rows(inputs: StepInputs, row_lens: list[int]) -> None:
    """Compare the batch of each sequence's last tokens with the whole one."""
    rows, step = inputs.logits_rows(np.array(row_lens, dtype=np.int64)), inputs.metadata
    if row_lens == inputs.query_lens.tolist():
        assert rows is None
        return
    assert rows is not None
    ends = step.query_start_loc.tolist()[1:]
    assert rows.indices.tolist() == [
        token for end, count in zip(ends, row_lens, strict=True) for token in range(end - count, end)
    ]
    kept = [i for i, count in enumerate(row_lens) if count]
    assert (rows.metadata.num_seqs, rows.metadata.num_tokens) == (len(kept), sum(row_lens))
    assert rows.metadata.max_query_len == max(row_lens)
    assert rows.metadata.query_start_loc.diff().tolist() == [row_lens[i] for i in kept]
    assert rows.metadata.query_start_loc[0] == 0
    assert rows.metadata.seq_lens.tolist() == [int(step.seq_lens[i]) for i in kept]
    assert torch.equal(rows.metadata.block_table, step.block_table[kept])
    assert rows.metadata.slot_mapping.tolist() == []
    dtypes = (rows.metadata.query_start_loc.dtype, rows.metadata.seq_lens.dtype, rows.indices.dtype)
    assert dtypes == (torch.int32, torch.int32, torch.int64)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_lives_of_sequences(data: st.DataObject) -> None:
    """Sequences come and go, grow, change blocks and run in chunks; the inputs are always what the lists say."""
    batch = make_batch()
    sequences: dict[str, Sequence] = {}
    next_id, next_block = 0, 1
    for _ in range(data.draw(st.integers(1, 12))):
        for req_id in [r for r in list(sequences) if data.draw(st.integers(0, 3)) == 0]:
            assert batch.remove(req_id).tolist() == sequences.pop(req_id).tokens
        while len(sequences) < MAX_NUM_SEQS and data.draw(st.booleans()):
            num_tokens = data.draw(st.integers(1, 40))
            tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=num_tokens, max_size=num_tokens))
            num_blocks = -(-num_tokens // BLOCK_SIZE)
            blocks = list(range(next_block, next_block + num_blocks))
            sequence = Sequence(tokens, blocks, data.draw(st.integers(0, num_tokens - 1)))
            sequences[str(next_id)] = sequence
            batch.add(str(next_id), batch.check_tokens(tokens), blocks, sequence.computed)
            next_id, next_block = next_id + 1, next_block + num_blocks
        running = [r for r in sequences if len(sequences[r].tokens) < MAX_MODEL_LEN and data.draw(st.integers(0, 4)) > 0]
        if not running:
            continue
        scheduled = {
            r: data.draw(st.integers(1, len(sequences[r].tokens) - sequences[r].computed))
            for r in data.draw(st.permutations(running))
        }
        replaced: dict[str, list[tuple[int, int]]] = {r: [] for r in scheduled}
        new: dict[str, list[int]] = {r: [] for r in scheduled}
        for req_id, count in scheduled.items():
            sequence = sequences[req_id]
            if data.draw(st.integers(0, 5)) == 0:  # copy-on-write of a block
                index = data.draw(st.integers(0, len(sequence.blocks) - 1))
                sequence.blocks[index] = next_block
                replaced[req_id].append((index, next_block))
                next_block += 1
            while len(sequence.blocks) * BLOCK_SIZE < sequence.computed + count:
                sequence.blocks.append(next_block)
                new[req_id].append(next_block)
                next_block += 1
        computed = [sequences[r].computed for r in scheduled]
        batch.update(list(scheduled), list(new.values()), list(replaced.values()), computed)
        inputs = check_step(batch, sequences, scheduled)
        check_logits_rows(inputs, [data.draw(st.integers(0, int(count))) for count in inputs.query_lens])
        sampling = np.flatnonzero(inputs.samples)
        sampled = data.draw(st.lists(st.integers(0, 99), min_size=len(sampling), max_size=len(sampling)))
        batch.append_sampled(sampled)
        for i, token_id in zip(sampling, sampled, strict=True):
            sequences[inputs.req_ids[i]].tokens.append(token_id)
        for req_id, count in scheduled.items():
            sequences[req_id].computed += count
    assert len(batch) == len(sequences)


def test_the_usual_step_shares_memory_with_the_block_tables() -> None:
    """When every row runs, block tables are not copied."""
    batch = make_batch()
    for i in range(3):
        batch.add(str(i), np.arange(10), [3 * i + 1, 3 * i + 2], 9)
    first = batch.prepare({"2": 1, "0": 1, "1": 1})
    assert first.req_ids == ["0", "1", "2"]
    address = first.metadata.block_table.data_ptr()
    batch.append_sampled([5, 6, 7])
    batch.update(["0", "1", "2"], [[], [], []], [[], [], []], [10, 10, 10])
    second = batch.prepare({"0": 1, "1": 1, "2": 1})
    assert second.metadata.block_table.data_ptr() == address
    assert second.input_ids.tolist() == [5, 6, 7]
    gathered = batch.prepare({"2": 1, "1": 1}).metadata.block_table
    assert gathered.data_ptr() != address
    assert gathered.tolist() == [[4, 5], [7, 8]]


def test_the_last_row_moves_into_a_gap_with_all_it_has() -> None:
    batch = make_batch()
    batch.add("a", np.arange(30), [1, 2, 3, 4], 0)
    batch.add("b", np.arange(50, 62), [5, 6], 9)
    batch.remove("a")
    inputs = batch.prepare({"b": 3})
    assert inputs.rows.tolist() == [0]
    assert inputs.input_ids.tolist() == [59, 60, 61]
    assert inputs.positions.tolist() == [9, 10, 11]
    assert inputs.samples.tolist() == [True]
    assert inputs.metadata.slot_mapping.tolist() == [49, 50, 51]
    assert "a" not in batch
    assert len(batch) == 1


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "no tokens"),
        ([1, VOCAB_SIZE], "token id 100 is outside the vocabulary of 100"),
        ([1, -1], "token id -1 is outside"),
        ([1] * (MAX_MODEL_LEN + 1), "61 tokens, max_model_len is 60"),
    ],
)
def test_tokens_that_cannot_run_are_refused(token_ids: list[int], message: str) -> None:
    with pytest.raises(RequestInputError, match=message):
        make_batch().check_tokens(token_ids)


def test_a_schedule_that_does_not_fit_is_an_error() -> None:
    batch = make_batch()
    batch.add("a", np.arange(12), [1], 0)
    assert batch.prepare({"a": 8}).metadata.num_tokens == 8
    with pytest.raises(RuntimeError, match=r"sequence a is scheduled up to token 9, .* 12 tokens and 1 blocks of 8"):
        batch.prepare({"a": 9})
    batch.update(["a"], [[2]], [[]], [0])
    assert batch.prepare({"a": 12}).samples.tolist() == [True]
    with pytest.raises(RuntimeError, match="up to token 13"):
        batch.prepare({"a": 13})
    small = make_batch(max_num_batched_tokens=11)
    small.add("a", np.arange(12), [1, 2], 0)
    with pytest.raises(RuntimeError, match="12 tokens are scheduled, max_num_batched_tokens is 11"):
        small.prepare({"a": 12})
    with pytest.raises(RuntimeError, match="has a row already"):
        batch.add("a", np.arange(3), [5], 0)
    with pytest.raises(KeyError):
        batch.prepare({"b": 1})


def test_the_last_token_that_fits_is_kept_and_the_one_after_ends_the_sequence() -> None:
    batch = make_batch(max_model_len=10)
    batch.add("a", np.arange(10), [1, 2], 9)
    batch.prepare({"a": 1})
    batch.append_sampled([7])
    assert batch.remove("a").tolist() == list(range(10))


def test_as_many_tokens_as_sequences_that_sample() -> None:
    batch = make_batch()
    batch.add("a", np.arange(10), [1, 2], 9)
    batch.add("b", np.arange(10), [3, 4], 0)
    batch.prepare({"a": 1, "b": 4})
    for wrong in ([], [1, 2]):
        with pytest.raises(ValueError, match="as many token_ids"):
            batch.append_sampled(wrong)
    batch.append_sampled([7])
    assert batch.token_ids(0).tolist() == [*range(10), 7]
    assert batch.token_ids(1).tolist() == list(range(10))
