"""Attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache
from pyengine.ops import Ops


class Attention:
    """Writes a step's keys and values to their slots; lets query tokens see their sequences' past.

    Args:
        scale: of the logits, before soft-cap and softmax.
        sliding_window: positions a token sees, its own included; None: all.
        logit_softcap: 0: none.
    """

    def __init__(self, scale: float, *, sliding_window: int | None = None, logit_softcap: float = 0.0, ops: Ops) -> None:
        self._scale = scale
        self._sliding_window = sliding_window or 0
        self._logit_softcap = logit_softcap
        self._ops = ops

    def write(self, key: Tensor, value: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata) -> None:
        """key, value [num_tokens, num_kv_heads, head_dim], the token stride free."""
        self._ops.reshape_and_cache(
            key, value, kv_cache.k, kv_cache.v, metadata.slot_mapping, kv_cache.k_scale, kv_cache.v_scale
        )

    def __call__(self, query: Tensor, kv_cache: LayerKVCache, metadata: AttentionMetadata) -> Tensor:
        """Attend to what is written: query [num_tokens, num_heads, head_dim], the token stride free -> the same, flat."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._ops.paged_attention(
            out,
            query,
            kv_cache.k,
            kv_cache.v,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            metadata.max_seq_len,
            self._scale,
            sliding_window=self._sliding_window,
            logit_softcap=self._logit_softcap,
            k_scale=kv_cache.k_scale,
            v_scale=kv_cache.v_scale,
            plan=metadata.plan,
            workspace=metadata.workspace,
        )
        return out.flatten(1)
