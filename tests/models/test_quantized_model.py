"""Models whose GGUF weights run as they are: logits against the same weights dequantised, in every format and mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_blocks import FORMATS
from gguf_files import write_gguf
from paged_runner import PagedRunner
from tiny_models import make_model
from torch import Tensor

from pyengine.layers.linear import Linear
from pyengine.layers.packed_weight import QuantizedGatedPanels, QuantizedPanels
from pyengine.layers.repacked_weight import RepackedGatedWeight, RepackedWeight
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.tokenizer import load_tokenizer

#: Rows of K blocks are multiples of 256.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("wide"), with_tokenizer=False, **SIZES)


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """[rows]: of softmax(other) from softmax(logits), both [rows, vocab]."""
    p, q = torch.log_softmax(logits.double(), -1), torch.log_softmax(other.double(), -1)
    return (p.exp() * (p - q)).sum(-1)


def check(path: Path) -> Any:
    """The quantised model's logits are close to the dequantised one's, and not the same; returns the quantised model."""
    quantised, exact = PagedRunner(path, quantization="gguf"), PagedRunner(path)
    batches = [{"a": ids(40), "b": ids(9, 1)}, {"a": ids(1, 2), "b": ids(1, 3)}]
    for batch in batches:
        got, expected = quantised.step(batch), exact.step(batch)
        for name in batch:
            assert 0 < (got[name] - expected[name]).norm() / expected[name].norm() < 0.1
    return quantised.model


def formats_of(linear: Linear) -> list[str | None]:
    return [part.format if isinstance(part, QuantizedPanels | QuantizedGatedPanels) else None for part in linear.parts]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind: str, wide_llama: Path, tmp_path: Path) -> None:
    model = check(write_gguf(tmp_path / "model.gguf", wide_llama, kind))
    layer = model.layers[0]
    for linear in (
        layer.self_attn.qkv_proj,
        layer.self_attn.o_proj,
        layer.mlp.gate_up_proj,
        layer.mlp.down_proj,
        model.lm_head,
    ):
        assert formats_of(linear) == [kind]


def test_projections_of_several_formats(wide_llama: Path, tmp_path: Path) -> None:
    """As llama.cpp's "K_M" mixtures have them; and a projection that is not quantised at all."""
    kinds = {"attn_v": "Q6_K", "ffn_up": "F16", "ffn_down": "Q5_K", "output.weight": "Q6_K", "blk.1.attn_q": "Q8_0"}
    model = check(write_gguf(tmp_path / "model.gguf", wide_llama, "Q4_K", kinds=kinds))
    first, second = model.layers
    assert formats_of(first.self_attn.qkv_proj) == ["Q4_K", "Q6_K"]
    assert formats_of(second.self_attn.qkv_proj) == ["Q8_0", "Q4_K", "Q6_K"]
    assert formats_of(first.mlp.gate_up_proj) == ["Q4_K", None]
    assert formats_of(first.mlp.down_proj) == ["Q5_K"]
    assert formats_of(model.lm_head) == ["Q6_K"]


def test_projections_that_share_a_panel(tmp_path: Path) -> None:
    """120 rows are seven panels and a half: keys and values meet in one."""
    sizes = {"head_dim": 120, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 96}
    folder = make_model(tmp_path / "hf", with_tokenizer=False, **sizes)
    model = check(write_gguf(tmp_path / "model.gguf", folder, "Q8_0"))
    assert formats_of(model.layers[0].self_attn.qkv_proj) == ["Q8_0"]


def test_biases(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", architecture="Qwen2ForCausalLM", with_tokenizer=False, use_sliding_window=False)
    check(write_gguf(tmp_path / "model.gguf", folder, "Q8_0", kinds={"attn_k": "Q5_1"}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_embeddings_stay_quantised(kind: str, tied: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", with_tokenizer=False, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", folder, kind)
    model = check(path)
    table = dict(open_checkpoint(str(path)).tensors())["model.embed_tokens.weight"]
    embed = model.lm_head.rows if tied else model._embedding
    assert torch.equal(embed(torch.arange(512)), table)
    assert tied or model._embedding.weight is None


def test_weights_are_kept_once(wide_llama: Path, tmp_path: Path) -> None:
    """Packed, they take what they take in the file, but for the padding of a panel."""
    path = write_gguf(tmp_path / "model.gguf", wide_llama, "Q4_1")
    model = PagedRunner(path, quantization="gguf").model
    linears = [model.lm_head, *(getattr(layer.mlp, name) for layer in model.layers for name in ("gate_up_proj", "down_proj"))]
    for linear in linears:
        (packed,) = linear.parts
        assert packed.data.numel() == linear.out_features * linear.in_features * 20 // 32
        assert not linear._waiting
        assert linear._weight is None


def check_repacked(path: Path) -> Any:
    """The repacked model's logits are about as close to the dequantised one's as those with 8-bit activations."""
    repacked, quantised, exact = (
        PagedRunner(path, quantization=scheme, repack=repack)
        for scheme, repack in (("gguf", True), ("gguf", False), (None, False))
    )
    for batch in ({"a": ids(40), "b": ids(9, 1)}, {"a": ids(1, 2), "b": ids(1, 3)}):
        got, blocks, expected = repacked.step(batch), quantised.step(batch), exact.step(batch)
        for name in batch:
            error = (got[name] - expected[name]).norm()
            assert 0 < error < min(3 * (blocks[name] - expected[name]).norm(), 0.1 * expected[name].norm())
    return repacked.model


def test_repacked_projections_become_one_product(wide_llama: Path, tmp_path: Path) -> None:
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "output.weight": "Q6_K", "blk.1.attn_q": "Q8_0"}
    model = check_repacked(write_gguf(tmp_path / "model.gguf", wide_llama, "Q4_K", kinds=kinds))
    for layer in model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
            (packed,) = linear._packed
            assert isinstance(packed, RepackedWeight)
        assert isinstance(layer.mlp.gate_up_proj._gated, RepackedGatedWeight)


@pytest.mark.parametrize(
    ("sizes", "fused"),
    [({"hidden_act": "gelu_pytorch_tanh"}, True), ({"hidden_act": "gelu"}, False)],
)
def test_repacked_gates(sizes: dict[str, Any], fused: bool, tmp_path: Path) -> None:
    """The product applies most activations; others are an op of their own."""
    folder = make_model(tmp_path / "hf", with_tokenizer=False, **sizes)
    runners = [PagedRunner(folder, quantization=scheme, repack=scheme is not None) for scheme in ("int8", None)]
    repacked, exact = (runner.step({"a": ids(20)})["a"] for runner in runners)
    assert 0 < (repacked - exact).norm() < 0.1 * exact.norm()
    assert (runners[0].model.layers[0].mlp.gate_up_proj._gated is not None) == fused


@pytest.mark.parametrize(
    ("sizes", "fused"),
    [({"hidden_act": "silu"}, True), ({"hidden_act": "gelu_pytorch_tanh"}, True), ({"hidden_act": "gelu"}, False)],
)
def test_quantised_gates(sizes: dict[str, Any], fused: bool, tmp_path: Path) -> None:
    """The product applies most activations; others are an op of their own."""
    folder = make_model(tmp_path / "hf", with_tokenizer=False, **sizes)
    runners = [PagedRunner(folder, quantization=scheme) for scheme in ("int8", None)]
    quantised, exact = (runner.step({"a": ids(20)})["a"] for runner in runners)
    assert 0 < (quantised - exact).norm() < 0.1 * exact.norm()
    assert (runners[0].model.layers[0].mlp.gate_up_proj._gated is not None) == fused


def test_repacked_projections_beside_a_plain_one(wide_llama: Path, tmp_path: Path) -> None:
    model = check_repacked(write_gguf(tmp_path / "model.gguf", wide_llama, "Q8_0", kinds={"attn_k": "F16"}))
    assert [type(packed) is RepackedWeight for packed in model.layers[0].self_attn.qkv_proj._packed] == [True, False, True]


def test_repacked_projections_that_share_a_panel(tmp_path: Path) -> None:
    sizes = {"head_dim": 120, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 96, "intermediate_size": 160}
    folder = make_model(tmp_path / "hf", with_tokenizer=False, **sizes)
    check_repacked(write_gguf(tmp_path / "model.gguf", folder, "Q8_0"))


@pytest.mark.parametrize("tied", [True, False])
def test_repacked_embeddings(tied: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", with_tokenizer=False, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", folder, "Q8_0")
    model = PagedRunner(path, quantization="gguf", repack=True).model
    table = dict(open_checkpoint(str(path)).tensors())["model.embed_tokens.weight"]
    embed = model.lm_head.rows if tied else model._embedding
    assert 0 < (embed(torch.arange(512)) - table).norm() < 0.01 * table.norm()


@pytest.mark.parametrize("repack", [False, True])
def test_batch_composition_does_not_change_a_bit(repack: bool, wide_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", wide_llama, "Q4_1", kinds={"attn_v": "Q6_K"})
    together, alone = (PagedRunner(path, quantization="gguf", repack=repack, kv_dtype="bfloat16") for _ in range(2))
    prompts = {str(i): ids(5 + 7 * i, i) for i in range(5)}
    mixed = together.step(prompts)
    for name, prompt in prompts.items():
        assert torch.equal(mixed[name], alone.step({name: prompt})[name])
    mixed = together.step({name: [7] for name in prompts})
    for name in prompts:
        assert torch.equal(mixed[name], alone.step({name: [7]})[name])


SAMPLE = """The ferry left the old harbour a little after seven, when the fog had lifted from the river and the first lorries
were already waiting on the other side. Nobody on board was in a hurry. The captain, a tall woman of about sixty, had made the
crossing more than twenty thousand times, and she could tell from the sound of the engine how much water there was beneath
the keel. Her only rule was that children might ring the bell, once each, and that they had to say where they were going.

In 1987 the town had 4,200 inhabitants, two schools and a factory that made bicycles. Today it has three museums and a hotel.
What happened in between is the subject of this report. We asked 312 people to describe, in their own words, what they miss
most. The most common answers were work (41%), neighbours (27%) and the noise of the evening train (9%).

def crossing_time(distance, speed, current=0.0):
    if speed <= abs(current):
        raise ValueError("the ferry is slower than the river")
    return distance / (speed - current)

Question: If the ferry makes twelve crossings a day, and each of them takes a quarter of an hour, how long is it at sea?
Answer: It is at sea for three hours, because twelve times fifteen minutes is one hundred and eighty minutes."""


def test_default_model_keeps_its_distributions(smollm2_path: Path) -> None:
    """8-bit activations and a bfloat16 cache against fp32: mean KL below 0.01 and perplexity within 1%."""
    token_ids = load_tokenizer(open_checkpoint(None))(SAMPLE).input_ids
    assert len(token_ids) > 300
    exact = PagedRunner(smollm2_path).step({"a": token_ids})["a"]
    quantised = PagedRunner(smollm2_path, quantization="gguf", kv_dtype="bfloat16").step({"a": token_ids})["a"]
    assert kl_divergence(exact, quantised).mean() < 0.01
    targets = torch.tensor(token_ids[1:])
    losses = [torch.nn.functional.cross_entropy(logits[:-1], targets) for logits in (exact, quantised)]
    assert abs(losses[1] - losses[0]) < 0.01
    assert (exact.argmax(-1) == quantised.argmax(-1)).float().mean() > 0.93
