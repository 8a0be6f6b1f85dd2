"""Quantised Hugging Face folders: logits against Transformers in fp32 on the values that the files mean, on every device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_blocks import dequantize_blocks
from paged_runner import PagedRunner
from quantized_folders import FORMATS, PROJECTIONS, WEIGHTS, write_quantized
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from pyengine.errors import ModelLoadError
from pyengine.layers.checkpoint_linear import CheckpointLinear, DenseLinear
from pyengine.layers.linear import Linear
from pyengine.layers.weights import CheckpointWeight
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.checkpoint_blocks import to_blocks
from pyengine.ops import get_ops

SIZES = {"intermediate_size": 192}
IDS = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(3)).tolist()
#: Relative errors of logits. Plain: fp32's rounding alone. Blocks: the input of each product is rounded to int8 (about 5% in a
#: random model), and values of FP8 and act order once more. Emulated: fp16, and INT8's inputs as well rounded to int8.
PLAIN, BLOCKS, EMULATED, EMULATED_INT8 = 1e-5, 0.1, 0.01, 0.1
#: Where weights stay as they are.
GPUS = ["emulated", "cuda"] if torch.cuda.is_available() else ["emulated"]
#: What matrices become on CPUs.
BLOCK_FORMATS = {"gptq-sym": "Q4_0", "packed": "Q4_0", "packed-rows": "Q4_0"} | dict.fromkeys(
    ("gptq-act-order", "packed-act-order", "fp8", "fp8-channel", "int8", "int8-tensor"), "Q8_0"
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@torch.inference_mode()
def transformers_logits(path: Path) -> Tensor:
    """fp32 [len(IDS), vocab]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([IDS])).logits[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain") / "llama", with_tokenizer=False, **SIZES)


@pytest.fixture(scope="module", params=FORMATS)
def case(request: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tensor]:
    """A format, a folder in it, and the logits of what it means."""
    folder = tmp_path_factory.mktemp(request.param)
    write_quantized(llama, FORMATS[request.param], folder / "quantised", folder / "plain")
    return request.param, folder / "quantised", transformers_logits(folder / "plain")


def method(name: str) -> str:
    return FORMATS[name].config["quant_method"]


def error(runner: PagedRunner, expected: Tensor) -> float:
    """Of a prompt in two steps, and a token."""
    got = torch.cat([runner.step({"a": part})["a"] for part in (IDS[:25], IDS[25:39], IDS[39:])])
    return ((got - expected).norm() / expected.norm()).item()


def run(folder: Path, name: str, device: str) -> PagedRunner:
    return PagedRunner(folder, device, "float32" if device == "cpu" else "float16", quantization=method(name))


def allowed(name: str, device: str) -> float:
    if device == "cpu":
        return BLOCKS
    return EMULATED_INT8 if name.startswith("int8") else EMULATED


def test_dequantised(case: tuple[str, Path, Tensor]) -> None:
    """--quantization none."""
    _, folder, expected = case
    assert error(PagedRunner(folder), expected) < PLAIN


def test_on_cpus(case: tuple[str, Path, Tensor]) -> None:
    name, folder, expected = case
    runner = PagedRunner(folder, quantization=method(name), max_replayed_tokens=64)
    assert 0 < error(runner, expected) < BLOCKS
    layer = runner.model.layers[0]
    for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        assert [part.format for part in linear.parts] == [BLOCK_FORMATS.get(name, "Q4_1")]


@pytest.mark.parametrize("device", GPUS)
def test_on_gpus(device: str, case: tuple[str, Path, Tensor]) -> None:
    """Weights stay as the files have them, and projections of one input are one product."""
    name, folder, expected = case
    runner = run(folder, name, device)
    assert 0 < error(runner, expected) < allowed(name, device)
    layer = runner.model.layers[0]
    for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        (product,) = linear._packed
        assert isinstance(product, CheckpointLinear)
        assert product.weight.nbytes == linear.in_features * linear.out_features * (4 if product.zeros is not None else 8) // 8


def test_what_blocks_hold(case: tuple[str, Path, Tensor]) -> None:
    """The values of the file: exactly, but for a factor in fp16, or to a 254th of a block's largest."""
    name, folder, _ = case
    meant = load_file(folder.parent / "plain" / WEIGHTS)
    for tensor, weight in open_checkpoint(str(folder)).tensors(quantized=True):
        if isinstance(weight, CheckpointWeight):
            blocks = to_blocks(tensor, weight)
            values, difference = meant[tensor], dequantize_blocks(blocks.blocks, blocks.format) - meant[tensor]
            if blocks.format == "Q4_0":
                assert not difference.any()
            elif blocks.format == "Q4_1":  # the minimum of a block is up to 16 steps
                assert difference.abs().max() <= 16 * weight.scales.max() * 2**-11
            else:
                largest = values.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
                share = 2**-11 if name.startswith("int8") else 1 / 254 + 2**-11
                assert (difference.unflatten(1, (-1, 32)).abs() <= 1.001 * share * largest).all()


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "fp8", "int8"])
def test_logits_do_not_depend_on_the_batch(name: str, llama: Path, tmp_path: Path) -> None:
    write_quantized(llama, FORMATS[name], tmp_path / "quantised", tmp_path / "plain")
    together, alone = (run(tmp_path / "quantised", name, "emulated") for _ in range(2))
    both = together.step({"a": IDS[:9], "b": IDS[:30]})
    assert torch.equal(alone.step({"a": IDS[:9]})["a"], both["a"])
    assert torch.equal(torch.cat([alone.step({"b": part})["b"] for part in (IDS[:17], IDS[17:30])]), both["b"])


# ---- mixtures, names, biases


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a folder in place."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_modules_that_stay_plain(device: str, llama: Path, tmp_path: Path) -> None:
    """By part of a name, and by expression; beside quantised ones of the same input too."""
    for name, key, names in (
        ("awq", "modules_to_not_convert", ["v_proj", "model.layers.1.mlp"]),
        ("int8", "ignore", ["re:.*v_proj$", "re:model.layers.1.mlp.*", "lm_head"]),
    ):
        form = replace(FORMATS[name], config=FORMATS[name].config | {key: names})
        folder, plain = tmp_path / name, tmp_path / f"{name}-plain"
        write_quantized(llama, form, folder, plain, keep=("lm_head", "v_proj", "model.layers.1.mlp"))
        runner = run(folder, name, device)
        assert error(runner, transformers_logits(plain)) < allowed(name, device)
        first, second = runner.model.layers[:2]
        assert [len(linear.parts) for linear in (first.self_attn.qkv_proj, first.mlp.gate_up_proj)] == [2, 1]
        assert not isinstance(second.mlp.down_proj._packed[0], CheckpointLinear)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_quantised_output_projection(device: str, llama: Path, tmp_path: Path) -> None:
    form = replace(FORMATS["gptq"], config=FORMATS["gptq"].config | {"lm_head": True})
    write_quantized(llama, form, tmp_path / "quantised", tmp_path / "plain", keep=("nothing",))
    assert error(run(tmp_path / "quantised", "gptq", device), transformers_logits(tmp_path / "plain")) < allowed("gptq", device)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", ["gptq-act-order", "fp8", "int8"])
def test_biases(name: str, device: str, tmp_path: Path) -> None:
    """Qwen2's; and biases of zeros, which some tools give to projections that have none, are passed over."""
    folder = tmp_path / "quantised"
    source = make_model(
        tmp_path / "source", architecture="Qwen2ForCausalLM", with_tokenizer=False, use_sliding_window=False, **SIZES
    )
    write_quantized(source, FORMATS[name], folder, tmp_path / "plain")
    bias = "model.layers.1.self_attn.o_proj.bias"
    rewrite(folder, lambda tensors: tensors.update({bias: torch.zeros(64)}))
    assert error(run(folder, name, device), transformers_logits(tmp_path / "plain")) < allowed(name, device)
    rewrite(folder, lambda tensors: tensors.update({bias: torch.full((64,), 0.5)}))
    with pytest.raises(ModelLoadError, match=f"tensor {bias} is not zero"):
        run(folder, name, device)


def test_projections_whose_groups_differ(llama: Path, tmp_path: Path) -> None:
    """Act order of another matrix's own: no common product."""
    write_quantized(llama, FORMATS["gptq-act-order"], tmp_path / "quantised", tmp_path / "plain")
    k_proj = "model.layers.0.self_attn.k_proj"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{k_proj}.g_idx"] = (torch.arange(64) // 32).int()

    rewrite(tmp_path / "quantised", change)
    runner = run(tmp_path / "quantised", "gptq", "emulated")
    assert len(runner.model.layers[0].self_attn.qkv_proj._packed) == 3
    expected = PagedRunner(tmp_path / "quantised").step({"a": IDS})["a"]
    assert error(runner, expected) < EMULATED


def test_parts_in_several_files(llama: Path, tmp_path: Path) -> None:
    write_quantized(llama, FORMATS["awq"], tmp_path / "quantised", tmp_path / "plain")
    folder = tmp_path / "quantised"
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: f"model-{len(name) % 3}.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    assert error(PagedRunner(folder), transformers_logits(tmp_path / "plain")) < PLAIN


def test_scales_of_one_value_and_static_inputs(llama: Path, tmp_path: Path) -> None:
    """FP8 as vLLM and compressed-tensors write it for static inputs: the inputs' scale has no use."""
    config = FORMATS["fp8"].config | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}
    write_quantized(llama, replace(FORMATS["fp8"], config=config), tmp_path / "quantised", tmp_path / "plain")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].reshape(())
            tensors[name.replace("weight_scale", "input_scale")] = torch.ones(1)

    rewrite(tmp_path / "quantised", change)
    expected = transformers_logits(tmp_path / "plain")
    assert error(PagedRunner(tmp_path / "quantised"), expected) < PLAIN
    assert error(run(tmp_path / "quantised", "fp8", "emulated"), expected) < EMULATED


@pytest.mark.parametrize(("name", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_older_files(name: str, file: str, llama: Path, tmp_path: Path) -> None:
    write_quantized(llama, FORMATS[name], tmp_path / "quantised", tmp_path / "plain")
    edit_config(tmp_path / "quantised", quantization_config=None)
    config = {key: value for key, value in FORMATS[name].config.items() if key != "quant_method"}
    if name == "awq":
        config = {"w_bit": config["bits"], "q_group_size": config["group_size"], "zero_point": True, "version": "GEMM"}
    (tmp_path / "quantised" / file).write_text(json.dumps(config))
    assert open_checkpoint(str(tmp_path / "quantised")).arch.quantization == name
    assert error(PagedRunner(tmp_path / "quantised"), transformers_logits(tmp_path / "plain")) < PLAIN


def test_modules_in_block_to_quantize(llama: Path, tmp_path: Path) -> None:
    some = [name for name in PROJECTIONS if name != "down_proj"]
    config = FORMATS["gptq"].config | {"modules_in_block_to_quantize": [some[:4], some[4:]]}
    form = replace(FORMATS["gptq"], config=config)
    write_quantized(llama, form, tmp_path / "quantised", tmp_path / "plain", keep=("lm_head", "down_proj"))
    assert error(PagedRunner(tmp_path / "quantised"), transformers_logits(tmp_path / "plain")) < PLAIN


def test_what_a_gpus_layer_keeps() -> None:
    """On torch's meta device, which has shapes and no values: plain projections are one matrix, quantised ones another part."""
    weight = CheckpointWeight(
        "fp8", torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(16), zeros=None, group_size=0, order=None, shape=(16, 32)
    )
    meta = {"ops": get_ops("emulated"), "dtype": torch.float16, "device": torch.device("meta")}
    x = torch.empty(3, 32, dtype=torch.float16, device="meta")
    for weights, kinds in (
        ([torch.ones(16, 32), torch.ones(16, 32)], []),
        ([torch.ones(16, 32), weight], [DenseLinear, CheckpointLinear]),
        ([weight, weight], [CheckpointLinear]),
    ):
        linear = Linear(32, (16, 16), bias=True, **meta)
        for slot, loaded in zip(linear.weight_slots(["a", "b"]), [w for part in weights for w in (part, None)], strict=True):
            slot.load(torch.ones(16) if loaded is None else loaded)
        assert [type(part) for part in linear._packed] == kinds
        assert (linear._weight is not None) == (not kinds)
        for dtype in (torch.float16, torch.float32):
            out = linear(x, dtype)
            assert (out.shape, out.dtype, out.device.type) == ((3, 32), dtype, "meta")


def test_a_plain_part_of_a_product() -> None:
    weights = [torch.randn(8, 16), torch.randn(24, 16)]
    x, bias, out = torch.randn(3, 16), torch.randn(32), torch.zeros(3, 40)
    DenseLinear(weights, dtype=torch.float32, device=torch.device("cpu")).multiply(out[:, 8:], x, bias)
    torch.testing.assert_close(out[:, 8:], x @ torch.cat(weights).T + bias)
    assert not out[:, :8].any()
