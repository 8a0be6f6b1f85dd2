"""Decode steps from recorded graphs, on the emulated device's stand-in: the tokens and the cache are those of eager steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyengine import LLM, SamplingParams
from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.worker.backends.attention_plan import workspace_size
from pyengine.worker.backends.emulated import EmulatedBackend
from pyengine.worker.backends.emulated_graph import EmulatedGraphRecorder
from pyengine.worker.graph_runner import DecodeGraphs, GraphShape, batch_buckets

PROMPTS = [{"prompt_token_ids": [(7 * i + 13 * j) % 500 + 3 for j in range(3 + 6 * i)]} for i in range(7)]
SHAPE = GraphShape(
    hidden_size=3, max_num_seqs=6, max_model_len=64, max_blocks=8, max_work=16, workspace_floats=workspace_size(16, 1, 8)
)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


# ---- the runner alone


class Model:
    """A stand-in whose hidden states tell what it was given; counts how often its Python runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert metadata.plan is not None
        self.calls.append((metadata.num_seqs, len(metadata.plan)))
        columns = (input_ids + 1000 * metadata.block_table[:, 1], positions + metadata.seq_lens, metadata.slot_mapping)
        live = (metadata.plan[:, 0] >= 0).sum()
        return torch.stack([column.float() for column in columns], dim=1) + live / 1024


def make_graphs(model: Model, shape: GraphShape = SHAPE) -> DecodeGraphs:
    return DecodeGraphs(model.forward, EmulatedGraphRecorder(), shape=shape, dtype=torch.float32, device=torch.device("cpu"))


def decode_step(
    num_seqs: int, num_work: int, seed: int = 0, max_query_len: int = 1
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(1, 60, shape, generator=generator).to(dtype)

    metadata = AttentionMetadata(
        num_seqs=num_seqs,
        num_tokens=num_seqs,
        max_query_len=max_query_len,
        max_seq_len=60,
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=draw(num_seqs, dtype=torch.int32),
        block_table=draw(num_seqs, 2, dtype=torch.int32),
        slot_mapping=draw(num_seqs),
        plan=draw(num_work, 4, dtype=torch.int32),
    )
    return draw(num_seqs), draw(num_seqs), metadata


@pytest.mark.parametrize(("max_num_seqs", "buckets"), [(1, [1]), (6, [1, 2, 4, 6]), (40, [1, 2, 4, 8, 16, 24, 32, 40])])
def test_buckets(max_num_seqs: int, buckets: list[int]) -> None:
    assert batch_buckets(max_num_seqs) == buckets


def test_buckets_waste_little() -> None:
    for max_num_seqs in (256, 1000):
        sizes = batch_buckets(max_num_seqs)
        assert sizes[-1] == min(max_num_seqs, 512)
        assert len(sizes) < 30
        for num_seqs in range(1, sizes[-1] + 1):
            assert next(size for size in sizes if size >= num_seqs) <= max(num_seqs * 1.25, num_seqs + 16)


def test_every_batch_size_gives_the_eager_result_and_is_recorded_once() -> None:
    model, eager = Model(), Model()
    graphs = make_graphs(model)
    for seed, (num_seqs, num_work) in enumerate(
        [(3, 3), (6, 6), (1, 1), (5, 12), (4, 4), (2, 2), (3, 7), (6, 16), (1, 2), (3, 3)]
    ):
        step = decode_step(num_seqs, num_work, seed)
        assert graphs.covers(step[2])
        actual = graphs.run(*step)
        assert torch.equal(actual, eager.forward(*step)), (num_seqs, num_work)
    # (batch, room for work): the smallest batch size that is large enough, its work doubled until it fits
    assert model.calls == [(4, 4), (6, 6), (1, 1), (6, 12), (2, 2), (4, 8), (6, 16), (1, 2)]
    assert graphs.num_graphs == len(model.calls)


def test_common_graphs_are_recorded_before_they_are_needed() -> None:
    model = Model()
    graphs = make_graphs(model)
    graphs.record_common()
    recorded = list(model.calls)
    assert {size for size, _ in recorded} == {1, 2, 4, 6}
    for num_seqs in range(1, 7):
        graphs.run(*decode_step(num_seqs, num_seqs + 1 if num_seqs in (1, 2, 4, 6) else 2 * num_seqs))
    assert model.calls == recorded


def test_steps_that_no_graph_covers() -> None:
    graphs = make_graphs(Model())
    assert not graphs.covers(decode_step(7, 7)[2])  # more sequences than any graph has
    assert not graphs.covers(decode_step(6, 17)[2])  # more work
    assert not graphs.covers(decode_step(3, 3, max_query_len=2)[2])
    without_plan = decode_step(3, 3)[2]
    without_plan.plan = None
    assert not graphs.covers(without_plan)


def test_recording_sees_padding_only() -> None:
    """A device may run the step while it is recorded: it must not write to a block."""
    seen: list[Tensor] = []
    values: list[Any] = []

    def forward(input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert metadata.plan is not None
        seen.extend((metadata.slot_mapping, metadata.plan[:, 0], -metadata.seq_lens, metadata.block_table - 1))
        values.extend(tensor.numpy().copy() for tensor in seen[-4:])  # as they are now
        return torch.zeros(metadata.num_seqs, 3)

    graphs = DecodeGraphs(forward, EmulatedGraphRecorder(), shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    graphs.run(*decode_step(6, 6))
    graphs.run(*decode_step(5, 15))  # recorded after steps have left their numbers in the buffers
    assert len(values) == 8
    assert all((array == -1).all() for array in values)


def test_a_replay_runs_no_python_and_a_host_read_is_an_error() -> None:
    x, factor = torch.ones(3), [2.0]
    out = torch.zeros(3)
    graph = EmulatedGraphRecorder().record(lambda: out.copy_(x * factor[0]))  # type: ignore[arg-type, func-returns-value]
    x.fill_(5.0)
    factor[0] = 100.0
    graph.replay()
    assert out.tolist() == [10.0] * 3
    with pytest.raises(RuntimeError, match="makes the host wait"):
        EmulatedGraphRecorder().record(lambda: out.fill_(float(x.sum())))  # type: ignore[arg-type, func-returns-value]


# ---- the whole engine


def generate(path: Path, **options: Any) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, and the number of graphs that were recorded. Outputs of many lengths: the batch shrinks."""
    options = {"max_model_len": 128, "num_kv_blocks": 100, "max_num_seqs": 8, **options}
    params = [SamplingParams(temperature=0, max_tokens=4 + 5 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    with LLM(model=str(path), device="emulated", **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        graphs = getattr(llm.llm_engine._executor._worker._runner._step, "graphs", None)  # type: ignore[attr-defined]
    return [list(output.outputs[0].token_ids) for output in outputs], 0 if graphs is None else graphs.num_graphs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},  # chunked prefill: mixed steps between decode steps
        {"num_kv_blocks": 14, "preemption_mode": "swap", "swap_space": 0.01},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_tokens_equal_eager_steps(tiny_llama: Path, options: dict[str, Any]) -> None:
    expected, none = generate(tiny_llama, enforce_eager=True, **options)
    actual, recorded = generate(tiny_llama, **options)
    assert actual == expected
    assert (none, recorded > 2) == (0, True)


def test_the_profiling_run_is_taken_off_the_pool(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of 96 tokens and 8 rows of logits: more than its hidden states, less than everything it ever allocates."""
    monkeypatch.setattr(EmulatedBackend, "measures_memory", True)
    monkeypatch.setattr("pyengine.worker.backends.emulated.available_host_memory", lambda: 2**28)
    caplog.set_level(logging.INFO, logger="pyengine.worker.worker")
    options = {"max_model_len": 1024, "max_num_seqs": 96, "max_num_batched_tokens": 96, "gpu_memory_utilization": 0.5}
    with LLM(model=str(tiny_llama), device="emulated", swap_space=0.0, **options) as llm:
        num_blocks = llm.stats()["num_blocks"]
        assert llm.llm_engine._executor._worker.available_memory() < 2**28  # type: ignore[attr-defined]
    (line,) = {record.getMessage() for record in caplog.records if "profiling run" in record.getMessage()}
    assert line.startswith("profiling run: a step of 96 tokens needs 0.00 GiB beside the weights; 0.2")
    block_bytes = 2 * 3 * 2 * 16 * 32 * 4  # K and V, layers, heads, tokens, channels, fp32
    peak = 2**28 - num_blocks * block_bytes * 2
    logits, hidden = 4 * 96 * 512, 4 * 96 * 64
    assert logits + hidden < peak < 40 * hidden + logits
