"""Float64 references of every op: plain loops over sequences, rows and tokens, written from the ops' definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class AttentionOptions:
    """What changes paged attention's logits, beside the tensors."""

    scale: float
    sliding_window: int = 0
    logit_softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # fp32 [num_heads]
    sinks: Tensor | None = None  # fp32 [num_heads]


def gather_cache(cache: Tensor, scale: Tensor | None, block_table: Tensor, seq_len: int) -> Tensor:
    """One sequence's keys or values in float64, dequantised: [seq_len, num_kv_heads, head_dim].

    cache [num_blocks, num_kv_heads, block_size, head_dim]; scale [num_kv_heads] or [num_blocks, num_kv_heads, block_size].
    """
    block_size = cache.shape[2]
    num_blocks = -(-seq_len // block_size)
    blocks = block_table[:num_blocks].long()
    values = cache[blocks].to(torch.float32).to(torch.float64)
    if scale is not None:
        factor = scale[None, :, None, None] if scale.dim() == 1 else scale[blocks][..., None]
        values = values * factor.to(torch.float64)
    return values.transpose(1, 2).reshape(num_blocks * block_size, *cache.shape[1::2])[:seq_len]


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: Tensor,
    block_table: Tensor,  # int32 [num_seqs, max_blocks]
    query_start_loc: Tensor,  # int32 [num_seqs + 1]
    seq_lens: Tensor,  # int32 [num_seqs]
    options: AttentionOptions,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [num_tokens, num_heads, head_dim] and log-sum-exp [num_tokens, num_heads], both float64."""
    num_tokens, num_heads, head_dim = query.shape
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        if begin == end:
            continue
        group = num_heads // k_cache.shape[1]
        keys = gather_cache(k_cache, k_scale, block_table[seq], seq_len).repeat_interleave(group, dim=1)
        values = gather_cache(v_cache, v_scale, block_table[seq], seq_len).repeat_interleave(group, dim=1)
        positions = torch.arange(seq_len - (end - begin), seq_len)
        visible = attention_mask(positions, seq_len, options.sliding_window)
        logits = torch.einsum("qhd,khd->hqk", query[begin:end].to(torch.float64), keys) * options.scale
        if options.logit_softcap > 0:
            logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
        if options.alibi_slopes is not None:
            distance = torch.arange(seq_len)[None, :] - positions[:, None]
            logits = logits + options.alibi_slopes.to(torch.float64)[:, None, None] * distance
        logits = logits.masked_fill(~visible, -math.inf)
        total = torch.logsumexp(logits, dim=-1)  # [num_heads, query_len]
        if options.sinks is not None:
            total = torch.logaddexp(total, options.sinks.to(torch.float64)[:, None])
        weights = torch.exp(logits - total[..., None])
        out[begin:end] = weighted_values(weights, values, visible)
        lse[begin:end] = total.T
    return out, lse


def attention_mask(positions: Tensor, seq_len: int, sliding_window: int) -> Tensor:
    """[len(positions), seq_len] bool: which keys each query position sees."""
    keys = torch.arange(seq_len)[None, :]
    visible = keys <= positions[:, None]
    if sliding_window > 0:
        visible &= keys > positions[:, None] - sliding_window
    return visible


def weighted_values(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """[query_len, num_heads, head_dim]; a key that a row does not see contributes nothing, NaN included."""
    if torch.isfinite(values).all():
        return torch.einsum("hqk,khd->qhd", weights, values)
    rows = [torch.einsum("hk,khd->hd", weights[:, i, seen], values[seen]) for i, seen in enumerate(visible)]
    return torch.stack(rows)


def quantize_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 to FP8: to float32 first, saturated at the largest finite value."""
    limit = FP8_MAX[dtype]
    return values.to(torch.float32).clamp(-limit, limit).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., hidden_size] over its root mean square, times weight [hidden_size]; float64."""
    wide = x.to(torch.float64)
    variance = wide.square().mean(dim=-1, keepdim=True)
    return wide / torch.sqrt(variance + epsilon) * weight.to(torch.float64)


def rotary_embedding(positions: Tensor, x: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> Tensor:
    """x [num_tokens, heads, head_dim], its first rotary_dim elements rotated; float64."""
    rotary_dim = cos_sin_cache.shape[1]
    half = rotary_dim // 2
    out = x.to(torch.float64).clone()
    angles = cos_sin_cache[positions].to(torch.float64)[:, None, :]
    cos, sin = angles[..., :half], angles[..., half:]
    first, second = (slice(0, half), slice(half, rotary_dim)) if is_neox else (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 d]: silu of the first half times the second; float64."""
    gate, up = x.to(torch.float64).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_and_mul(x: Tensor, tanh_approximation: bool) -> Tensor:
    """x [..., 2 d]: gelu of the first half times the second; float64."""
    gate, up = x.to(torch.float64).chunk(2, dim=-1)
    approximate = "tanh" if tanh_approximation else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def pack_linear_weight(weight: Tensor) -> Tensor:
    """weight [out, in] as panels [ceil(out / 16), in, 16], zero padded; weight's type."""
    out_features, in_features = weight.shape
    panels = -(-out_features // 16)
    padded = torch.zeros(panels * 16, in_features, dtype=weight.dtype)
    padded[:out_features] = weight
    return padded.reshape(panels, 16, in_features).transpose(1, 2).contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]; float64."""
    out = x.to(torch.float64) @ weight.to(torch.float64).T
    return out if bias is None else out + bias.to(torch.float64)


def quantized_rows(x: Tensor) -> Tensor:
    """x [rows, in] rounded to int8 in blocks of 32 as `quantized_linear` does it, back in float64."""
    blocks = x.to(torch.float32).reshape(len(x), -1, 32)
    magnitude = blocks.abs().amax(-1, keepdim=True)
    scale, inverse = magnitude / 127, torch.full_like(magnitude, 127.0) / magnitude  # 127 / x would round twice
    rounded = torch.where(magnitude < 2**-100, 0, torch.round(blocks * inverse))
    return (rounded.to(torch.float64) * scale.to(torch.float64)).reshape(x.shape)
