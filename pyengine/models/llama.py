"""Llama (Touvron et al., 2023) and the families that differ from it by a bias, a norm or a window: Mistral, Qwen2, Qwen3.

Tensor names are Hugging Face's. Layers merge projections of one input (query, key and value; gate and up).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.config import ModelArchConfig
from pyengine.errors import ModelLoadError
from pyengine.layers.activation import GatedActivation
from pyengine.layers.attention import Attention
from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache, LogitsRows
from pyengine.layers.embedding import Embedding
from pyengine.layers.linear import Linear
from pyengine.layers.normalization import RMSNorm
from pyengine.layers.rotary_embedding import RotaryEmbedding
from pyengine.layers.weights import Weight, WeightSlot
from pyengine.ops import Ops


@dataclass(frozen=True, kw_only=True)
class LlamaVariant:
    """Where a family differs from Llama. None: as the checkpoint's config says."""

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False  # RMSNorm over each query and key head, before rotation


@dataclass(frozen=True)
class _Context:
    """What every layer is built with."""

    arch: ModelArchConfig
    variant: LlamaVariant
    ops: Ops
    dtype: torch.dtype
    device: torch.device

    def linear(
        self, in_features: int, out_features: Sequence[int], bias: bool, activation: GatedActivation | None = None
    ) -> Linear:
        return Linear(
            in_features,
            out_features,
            bias=bias,
            ops=self.ops,
            dtype=self.dtype,
            device=self.device,
            activation=activation,
        )

    def rms_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.arch.rms_norm_eps, ops=self.ops, dtype=self.dtype, device=self.device)


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, context: _Context, rotary: RotaryEmbedding) -> None:
        arch, variant = context.arch, context.variant
        self.num_heads, self.num_kv_heads, self.head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_bias = arch.attention_bias if variant.qkv_bias is None else variant.qkv_bias
        output_bias = arch.attention_bias if variant.output_bias is None else variant.output_bias
        self.qkv_proj = context.linear(arch.hidden_size, (q_size, kv_size, kv_size), qkv_bias)
        self.o_proj = context.linear(q_size, (arch.hidden_size,), output_bias)
        self.q_norm = context.rms_norm(self.head_dim) if variant.qk_norm else None
        self.k_norm = context.rms_norm(self.head_dim) if variant.qk_norm else None
        self.rotary = rotary
        self.attention = Attention(
            self.head_dim**-0.5,
            sliding_window=arch.sliding_window,
            logit_softcap=arch.attn_logit_softcap,
            ops=context.ops,
        )

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots([f"{name}.{part}_proj" for part in "qkv"])
        yield from self.o_proj.weight_slots([f"{name}.o_proj"])
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_slots(f"{name}.q_norm")
            yield from self.k_norm.weight_slots(f"{name}.k_norm")

    def __call__(
        self,
        positions: Tensor,
        x: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        rows: LogitsRows | None,
    ) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_rows, hidden_size], all tokens by default."""
        heads = self.qkv_proj(x).unflatten(1, (-1, self.head_dim))  # [num_tokens, num_heads + 2 num_kv_heads, head_dim]
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query.reshape(-1, self.head_dim)).view(query.shape)
            key = self.k_norm(key.reshape(-1, self.head_dim)).view(key.shape)
        self.rotary(positions, query, key)
        self.attention.write(key, value, kv_cache, metadata)
        if rows is not None:
            query, metadata = rows.of(query), rows.metadata
        return self.o_proj(self.attention(query, kv_cache, metadata))


class LlamaMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, context: _Context) -> None:
        arch = context.arch
        sizes = (arch.intermediate_size, arch.intermediate_size)
        activation = GatedActivation(arch.hidden_act, ops=context.ops)
        self.gate_up_proj = context.linear(arch.hidden_size, sizes, arch.mlp_bias, activation)
        self.down_proj = context.linear(arch.intermediate_size, (arch.hidden_size,), arch.mlp_bias)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield from self.gate_up_proj.weight_slots([f"{name}.gate_proj", f"{name}.up_proj"])
        yield from self.down_proj.weight_slots([f"{name}.down_proj"])

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        return self.down_proj(self.gate_up_proj(x))


class LlamaDecoderLayer:
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, context: _Context, rotary: RotaryEmbedding) -> None:
        self.input_layernorm = context.rms_norm(context.arch.hidden_size)
        self.self_attn = LlamaAttention(context, rotary)
        self.post_attention_layernorm = context.rms_norm(context.arch.hidden_size)
        self.mlp = LlamaMLP(context)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield from self.input_layernorm.weight_slots(f"{name}.input_layernorm")
        yield from self.self_attn.weight_slots(f"{name}.self_attn")
        yield from self.post_attention_layernorm.weight_slots(f"{name}.post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{name}.mlp")

    def __call__(
        self,
        positions: Tensor,
        x: Tensor | None,
        residual: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        rows: LogitsRows | None,
    ) -> tuple[Tensor, Tensor]:
        """One layer.

        Args:
            x: the last layer's output, not yet added to the residual stream; None in the first layer.
            residual: the residual stream, updated in place. Both [num_tokens, hidden_size].
            rows: the tokens that go on from here, once all keys and values are written; None: all.

        Returns:
            This layer's output, not yet added, and the residual stream, both [num_rows, hidden_size].
        """
        if x is None:
            x = self.input_layernorm(residual)
        else:
            self.input_layernorm.add_(x, residual)
        x = self.self_attn(positions, x, kv_cache, metadata, rows)
        if rows is not None:
            residual = rows.of(residual)
        self.post_attention_layernorm.add_(x, residual)
        return self.mlp(x), residual


class LlamaForCausalLM:
    """A `CausalLM`.

    Args:
        arch: the network, from the checkpoint.
        ops: the device's kernels.
        dtype: of weights and activations.

    Raises:
        ModelLoadError: where the architecture has something that is not supported.
    """

    variant = LlamaVariant()

    def __init__(self, arch: ModelArchConfig, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        context = _Context(arch, self.variant, ops, dtype, device)
        rotary = RotaryEmbedding(
            arch.head_dim, arch.max_position_embeddings, arch.rope_theta, arch.rope_scaling, ops=ops, device=device
        )
        self.layers = [LlamaDecoderLayer(context, rotary) for _ in range(arch.num_layers)]
        self.norm = context.rms_norm(arch.hidden_size)
        self.lm_head = context.linear(arch.hidden_size, (arch.vocab_size,), bias=False)
        self._embedding = (  # tied ones are lm_head's rows
            None
            if arch.tie_word_embeddings
            else Embedding(arch.vocab_size, arch.hidden_size, ops=ops, dtype=dtype, device=device)
        )
        self._slots = {slot.name: slot for slot in self._weight_slots()}

    def _weight_slots(self) -> Iterator[WeightSlot]:
        if self._embedding is None:
            yield from self.lm_head.weight_slots(["model.embed_tokens"])
        else:
            yield from self._embedding.weight_slots("model.embed_tokens")
            yield from self.lm_head.weight_slots(["lm_head"])
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{index}")
        yield from self.norm.weight_slots("model.norm")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, slot in self._slots.items()}

    def ignores_weight(self, name: str) -> bool:
        tied_head = name == "lm_head.weight" and self._embedding is None
        return tied_head or name.endswith(".rotary_emb.inv_freq")  # a buffer that old checkpoints have

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> None:
        missing = set(self._slots)
        for name, tensor in weights:
            slot = self._slots.get(name)
            if slot is None:
                if self.ignores_weight(name):
                    continue
                raise ModelLoadError(f"tensor {name} does not belong to {self.arch.architecture}")
            if tuple(tensor.shape) != slot.shape:
                raise ModelLoadError(f"tensor {name} has shape {list(tensor.shape)}, not {list(slot.shape)}")
            slot.load(tensor)
            missing.discard(name)
        if missing:
            raise ModelLoadError(f"tensor {min(missing)} is missing ({len(missing)} in all)")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.lm_head.rows(input_ids) if self._embedding is None else self._embedding(input_ids)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: AttentionMetadata,
        rows: LogitsRows | None = None,
    ) -> Tensor:
        x: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            is_last = layer is self.layers[-1]
            x, hidden = layer(positions, x, hidden, kv_cache, metadata, rows if is_last else None)
        assert x is not None, "a model has at least one layer"
        self.norm.add_(x, hidden)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden, torch.float32)


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: Llama with a sliding window, which the checkpoint's config gives. No projection has a bias."""

    variant = LlamaVariant(qkv_bias=False, output_bias=False)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5: query, key and value have a bias, the output projection has none."""

    variant = LlamaVariant(qkv_bias=True, output_bias=False)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3: query and key heads are normalised before rotation."""

    variant = LlamaVariant(qk_norm=True)
