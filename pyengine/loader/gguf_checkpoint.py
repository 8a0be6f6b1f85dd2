"""A GGUF file as a checkpoint: its metadata as a `ModelArchConfig`, its tensors under Hugging Face's names.

Keys and tensor names are those of ggml's `docs/gguf.md`. The `gguf` package knows the block formats, and dequantises them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyengine.config import DType, ModelArchConfig
from pyengine.errors import ModelLoadError
from pyengine.layers.packed_weight import FORMATS
from pyengine.layers.weights import QuantizedTensor, Weight
from pyengine.loader.base import Checkpoint, TensorInfo
from pyengine.loader.gguf_file import GGUFFile, GGUFTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TENSOR_TYPES = ("F32", "F16", "BF16", *FORMATS)
_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # part of the rotary embedding's definition, not a weight
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GGUFCheckpoint(Checkpoint):
    """A single GGUF file.

    Raises:
        ModelLoadError: one line naming the file, and the key, tensor or type that is wrong or not supported.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.format = name, path, "gguf"
        self.file = GGUFFile(path)
        if self.file.get("split.count", 1) > 1:
            raise ModelLoadError(f"{path}: one part of a split GGUF; merge the parts into one file first")
        self._types = {tensor.name: self._type_of(tensor) for tensor in self.file.tensors.values()}
        self.arch = self._read_arch()
        # llama.cpp stores Llama's query and key rows so that rotary pairs are neighbours; the other families keep halves.
        self._pairs_adjacent = self.file.get("general.architecture") == "llama"
        self._names = {name: self._hf_name(name) for name in self.file.tensors if name != _ROPE_FACTORS}
        self.tensor_infos = {
            hf_name: TensorInfo(self.file.tensors[name].shape, self._types[name].name, path)
            for name, hf_name in self._names.items()
        }

    def tensors(self, *, quantized: bool = False) -> Iterator[tuple[str, Weight]]:
        data = self._map()
        for name, hf_name in self._names.items():
            tensor = self.file.tensors[name]
            num_heads = 0
            if self._pairs_adjacent and ".self_attn.q_proj." in hf_name:
                num_heads = self.arch.num_heads
            elif self._pairs_adjacent and ".self_attn.k_proj." in hf_name:
                num_heads = self.arch.num_kv_heads
            if quantized and len(tensor.shape) == 2 and self._types[name].name in FORMATS:
                yield hf_name, self._read_blocks(data, tensor, num_heads)
            else:
                values = self._read(data, tensor)
                yield hf_name, _halves_from_pairs(values, num_heads) if num_heads else values

    def _map(self) -> np.ndarray:
        # Copy-on-write, which torch wants of a buffer it may view; nothing is written, so nothing is copied.
        return np.memmap(self.path, dtype=np.uint8, mode="c")

    def _raw(self, data: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes."""
        start = self.file.data_offset + tensor.offset
        return data[start : start + self._num_bytes(tensor)]

    def _read_blocks(self, data: np.ndarray, tensor: GGUFTensor, num_heads: int) -> QuantizedTensor:
        """A matrix as it is, its rows reordered where `num_heads` is not 0 (see `_halves_from_pairs`)."""
        rows = self._raw(data, tensor).reshape(tensor.shape[0], -1)  # [out, row bytes]
        if num_heads:
            rows = rows.take(_halves_from_pairs(torch.arange(len(rows)), num_heads).numpy(), axis=0)
        return QuantizedTensor(torch.from_numpy(rows), self._types[tensor.name].name, (tensor.shape[0], tensor.shape[1]))

    def _read(self, data: np.ndarray, tensor: GGUFTensor) -> Tensor:
        """The tensor's values, in its own type or, where that is quantised, fp32."""
        from gguf.quants import dequantize

        raw = self._raw(data, tensor)
        kind = self._types[tensor.name]
        if kind.name in _TORCH_DTYPES:
            values = torch.from_numpy(raw).view(_TORCH_DTYPES[kind.name])
        else:
            values = torch.from_numpy(dequantize(raw, kind))
        return values.view(tensor.shape)

    def _type_of(self, tensor: GGUFTensor) -> GGMLQuantizationType:
        """The tensor's element type, after a check that it is supported and lies inside the file."""
        gguf = import_gguf()
        where = f"{self.path}: tensor {tensor.name}"
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
        except ValueError:
            raise ModelLoadError(f"{where} has unknown type number {tensor.type_id}") from None
        if kind.name not in _TENSOR_TYPES:
            raise ModelLoadError(f"{where} has type {kind.name}, which is not supported; supported: {', '.join(_TENSOR_TYPES)}")
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if not tensor.shape or tensor.shape[-1] % block:
            raise ModelLoadError(f"{where}: rows of shape {list(tensor.shape)} are no multiple of {kind.name}'s {block} values")
        end = self.file.data_offset + tensor.offset + self._num_bytes(tensor)
        if end > self.file.size:
            raise ModelLoadError(f"{where} ends at byte {end}, but the file has {self.file.size} (truncated?)")
        return kind

    def _num_bytes(self, tensor: GGUFTensor) -> int:
        block, block_bytes = import_gguf().GGML_QUANT_SIZES[tensor.type_id]
        return int(np.prod(tensor.shape, dtype=object)) // block * block_bytes

    def _hf_name(self, name: str) -> str:
        if match := _LAYER_TENSOR.fullmatch(name):
            layer, kind, suffix = match.groups()
            if kind in _LAYER_NAMES:
                return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
        stem, _, suffix = name.rpartition(".")
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{suffix}"
        raise ModelLoadError(f"{self.path}: tensor {name} does not belong to the {self.arch.architecture} architecture")

    def _read_arch(self) -> ModelArchConfig:
        file, prefix = self.file, self.file.get("general.architecture")
        if prefix not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelLoadError(f"{self.path}: architecture {prefix!r} is not supported; supported: {known}")
        if file.get(f"{prefix}.expert_count", 0):
            raise ModelLoadError(f"{self.path}: {prefix} with experts ({prefix}.expert_count) is not supported")
        num_heads = self._positive(f"{prefix}.attention.head_count")
        hidden_size = self._positive(f"{prefix}.embedding_length")
        head_dim = self._positive(f"{prefix}.attention.key_length", hidden_size // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._positive(f"{prefix}.{key}", head_dim) != head_dim:
                raise ModelLoadError(f"{self.path}: {prefix}.{key} other than the head size {head_dim} is not supported")
        vocab_key = f"{prefix}.vocab_size"
        num_tokens = file.length("tokenizer.ggml.tokens") if "tokenizer.ggml.tokens" in file else None
        ids = (file.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
        return ModelArchConfig(
            architecture=_ARCHITECTURES[prefix],
            vocab_size=self._positive(vocab_key, num_tokens),
            hidden_size=hidden_size,
            intermediate_size=self._positive(f"{prefix}.feed_forward_length"),
            num_layers=self._positive(f"{prefix}.block_count"),
            num_heads=num_heads,
            num_kv_heads=self._positive(f"{prefix}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=self._positive(f"{prefix}.context_length"),
            rms_norm_eps=self._number(f"{prefix}.attention.layer_norm_rms_epsilon"),
            rope_theta=self._number(f"{prefix}.rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(prefix),
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            sliding_window=file.get(f"{prefix}.attention.sliding_window") or None,
            dtype=self._weights_dtype(),
            quantization="gguf" if any(kind.name not in _DTYPES for kind in self._types.values()) else None,
            bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None)),
        )

    def _positive(self, key: str, default: int | None = None) -> int:
        value = self.file.get(key, default)
        if isinstance(value, tuple) and len(set(value)) == 1:  # one value for each layer
            value = value[0]
        if not isinstance(value, int) or value < 1:
            problem = "is missing" if value is None else f"is {value!r}, not a positive integer"
            raise ModelLoadError(f"{self.path}: key {key} {problem}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.file.get(key, default)
        if not isinstance(value, int | float):
            raise ModelLoadError(f"{self.path}: key {key} {'is missing' if value is None else 'is not a number'}")
        return float(value)

    def _rope_scaling(self, prefix: str) -> dict[str, Any] | None:
        if (factors := self.file.tensors.get(_ROPE_FACTORS)) is not None:  # Llama 3's scaling, one divisor a frequency
            return {"rope_type": "frequency_factors", "factors": self._read(self._map(), factors).float().tolist()}
        kind = self.file.get(f"{prefix}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ModelLoadError(f"{self.path}: {prefix}.rope.scaling.type {kind!r} is not supported; linear and yarn are")
        scaling = {"rope_type": kind, "factor": self._number(f"{prefix}.rope.scaling.factor")}
        if kind == "yarn":
            original = self._positive(f"{prefix}.rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _weights_dtype(self) -> DType:
        """The type of the matrices; quantised ones count as fp32, which they become."""
        kinds = {self._types[tensor.name].name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        return _DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def import_gguf() -> Any:
    """The `gguf` package, which only GGUF files need."""
    try:
        import gguf
    except ImportError as error:
        raise ModelLoadError("reading GGUF files needs the gguf package: pip install gguf") from error
    return gguf


def _halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows from rotary pairs side by side to the two halves that Hugging Face rotates.

    Args:
        rows: weight [num_heads * head_dim, in], or bias or indices [num_heads * head_dim].
    """
    if rows.shape[0] % (2 * num_heads):
        return rows  # mis-shaped: the loader's comparison with the model says so, and names it
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
