"""Writes GGUF files from Hugging Face folders, with the `gguf` package's own writer and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_blocks import quantize_blocks
from safetensors.torch import load_file

_ARCHS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}


def pairs_from_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of Llama's query and key rows: the two of a rotary pair side by side."""
    shape = (num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """`tokenizer.*` keys of a byte-level BPE folder."""
    model = json.loads((folder / "tokenizer.json").read_text())
    vocab = model["model"]["vocab"]
    special = {token["id"] for token in model["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(control if i in special else normal) for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
        "tokenizer.ggml.eot_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": vocab["</s>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def write_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Convert a folder to one GGUF file.

    Args:
        path: the file to write.
        folder: a Llama-like checkpoint with a byte-level BPE tokenizer.
        kind: type of the matrices; vectors stay F32.
        kinds: another type for matrices whose GGUF name has the key in it.
        metadata: keys to add or replace; None as a value leaves the key out.
        tensors: F32 tensors to add, by GGUF name.
        drop: GGUF names of tensors to leave out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = _ARCHS[config["architectures"][0]]
    values = {f"{arch}.{key}": config[name] for key, name in _FIELDS.items()}
    values[f"{arch}.attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    values[f"{arch}.rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    if (folder / "tokenizer.json").exists():
        values |= tokenizer_metadata(folder)
    values |= metadata or {}
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, {key: value for key, value in values.items() if value is not None})
    model_arch = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(model_arch, config["num_hidden_layers"])
    for hf_name, tensor in load_file(folder / "model.safetensors").items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name in drop:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and "q_proj" in hf_name:
            data = pairs_from_halves(data, config["num_attention_heads"])
        elif arch == "llama" and "k_proj" in hf_name:
            data = pairs_from_halves(data, config["num_key_value_heads"])
        own_kind = next((other for part, other in (kinds or {}).items() if part in name), kind)
        if data.ndim == 1 or own_kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(data))
        else:
            writer.add_tensor(name, quantize_blocks(data, own_kind), raw_dtype=gguf.GGMLQuantizationType[own_kind])
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
