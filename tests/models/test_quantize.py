"""`--quantization int8` and `int4`: the blocks made from plain weights, the models that run them, and what is refused when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_blocks import dequantize_blocks, quantize_blocks
from gguf_files import write_gguf
from paged_runner import PagedRunner
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor

from pyengine import LLM, SamplingParams
from pyengine.config import LoadConfig
from pyengine.errors import ConfigError, ModelLoadError
from pyengine.loader import tokenizer as tokenizer_module
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.quantize import quantize
from pyengine.loader.weights import load_model
from pyengine.ops import get_ops

WEIGHTS = "model.safetensors"
MATRIX = "model.layers.0.mlp.up_proj.weight"


def random_weight(rows: int, columns: int, seed: int = 0, outliers: float = 0.0) -> Tensor:
    """Normal values whose rows differ in size; some are much larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10 ** (3 * torch.rand(rows, 1, generator=generator) - 3)
    return weight * torch.where(torch.rand(rows, columns, generator=generator) < outliers, 20.0, 1.0)


def dequantized(weight: Tensor, scheme: str, name: str = MATRIX) -> Tensor:
    blocks = quantize(name, weight, scheme)
    assert blocks.shape == tuple(weight.shape)
    return dequantize_blocks(blocks.blocks, blocks.format)


def test_int8_rounds_as_documented() -> None:
    weight = random_weight(40, 96, outliers=0.02)
    x = weight.numpy().reshape(40, 3, 32)
    scale = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    expected = np.clip(np.rint(x / scale), -127, 127) * scale
    assert torch.equal(dequantized(weight, "int8"), torch.from_numpy(expected.reshape(40, 96)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_error_is_half_a_step(dtype: torch.dtype) -> None:
    weight = random_weight(64, 64).to(dtype)
    largest = weight.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (dequantized(weight, "int8") - weight.float()).unflatten(1, (-1, 32)).abs()
    # Half a step, and the rounding of the scale to fp16, which is coarser for tiny ones.
    assert (error <= largest / 127 * 0.5 + largest * 2**-11 + 127 * 2**-25).all()


@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_int4_is_closer_than_an_even_division_of_the_range(outliers: float) -> None:
    weight = random_weight(200, 128, outliers=outliers)
    even = dequantize_blocks(torch.from_numpy(quantize_blocks(weight.numpy(), "Q4_1")), "Q4_1")
    ours, theirs = ((values - weight).unflatten(1, (-1, 32)).square().sum(-1) for values in (dequantized(weight, "int4"), even))
    assert (ours.sum(1) < theirs.sum(1) * 1.05).all()
    assert ours.sum() < 0.95 * theirs.sum()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_what_blocks_can_hold_is_kept(scheme: str) -> None:
    """Quantising again what has been quantised changes next to nothing; 16 even steps, one value and zeros stay exact."""
    weight = random_weight(64, 64)
    once = dequantized(weight, scheme)
    twice = dequantized(once, scheme)
    assert (twice - once).norm() <= 2e-3 * once.norm()
    exact = {
        "int8": (torch.arange(32) * 8.0 - 127).repeat(2, 1) / 32,  # 127 steps of 1/32 to the largest
        "int4": (torch.arange(32) % 16).repeat(2, 1) * 0.25 - 1.0,
    }
    for values in (exact[scheme], torch.zeros(3, 32), *([torch.full((3, 32), 0.3)] if scheme == "int4" else [])):
        torch.testing.assert_close(dequantized(values, scheme), values, rtol=1e-3, atol=0)


def test_long_rows_and_many_of_them_are_cut_and_joined() -> None:
    """More values than are worked on at a time; and each row is quantised on its own."""
    weight = random_weight(300, 4096)
    whole = quantize(MATRIX, weight, "int8").blocks
    for row in (0, 63, 64, 127, 128, 299):
        assert torch.equal(whole[row : row + 1], quantize(MATRIX, weight[row : row + 1], "int8").blocks)


def test_tiny_values_become_zero() -> None:
    assert not dequantized(torch.full((2, 32), 1e-10), "int8").any()
    assert dequantized(torch.full((2, 32), 1e-10), "int4").abs().max() < 1e-7


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
def test_values_without_a_scale_are_refused(bad: float, scheme: str) -> None:
    weight = random_weight(4, 64)
    weight[2, 40] = bad
    with pytest.raises(ModelLoadError, match=f"{MATRIX} holds NaN, an infinity or values too large for {scheme}"):
        quantize(MATRIX, weight, scheme)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", MATRIX])
def test_embeddings_and_output_have_8_bits(name: str) -> None:
    assert quantize(name, random_weight(4, 64), "int8").format == "Q8_0"
    assert quantize(name, random_weight(4, 64), "int4").format == ("Q4_1" if name == MATRIX else "Q8_0")


def dequantized_copy(folder: Path, scheme: str, target: Path) -> Path:
    """A checkpoint of what is left of the weights."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / WEIGHTS)
    save_file(
        {name: dequantized(tensor, scheme, name) if tensor.ndim == 2 else tensor for name, tensor in weights.items()},
        target / WEIGHTS,
        metadata={"format": "pt"},
    )
    return target


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("variant", ["tied", "untied", "biases"])
def test_logits_are_close_to_those_of_the_dequantised_model(scheme: str, variant: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"tie_word_embeddings": variant == "tied"}
    if variant == "biases":
        config |= {"architecture": "Qwen2ForCausalLM", "use_sliding_window": False}
    folder = make_model(tmp_path / "model", with_tokenizer=False, **config)
    runner = PagedRunner(folder, quantization=scheme)
    exact = PagedRunner(dequantized_copy(folder, scheme, tmp_path / "dequantised"))
    generator = torch.Generator().manual_seed(0)
    for lengths in ((40, 9), (1, 1)):
        batch = {str(i): torch.randint(0, 500, (n,), generator=generator).tolist() for i, n in enumerate(lengths)}
        got, expected = runner.step(batch), exact.step(batch)
        for name in batch:
            # Apart from it only by the activations' 8 bits.
            assert 0 < (got[name] - expected[name]).norm() / expected[name].norm() < 0.1
    layer = runner.model.layers[0]
    assert [packed.format for packed in layer.mlp.down_proj._packed] == ["Q4_1" if scheme == "int4" else "Q8_0"]
    assert [packed.format for packed in runner.model.lm_head._packed] == ["Q8_0"]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_tokens_do_not_depend_on_the_batch(scheme: str, tiny_llama: Path) -> None:
    prompts = [{"prompt_token_ids": list(range(5, 12 + 9 * i))} for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    batching: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 32}
    with LLM(str(tiny_llama), device="cpu", quantization=scheme, max_model_len=256, **batching) as llm:
        config = llm.llm_engine.config
        assert (config.model.quantization, config.cache.kv_cache_dtype) == (scheme, "bfloat16")
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_plain_gguf_weights_may_be_quantised(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama, "F16")
    model = PagedRunner(path, quantization="int8").model
    assert [packed.format for packed in model.lm_head._packed] == ["Q8_0"]


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, with_tokenizer=False, hidden_size=80, intermediate_size=96)
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS}: tensor \S+ has rows of 80 values, but int8 takes multiples of 32"):
        PagedRunner(folder, quantization="int8")


@pytest.mark.parametrize(
    ("kind", "scheme", "error", "message"),
    [
        ("F32", "marlin", ConfigError, "'marlin' is not supported; supported: none, gguf, int8, int4"),
        (None, "awq", ConfigError, "awq was asked for, but the checkpoint's is none"),
        (None, "gguf", ModelLoadError, "quantization 'gguf' was asked for, but the checkpoint's is none"),
        ("Q8_0", "int4", ConfigError, "int4 is made from plain weights, but the checkpoint's are gguf"),
    ],
)
def test_what_cannot_be_is_refused_before_the_tokenizer_is_read(
    kind: str | None, scheme: str, error: type[Exception], message: str, tiny_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("the tokenizer was read")

    monkeypatch.setattr(tokenizer_module, "load_tokenizer", fail)
    path = tiny_llama if kind is None else write_gguf(tmp_path / "model.gguf", tiny_llama, kind)
    with pytest.raises(error, match=message):
        LLM(str(path), device="cpu", quantization=scheme)


def test_threads_change_nothing(tiny_llama: Path) -> None:
    """Tensors are quantised by several threads, and arrive where they belong; torch's own threads are as before."""
    before = torch.get_num_threads()
    checkpoint, weights = open_checkpoint(str(tiny_llama)), load_file(tiny_llama / WEIGHTS)
    for num_threads in (1, 3):
        config = LoadConfig(device="cpu", dtype="float32", quantization="int8", num_threads=num_threads)
        model: Any = load_model(checkpoint, config, get_ops("cpu"))
        for index, layer in enumerate(model.layers):
            down = weights[f"model.layers.{index}.mlp.down_proj.weight"]
            assert torch.equal(layer.mlp.down_proj.rows(torch.arange(len(down))), dequantized(down, "int8"))
    assert torch.get_num_threads() == before


def test_a_wrong_value_in_a_checkpoint_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = dequantized_copy(tiny_llama, "int8", tmp_path / "model")
    weights = load_file(folder / WEIGHTS)
    weights[MATRIX][3, 5] = float("nan")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    before = torch.get_num_threads()
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS}: tensor {MATRIX} holds NaN"):
        PagedRunner(folder, quantization="int4")
    assert torch.get_num_threads() == before
