"""GGUF files: every element type, the rotary order of queries and keys, the configuration in the metadata."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from gguf_files import write_gguf
from safetensors.torch import load_file
from tiny_models import BOS_ID, EOS_ID, IM_END_ID, make_model
from transformers import AutoModelForCausalLM

from pyengine.layers.rotary_embedding import scaled_frequencies
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.gguf_file import GGUFFile

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a matrix after a round trip through the type, by the `gguf` package itself."""
    if tensor.ndim == 1 or kind == "F32":
        return tensor
    quantisation = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(tensor.numpy(), quantisation), quantisation))


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_of_every_type(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", tiny_llama, kind)))
    expected = load_file(tiny_llama / "model.safetensors")
    got = dict(checkpoint.tensors())
    assert got.keys() == expected.keys() == checkpoint.tensor_infos.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name].float(), rounded(tensor, kind)), name
        assert checkpoint.tensor_infos[name].shape == tuple(tensor.shape)
    assert checkpoint.format == "gguf"
    assert checkpoint.arch.quantization == ("gguf" if kind.startswith("Q") else None)
    assert checkpoint.arch.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_tensors_equal_transformers_own_gguf_loading(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = dict(open_checkpoint(str(path)).tensors())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor), name


def test_arch_from_metadata_equals_arch_from_config(tiny_llama: Path, tmp_path: Path) -> None:
    ours = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", tiny_llama))).arch
    theirs = open_checkpoint(str(tiny_llama)).arch
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)  # fp32 in GGUF
    assert ours == theirs.__class__(**{**theirs.__dict__, "rms_norm_eps": ours.rms_norm_eps})
    assert ours.eos_token_ids == (EOS_ID, IM_END_ID)
    assert ours.bos_token_id == BOS_ID


def test_tied_output_and_missing_optional_keys(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", tie_word_embeddings=True, num_key_value_heads=4, hidden_size=128)
    optional = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size", "rope.freq_base")
    missing = {f"llama.{key}": None for key in (*optional, "rope.dimension_count")}
    arch = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", folder, metadata=missing))).arch
    assert arch.tie_word_embeddings
    assert (arch.num_kv_heads, arch.head_dim, arch.vocab_size, arch.rope_theta) == (4, 32, 512, 10000.0)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_keeps_its_rows_in_order(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", architecture=architecture)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", folder)))
    expected = load_file(folder / "model.safetensors")
    got = dict(checkpoint.tensors())
    assert checkpoint.arch.architecture == architecture
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_rope_frequency_factors_give_llama3_scaling(tiny_llama: Path, tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, _ = scaled_frequencies(32, 1024, 10000.0, None)
    scaled, _ = scaled_frequencies(32, 1024, 10000.0, llama3)
    path = write_gguf(tmp_path / "model.gguf", tiny_llama, tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    checkpoint = open_checkpoint(str(path))
    assert not any("rope" in name for name in checkpoint.tensor_infos)
    got, _ = scaled_frequencies(32, 1024, 10000.0, checkpoint.arch.rope_scaling)
    torch.testing.assert_close(got, scaled)


def test_rope_scaling_keys(tiny_llama: Path, tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 256,
    }
    arch = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", tiny_llama, metadata=keys))).arch
    assert arch.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def test_header_reader_agrees_with_the_gguf_package(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama, "Q4_1")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type_id == tensor.tensor_type
        assert ours.data_offset + mine.offset == tensor.data_offset
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        is_strings = field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
        value = ours.strings(key) if is_strings else ours.get(key)
        assert (list(value) if isinstance(value, tuple) else value) == field.contents(), key


def test_default_model(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(None)
    arch = checkpoint.arch
    assert checkpoint.path == smollm2_path
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (30, 9, 3, 64)
    assert (arch.hidden_size, arch.vocab_size, arch.max_position_embeddings) == (576, 49152, 8192)
    assert arch.tie_word_embeddings
    assert arch.eos_token_ids == (2,)
    name, tensor = next(checkpoint.tensors())
    assert checkpoint.tensor_infos[name].shape == tuple(tensor.shape)
    assert tensor.isfinite().all()
