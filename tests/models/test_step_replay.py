"""Steps recorded once and replayed: the same bits as op by op, whatever the step, and whichever rows are wanted of it; what
cannot be recorded says so."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from paged_runner import PagedRunner
from tiny_models import make_model
from torch import Tensor

from pyengine.ops import load_core
from pyengine.worker.step_recorder import Arena, NotReplayableError, record
from pyengine.worker.step_replay import EagerStepRunner, ReplayedStepRunner, create_step_runner

MAX_TOKENS = 40
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "use_sliding_window": False},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "use_sliding_window": False},
}


def random_batches(seed: int, count: int = 25) -> list[dict[str, list[int]]]:
    """Steps of decodes, chunks and both, of 1 to a few more tokens than are replayed."""
    rng = random.Random(seed)
    lengths: dict[str, int] = {}
    batches = []
    for _ in range(count):
        batch: dict[str, list[int]] = {}
        for name in rng.sample("abcdef", rng.randint(1, 6)):
            size = 1 if rng.random() < 0.7 else rng.randint(2, 12)
            if lengths.get(name, 0) + size <= 150:
                lengths[name] = lengths.get(name, 0) + size
                batch[name] = [rng.randrange(500) for _ in range(size)]
        if batch:
            batches.append(batch)
    return batches


def caches(runner: PagedRunner) -> list[Tensor]:
    return [tensor.contiguous().view(torch.int8) for cache in runner.caches for tensor in (cache.k, cache.v)]


def random_rows(batch: dict[str, list[int]], rng: random.Random) -> dict[str, int] | None:
    """Of how many last tokens of each sequence logits are wanted; None: of all."""
    if rng.random() < 0.2:
        return None
    most = rng.choice(([0], [0, 1], [1], [0, 1, 4, 100]))
    return {name: min(rng.choice(most), len(new)) for name, new in batch.items()}


def check_same_bits(path: Path, seed: int = 0, **options: Any) -> None:
    """Logits of some rows are those that whole steps give, op by op and replayed, and so is what is in the cache."""
    whole = PagedRunner(path, **options)
    others = [PagedRunner(path, **options), PagedRunner(path, **options, max_replayed_tokens=MAX_TOKENS)]
    rng = random.Random(seed)
    for batch in random_batches(seed):
        expected, wanted = whole.step(batch), random_rows(batch, rng)
        for other in others:
            for name, logits in other.step(batch, wanted).items():
                assert len(logits) == (len(batch[name]) if wanted is None else wanted[name])
                assert torch.equal(logits, expected[name][len(batch[name]) - len(logits) :])
    for other in others:
        assert all(map(torch.equal, caches(other), caches(whole)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_gives_the_bits_of_the_model(variant: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, **VARIANTS[variant])
    check_same_bits(path)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", None), ("float16", None), ("float32", "bfloat16")])
def test_in_every_type(dtype: str, kv_dtype: str | None, tiny_llama: Path) -> None:
    check_same_bits(tiny_llama, dtype=dtype, kv_dtype=kv_dtype)


def test_with_quantised_weights_and_threads(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", with_tokenizer=False, hidden_size=256, intermediate_size=512, num_attention_heads=8)
    path = write_gguf(tmp_path / "model.gguf", folder, "Q4_1")
    before = load_core().get_num_threads()
    load_core().set_num_threads(3)
    try:
        check_same_bits(path, seed=1, quantization="gguf")
    finally:
        load_core().set_num_threads(before)


def test_recording_runs_nothing(tiny_llama: Path) -> None:
    runner = PagedRunner(tiny_llama, max_replayed_tokens=MAX_TOKENS)
    assert all(cache.k.isnan().all() and cache.v.isnan().all() for cache in runner.caches)


def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    sizes = []
    for layers in (3, 6):
        path = make_model(tmp_path / str(layers), with_tokenizer=False, num_hidden_layers=layers)
        steps = PagedRunner(path, max_replayed_tokens=MAX_TOKENS).steps
        assert isinstance(steps, ReplayedStepRunner)
        sizes.append(steps.num_bytes)
    assert sizes[0] == sizes[1] > 0


def test_a_replay_can_run_in_another_thread(tiny_llama: Path) -> None:
    eager, replayed = PagedRunner(tiny_llama), PagedRunner(tiny_llama, max_replayed_tokens=MAX_TOKENS)
    got: list[Tensor] = []
    thread = threading.Thread(target=lambda: got.append(replayed.step({"a": [1, 2, 3]})["a"]))
    thread.start()
    thread.join()
    assert torch.equal(got[0], eager.step({"a": [1, 2, 3]})["a"])


def test_times_of_the_ops(tiny_llama: Path) -> None:
    runner = PagedRunner(tiny_llama, max_replayed_tokens=MAX_TOKENS)
    steps = runner.steps
    assert isinstance(steps, ReplayedStepRunner)
    runs: list[list[tuple[str, float]]] = []

    def timed(*step: Any) -> Tensor:
        runs.append(steps.op_times(*step))
        return forward(*step)

    forward, steps.forward = steps.forward, timed  # type: ignore[method-assign]
    for wanted in (None, {"a": 1}, {"a": 0}):
        runner.step({"a": [1, 2, 3]}, wanted)
    whole, some, none = ([name for name, _ in run] for run in runs)
    assert whole.count("paged_attention") == 3
    assert whole[-2:] == ["linear", "argmax"]  # of the logits
    assert some == whole
    assert none == whole[:-2]
    tail = len(whole) - whole[::-1].index("reshape_and_cache")  # once the last keys and values are written
    assert whole[tail] == "logits_rows"
    assert all(seconds > 0 for _, seconds in runs[1])
    assert all((seconds > 0) == (index < tail) for index, (_, seconds) in enumerate(runs[2]))


def test_ops_have_the_logits_rows_once_these_are_taken() -> None:
    core = load_core()
    x, indices = torch.rand(5, 64), torch.arange(4)
    whole, some = torch.full((5, 64), torch.nan), torch.full((4, 64), torch.nan)

    def function() -> None:
        torch.ops.pyengine.rms_norm(whole, x, WEIGHT, 1e-5)
        torch.ops.pyengine.rms_norm(some, x.index_select(0, indices), WEIGHT, 1e-5)

    inputs = core.StepInputs(5, logits_rows=core.StepInputs(4, indices=indices.data_ptr()))
    plan, _ = record(function, Arena(), inputs, logits_indices=indices)
    wanted = torch.tensor([1, 3])
    for num_rows in (0, 2):
        plan.run(core.StepInputs(4, logits_rows=core.StepInputs(num_rows, indices=wanted.data_ptr())))
        assert whole.isnan().any(1).tolist() == [False] * 4 + [True]
        assert torch.equal(some[:num_rows], whole[wanted[:num_rows]])
        assert some[num_rows:].isnan().all()


# ---- what cannot be recorded


class Spoilt:
    """A model that does something else before its layers."""

    def __init__(self, runner: PagedRunner, extra: Any) -> None:
        self.embed_input_ids, self.compute_logits = runner.model.embed_input_ids, runner.model.compute_logits
        self._runner, self._extra = runner, extra

    def forward(self, hidden: Tensor, *args: Any) -> Tensor:
        self._extra(hidden)
        return self._runner.model.forward(hidden, *args)


WEIGHT, TABLE, POSITIONS = torch.ones(64), torch.ones(4, 32), torch.zeros(MAX_TOKENS + 1, dtype=torch.int64)


def other_rows(hidden: Tensor) -> None:
    torch.ops.pyengine.rms_norm(hidden[:3], hidden[:3], WEIGHT, 1e-5)


def other_positions(hidden: Tensor) -> None:
    torch.ops.pyengine.rotary_embedding(POSITIONS, hidden.view(len(hidden), 2, 32), None, TABLE)


def unrecorded_op(hidden: Tensor) -> None:
    torch.ops.pyengine.copy_blocks(hidden, torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda hidden: hidden.mul_(2), "aten.mul_"),
        (lambda hidden: hidden.index_select(0, POSITIONS), "aten.index_select"),
        (lambda hidden: hidden.t().clone(), "rows are not dense"),
        (other_rows, "rms_norm: cannot be recorded: it has 3 rows in a step of 41 tokens"),
        (other_positions, "rotary_embedding: cannot be recorded: it reads inputs of another step"),
    ],
)
def test_what_cannot_be_recorded_is_named(extra: Any, message: str, tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = PagedRunner(tiny_llama)
    model: Any = Spoilt(runner, extra)
    sizes = {"max_num_tokens": MAX_TOKENS, "max_num_rows": MAX_TOKENS}
    with pytest.raises(NotReplayableError, match=message):
        ReplayedStepRunner(model, runner.caches, **sizes)
    with caplog.at_level(logging.WARNING, "pyengine"):
        assert isinstance(create_step_runner(model, runner.caches, replay=True, **sizes), EagerStepRunner)
    assert message in caplog.text
    runner.step({"a": [1, 2]})  # ops run again, rather than being recorded


def test_an_op_of_all_tokens_after_rows_were_taken_is_named(tiny_llama: Path) -> None:
    runner = PagedRunner(tiny_llama)
    embed = runner.model.embed_input_ids

    class Careless:
        def embed_input_ids(self, input_ids: Tensor) -> Tensor:
            return embed(input_ids)

        def forward(self, hidden: Tensor, positions: Tensor, caches: Any, metadata: Any, rows: Any) -> None:
            rows.of(hidden)
            torch.ops.pyengine.rms_norm(hidden, hidden, WEIGHT, 1e-5)

    model: Any = Careless()
    with pytest.raises(NotReplayableError, match="rms_norm: cannot be recorded: it has 41 rows in a step of 40 logits rows"):
        ReplayedStepRunner(model, runner.caches, max_num_tokens=MAX_TOKENS, max_num_rows=MAX_TOKENS)


def test_ops_without_rows_are_refused(tiny_llama: Path) -> None:
    core = load_core()
    plan = core.StepPlan()
    plan.begin_recording(core.StepInputs(4))
    try:
        with pytest.raises(ValueError, match="copy_blocks: cannot be recorded"):
            unrecorded_op(torch.zeros(4, 8))
        with pytest.raises(RuntimeError, match="records a step already"):
            core.StepPlan().begin_recording(core.StepInputs(4))
    finally:
        plan.end_recording()
    assert plan.num_ops == 0


def test_inputs_that_do_not_fit_are_refused(tiny_llama: Path) -> None:
    core = load_core()
    plan = core.StepPlan()
    starts, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
    addresses = {"query_start_loc": starts.data_ptr(), "seq_lens": lens.data_ptr()}
    plan.begin_recording(core.StepInputs(2, 2, 1, 6, **addresses))
    plan.end_recording()
    plan.run(core.StepInputs(2, 2, 1, 6, **addresses))
    for inputs, message in (
        (core.StepInputs(3, 3, 1, 6, **addresses), "has 3 tokens, it was recorded for 1 to 2"),
        (core.StepInputs(0, **addresses), "has 0 tokens"),
        (core.StepInputs(2, 2, 1, 6), "has other inputs"),
        (core.StepInputs(2, 2, 1, 5, **addresses), "do not describe a batch"),
        (core.StepInputs(1, 2, 1, 6, **addresses), "do not describe a batch"),
        (core.StepInputs(2, 2, 0, 6, **addresses), "do not describe a batch"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.run(inputs)
    with pytest.raises(RuntimeError, match="recorded a step already"):
        plan.begin_recording(core.StepInputs(2))


def test_logits_rows_move_to_the_front() -> None:
    core = load_core()
    plan = core.StepPlan()
    wanted = torch.tensor([1, 2, 4])
    plan.begin_recording(core.StepInputs(5, logits_rows=core.StepInputs(4, indices=wanted.data_ptr())))
    values = torch.arange(30.0).view(5, 6)
    plan.record_logits_rows(values[:, 2:].data_ptr(), 12, 24)  # of each row three numbers, from the third on
    plan.end_recording()

    def run(num_tokens: int, num_rows: int, indices: Tensor = wanted) -> None:
        plan.run(core.StepInputs(num_tokens, logits_rows=core.StepInputs(num_rows, indices=indices.data_ptr())))

    before = values.clone()
    plan.run(core.StepInputs(4))  # wants all
    run(5, 0)
    assert torch.equal(values, before)
    run(5, 3)
    expected = before.clone()
    expected[:3, 2:5] = before[wanted, 2:5]
    assert torch.equal(values, expected)
    with pytest.raises(ValueError, match="has 5 logits rows, it was recorded for up to 4"):
        plan.run(core.StepInputs(5))
    for num_tokens, indices in ((4, wanted), (5, wanted.flip(0)), (5, torch.tensor([0, 3, 3])), (5, torch.tensor([-1, 0, 1]))):
        with pytest.raises(ValueError, match="logits rows are not tokens of the step in their order"):
            run(num_tokens, 3, indices)
    with pytest.raises(ValueError, match="logits rows are not tokens"):
        plan.run(core.StepInputs(5, logits_rows=core.StepInputs(3)))


def test_logits_rows_that_do_not_fit_are_refused() -> None:
    core = load_core()
    plan = core.StepPlan()
    starts, lens, wanted = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [5, 6], [0, 0, 1, 0]))
    batch = {"query_start_loc": starts.data_ptr(), "seq_lens": lens.data_ptr()}
    indices = {"indices": wanted.data_ptr()}  # int64 0, 1

    def step(*sizes: int, **inputs: int) -> Any:
        return core.StepInputs(2, 2, 1, 6, **batch, logits_rows=core.StepInputs(*sizes, **inputs))

    with pytest.raises(ValueError, match="at least one token and one logits row, not 0"):
        plan.begin_recording(step(0, **indices))
    plan.begin_recording(step(2, 2, 1, 6, **batch, **indices))
    plan.end_recording()
    plan.run(step(2, 2, 1, 6, **batch, **indices))
    for inputs, message in (
        (step(2, **indices), "has other inputs"),
        (step(2, 2, 1, 5, **batch, **indices), "do not describe a batch"),
        (step(1, 2, 1, 6, **batch, **indices), "do not describe a batch"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.run(inputs)


def test_arena_hands_out_memory_again_only_when_no_view_is_left() -> None:
    arena = Arena()
    first = arena.empty((4, 8), torch.float32)
    view, address = first.view(32)[3:], first.data_ptr()
    del first
    assert arena.empty((4, 8), torch.float32).data_ptr() != address
    del view
    taken = {arena.empty((2, 16), torch.float32).data_ptr() for _ in range(2)}
    assert address in taken
    assert arena.num_bytes == 2 * 4 * 8 * 4
