"""A Llama checkpoint of any size that takes no disk space: its tensors are a hole in a sparse file, drawn anew once loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch

from pyengine import LLM

#: Meta's Llama 3 8B.
LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
TINY: dict[str, Any] = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a Llama, by Hugging Face's name."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """config.json and a bf16 model.safetensors whose data is all zeros and occupies no blocks of the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config | extra | {"tie_word_embeddings": False}))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensor_shapes(config).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def draw_weights(llm: LLM, config: dict[str, Any], device: torch.device) -> None:
    """Fill the loaded model with random weights that keep activations at their size; drawn on the device."""
    model = llm.llm_engine._executor._worker._model  # type: ignore[attr-defined]  # no engine draws weights by itself
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=torch.bfloat16)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) / shape[1] ** 0.5

    model.load_weights((name, draw(shape)) for name, shape in tensor_shapes(config).items())
