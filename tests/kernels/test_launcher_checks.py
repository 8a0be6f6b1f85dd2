"""Launchers refuse every argument that a kernel would trust wrongly, in one line that names op, tensor and both values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyengine.ops import Ops, get_ops

Args = dict[str, Any]
Change = Callable[[Args], Any]  # returns the new value of the argument that the case is about


@pytest.fixture(params=["cpu", "emulated"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return get_ops(request.param)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def uint8(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def key_cache(num_blocks: int = 3, heads: int = 2, block_size: int = 16, head_dim: int = 32) -> Tensor:
    """Dimension-major, which the CPU wants; the emulated launcher leaves strides to its kernels."""
    return torch.zeros(num_blocks, heads, head_dim, block_size).transpose(2, 3)


def valid_args() -> dict[str, Args]:
    return {
        "reshape_and_cache": {
            "key": torch.zeros(4, 2, 32),
            "value": torch.zeros(4, 2, 32),
            "k_cache": key_cache(),
            "v_cache": torch.zeros(3, 2, 16, 32),
            "slot_mapping": int64(16, -1, 17, 40),
        },
        "paged_attention": {
            "out": torch.zeros(4, 4, 32),
            "query": torch.zeros(4, 4, 32),
            "k_cache": key_cache(),
            "v_cache": torch.zeros(3, 2, 16, 32),
            "block_table": torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
            "query_start_loc": int32(0, 3, 4),
            "seq_lens": int32(20, 5),
            "max_query_len": 3,
            "max_seq_len": 20,
            "scale": 0.2,
        },
        "copy_blocks": {"pool": torch.zeros(4, 3, 8), "block_mapping": torch.tensor([[0, 2], [1, 3]])},
        "swap_blocks": {
            "src": torch.zeros(4, 3, 8),
            "dst": torch.zeros(5, 3, 8),
            "block_mapping": torch.tensor([[0, 4], [1, 3]]),
        },
        "rms_norm": {
            "out": torch.zeros(3, 40),
            "input": torch.zeros(3, 40),
            "weight": torch.zeros(40),
            "epsilon": 1e-5,
        },
        "fused_add_rms_norm": {
            "input": torch.zeros(3, 40),
            "residual": torch.zeros(3, 40),
            "weight": torch.zeros(40),
            "epsilon": 1e-5,
        },
        "rotary_embedding": {
            "positions": int64(0, 5, 9),
            "query": torch.zeros(3, 4, 32),
            "key": torch.zeros(3, 2, 32),
            "cos_sin_cache": torch.zeros(10, 32),
        },
        "rotary_reshape_and_cache": {
            "positions": int64(0, 5, 9),
            "query": torch.zeros(3, 4, 32),
            "key": torch.zeros(3, 2, 32),
            "value": torch.zeros(3, 2, 32),
            "cos_sin_cache": torch.zeros(10, 32),
            "k_cache": key_cache(),
            "v_cache": torch.zeros(3, 2, 16, 32),
            "slot_mapping": int64(16, -1, 40),
        },
        "merge_attention_states": {
            "out": torch.zeros(2, 4, 32),
            "part_out": torch.zeros(3, 4, 32),
            "part_lse": torch.zeros(3, 4),
            "part_start": int32(0, 1, 3),
        },
        "apply_penalties": {
            "logits": torch.zeros(2, 50),
            "prompt_mask": torch.zeros(2, 50, dtype=torch.bool),
            "output_counts": torch.zeros(2, 50, dtype=torch.int32),
            "repetition": torch.ones(2),
            "presence": torch.zeros(2),
            "frequency": torch.zeros(2),
        },
        "apply_bitmask": {"logits": torch.zeros(2, 50), "bitmask": torch.zeros(2, 2, dtype=torch.int32)},
        "sample_top_k_top_p": {
            "token_ids": int64(0, 0),
            "logits": torch.zeros(2, 50),
            "temperature": torch.ones(2),
            "top_k": int32(0, 5),
            "top_p": torch.ones(2),
            "min_p": torch.zeros(2),
            "seeds": int64(1, 2),
            "positions": int64(0, 7),
        },
        "silu_and_mul": {"out": torch.zeros(3, 20), "input": torch.zeros(3, 40)},
        "gelu_and_mul": {"out": torch.zeros(3, 20), "input": torch.zeros(3, 40)},
        "pack_linear_weight": {"packed": torch.zeros(2, 24, 16), "weight": torch.zeros(20, 24)},
        "linear": {
            "out": torch.zeros(3, 20),
            "input": torch.zeros(3, 24),
            "packed_weight": torch.zeros(2, 24, 16),
            "bias": torch.zeros(20),
        },
        "gated_linear": {
            "out": torch.zeros(3, 20),
            "input": torch.zeros(3, 24),
            "packed_weight": torch.zeros(4, 24, 16),
            "activation": "silu",
            "bias": torch.zeros(40),
        },
        "pack_quantized_weight": {"packed": uint8(2, 3, 544), "weight": uint8(20, 3 * 34), "format": "Q8_0"},
        "quantized_linear": {
            "out": torch.zeros(3, 20),
            "input": torch.zeros(3, 96),
            "packed_weight": uint8(2, 3, 544),
            "format": "Q8_0",
            "bias": torch.zeros(20),
        },
        "quantized_gated_linear": {
            "out": torch.zeros(3, 32),
            "input": torch.zeros(3, 96),
            "packed_weight": uint8(4, 3, 544),
            "format": "Q8_0",
            "activation": "silu",
            "bias": torch.zeros(64),
        },
        "quantized_embedding": {
            "out": torch.zeros(3, 96),
            "indices": int64(0, 19, 31),
            "packed_weight": uint8(2, 3, 544),
            "format": "Q8_0",
        },
        "pack_w8a16_weight": {
            "packed": torch.zeros(2, 3, 2048, dtype=torch.int8),
            "factors": torch.zeros(2, 1, 64),
            "weight": torch.zeros(40, 140),
        },
        "w8a16_linear": {
            "out": torch.zeros(3, 40),
            "input": torch.zeros(3, 140),
            "packed_weight": torch.zeros(2, 3, 2048, dtype=torch.int8),
            "factors": torch.zeros(2, 1, 64),
            "bias": torch.zeros(40),
        },
        "w8a16_gated_linear": {
            "out": torch.zeros(3, 32),
            "input": torch.zeros(3, 140),
            "packed_weight": torch.zeros(2, 3, 2048, dtype=torch.int8),
            "factors": torch.zeros(2, 1, 64),
            "activation": "silu",
            "bias": torch.zeros(64),
        },
        "w8a16_embedding": {
            "out": torch.zeros(3, 140),
            "indices": int64(0, 39, 63),
            "packed_weight": torch.zeros(2, 3, 2048, dtype=torch.int8),
            "factors": torch.zeros(2, 1, 64),
        },
    }


#: (op, argument, its wrong value, the message after "OP: ")
CASES: list[tuple[str, str, Any, str]] = [
    ("reshape_and_cache", "key", torch.zeros(4, 64), "key must have 3 dimensions, not 2"),
    ("reshape_and_cache", "key", torch.zeros(4, 3, 32), "key has num_kv_heads 3, k_cache has 2"),
    ("reshape_and_cache", "key", torch.zeros(4, 2, 64), "key has head_dim 64, k_cache has 32"),
    ("reshape_and_cache", "key", torch.zeros(4, 2, 32).double(), "key is Double, it must be one of Float, Half, BFloat16"),
    ("reshape_and_cache", "value", torch.zeros(5, 2, 32), "value has num_tokens 5, key has 4"),
    ("reshape_and_cache", "value", torch.zeros(4, 2, 32).half(), "value is Half, key is Float"),
    ("reshape_and_cache", "value", torch.zeros(4, 32, 2).transpose(1, 2), "value must be dense from dimension 1 on"),
    ("reshape_and_cache", "v_cache", torch.zeros(4, 2, 16, 32), "v_cache has num_blocks 4, k_cache has 3"),
    ("reshape_and_cache", "v_cache", torch.zeros(3, 2, 16, 32).half(), "v_cache is Half, k_cache is Float"),
    ("reshape_and_cache", "k_cache", key_cache().int(), "k_cache is Int, it must be one of"),
    ("reshape_and_cache", "slot_mapping", int64(0, 1, 2), "slot_mapping has num_tokens 3, key has 4"),
    ("reshape_and_cache", "slot_mapping", int32(0, 1, 2, 3), "slot_mapping is Int, it must be Long"),
    ("reshape_and_cache", "slot_mapping", int64(0, 1, 2, 48), "slot_mapping[3] is 48, it must be in [-1, 48)"),
    ("reshape_and_cache", "slot_mapping", int64(0, -2, 2, 3), "slot_mapping[1] is -2, it must be in [-1, 48)"),
    ("reshape_and_cache", "k_scale", torch.zeros(2), "k_scale and v_scale must be given together"),
    ("paged_attention", "out", torch.zeros(5, 4, 32), "out has num_tokens 5, query has 4"),
    ("paged_attention", "out", torch.zeros(4, 4, 32).half(), "out is Half, query is Float"),
    ("paged_attention", "query", torch.zeros(4, 4, 80), "out has head_dim 32, query has 80"),
    ("paged_attention", "query", torch.zeros(4, 4, 64)[..., ::2], "query must be dense from dimension 1 on"),
    ("paged_attention", "v_cache", torch.zeros(3, 2, 16, 64), "v_cache has head_dim 64, k_cache has 32"),
    ("paged_attention", "block_table", torch.zeros(2, 2), "block_table is Float, it must be Int"),
    ("paged_attention", "block_table", torch.zeros(3, 2).int(), "block_table has num_seqs 3, seq_lens has 2"),
    ("paged_attention", "block_table", torch.tensor([[1, 3], [2, 0]]).int(), "block_table[0, 1] is 3, k_cache has"),
    ("paged_attention", "block_table", torch.tensor([[1, -1], [2, 0]]).int(), "block_table[0, 1] is -1, k_cache has"),
    ("paged_attention", "block_table", torch.tensor([[1], [2]]).int(), "block_table has max_blocks 1, seq_lens[0] = 20"),
    ("paged_attention", "query_start_loc", int32(0, 4), "query_start_loc has 2 elements, seq_lens with num_seqs 2 needs 3"),
    ("paged_attention", "query_start_loc", int32(1, 3, 4), "query_start_loc starts at 1, it must start at 0"),
    ("paged_attention", "query_start_loc", int32(0, 3, 5), "query_start_loc ends at 5, query has num_tokens 4"),
    ("paged_attention", "query_start_loc", int32(0, 5, 4), "query_start_loc gives sequence 0 a query of length 5"),
    ("paged_attention", "query_start_loc", int64(0, 3, 4), "query_start_loc is Long, it must be Int"),
    ("paged_attention", "seq_lens", int32(2, 5), "seq_lens[0] is 2, its query has length 3 and max_seq_len is 20"),
    ("paged_attention", "seq_lens", int32(21, 5), "seq_lens[0] is 21, its query has length 3 and max_seq_len is 20"),
    ("paged_attention", "max_query_len", 2, "query_start_loc gives sequence 0 a query of length 3, max_query_len is 2"),
    ("paged_attention", "max_seq_len", -1, "max_seq_len is -1"),
    ("paged_attention", "logit_softcap", -1.0, "logit_softcap is -1.000000, it must not be negative"),
    ("paged_attention", "logit_softcap", float("nan"), "logit_softcap is nan, it must not be negative"),
    ("paged_attention", "alibi_slopes", torch.zeros(3), "alibi_slopes has num_heads 3, query has 4"),
    ("paged_attention", "alibi_slopes", torch.zeros(4).half(), "alibi_slopes is Half, it must be Float"),
    ("paged_attention", "sinks", torch.zeros(8)[::2], "sinks must be dense from dimension 0 on"),
    ("paged_attention", "lse", torch.zeros(4, 3), "lse has num_heads 3, query has 4"),
    ("paged_attention", "plan", torch.zeros(1, 4).int(), "plan and workspace must be given together"),
    ("copy_blocks", "block_mapping", torch.tensor([[0, 4]]), "block_mapping[0, 1] is 4, the destination has 4 blocks"),
    ("copy_blocks", "block_mapping", torch.tensor([[-1, 2]]), "block_mapping[0, 0] is -1, the source has 4 blocks"),
    ("copy_blocks", "block_mapping", torch.tensor([[0, 2], [1, 2]]), "block_mapping names destination block 2 twice"),
    ("copy_blocks", "block_mapping", torch.tensor([[0, 1], [1, 2]]), "block_mapping names block 1 as a source and"),
    ("copy_blocks", "block_mapping", torch.tensor([[0, 1, 2]]), "block_mapping must be [num_pairs, 2], it has 3 columns"),
    ("copy_blocks", "pool", torch.zeros(4, 8, 3).transpose(1, 2), "pool must be dense from dimension 0 on"),
    ("copy_blocks", "pool", torch.zeros(()), "pool must have at least one dimension"),
    ("swap_blocks", "src", torch.zeros(4, 3, 9), "src has blocks of 108 bytes, dst of 96"),
    ("swap_blocks", "block_mapping", torch.tensor([[4, 0]]), "block_mapping[0, 0] is 4, the source has 4 blocks"),
    ("swap_blocks", "block_mapping", torch.tensor([[0, 5]]), "block_mapping[0, 1] is 5, the destination has 5 blocks"),
    ("swap_blocks", "block_mapping", torch.tensor([[0, 1]]).int(), "block_mapping is Int, it must be Long"),
    ("rms_norm", "out", torch.zeros(3, 41), "out has hidden_size 41, input has 40"),
    ("rms_norm", "out", torch.zeros(4, 40), "out has num_tokens 4, input has 3"),
    ("rms_norm", "input", torch.zeros(40), "input must have 2 dimensions, not 1"),
    ("rms_norm", "weight", torch.zeros(80), "weight has hidden_size 80, input has 40"),
    ("rms_norm", "weight", torch.zeros(40).bfloat16(), "weight is BFloat16, input is Float"),
    ("fused_add_rms_norm", "residual", torch.zeros(2, 40), "residual has num_tokens 2, input has 3"),
    ("fused_add_rms_norm", "residual", torch.zeros(40, 3).T, "residual must be dense from dimension 1 on"),
    ("rotary_embedding", "positions", int64(0, 5), "positions has num_tokens 2, query has 3"),
    ("rotary_embedding", "positions", int64(0, 5, 10), "positions[2] is 10, it must be in [0, 10)"),
    ("rotary_embedding", "positions", int64(-1, 5, 9), "positions[0] is -1, it must be in [0, 10)"),
    ("rotary_embedding", "key", torch.zeros(3, 2, 64), "key has head_dim 64, query has 32"),
    ("rotary_embedding", "cos_sin_cache", torch.zeros(10, 31), "cos_sin_cache has rotary_dim 31, it must be even"),
    ("rotary_embedding", "cos_sin_cache", torch.zeros(10, 34), "cos_sin_cache has rotary_dim 34, it must be even and at most"),
    ("rotary_embedding", "cos_sin_cache", torch.zeros(10, 32).half(), "cos_sin_cache is Half, it must be Float"),
    ("rotary_reshape_and_cache", "query", torch.zeros(3, 4, 64), "query has head_dim 64, key has 32"),
    ("rotary_reshape_and_cache", "query", torch.zeros(2, 4, 32), "query has num_tokens 2, key has 3"),
    ("rotary_reshape_and_cache", "positions", int64(0, 5, 10), "positions[2] is 10, it must be in [0, 10)"),
    ("rotary_reshape_and_cache", "slot_mapping", int64(0, 1, 48), "slot_mapping[2] is 48, it must be in [-1, 48)"),
    ("rotary_reshape_and_cache", "cos_sin_cache", torch.zeros(10, 34), "cos_sin_cache has rotary_dim 34, it must be even"),
    ("merge_attention_states", "part_out", torch.zeros(3, 4, 64), "part_out has head_dim 64, out has 32"),
    ("merge_attention_states", "part_lse", torch.zeros(2, 4), "part_lse has num_parts 2, part_out has 3"),
    ("merge_attention_states", "part_start", int32(0, 3), "part_start has 2 elements, out with num_rows 2 needs 3"),
    ("merge_attention_states", "part_start", int32(0, 2, 4), "part_start must grow from 0 or more to at most num_parts 3"),
    ("merge_attention_states", "part_start", int32(0, 2, 1), "part_start must grow from 0 or more to at most num_parts 3"),
    ("apply_penalties", "logits", torch.zeros(2, 50).half(), "logits is Half, it must be Float"),
    ("apply_penalties", "prompt_mask", torch.zeros(2, 49).bool(), "prompt_mask has vocab_size 49, logits has 50"),
    ("apply_penalties", "presence", torch.zeros(3), "presence has num_rows 3, logits has 2"),
    ("apply_bitmask", "bitmask", torch.zeros(2, 1).int(), "bitmask has 1 words a row, logits with vocab_size 50 needs 2"),
    ("sample_top_k_top_p", "token_ids", int32(0, 0), "token_ids is Int, it must be Long"),
    ("sample_top_k_top_p", "top_p", torch.ones(1), "top_p has num_rows 1, logits has 2"),
    ("silu_and_mul", "input", torch.zeros(3, 42), "input has width 42, twice out's is 40"),
    ("silu_and_mul", "out", torch.zeros(2, 20), "out has num_tokens 2, input has 3"),
    ("gelu_and_mul", "out", torch.zeros(3, 20).half(), "out is Half, input is Float"),
    ("pack_linear_weight", "packed", torch.zeros(1, 24, 16), "packed is [1, ., 16], weight with 20 output features needs"),
    ("pack_linear_weight", "packed", torch.zeros(2, 25, 16), "packed has in_features 25, weight has 24"),
    ("linear", "input", torch.zeros(3, 25), "packed_weight has in_features 24, input has 25"),
    ("linear", "out", torch.zeros(3, 40), "packed_weight is [2, ., 16], out with 40 output features needs [3, ., 16]"),
    ("linear", "out", torch.zeros(3, 20).half(), "out is Half, input is Float"),
    ("linear", "input", torch.zeros(3, 0), "input has no in_features"),
    ("linear", "bias", torch.zeros(32), "bias has out_features 32, out has 20"),
    ("linear", "bias", torch.zeros(20).half(), "bias is Half, input is Float"),
    ("gated_linear", "out", torch.zeros(3, 40), "packed_weight is [4, ., 16], out with 40 output features needs [6, ., 16]"),
    ("gated_linear", "input", torch.zeros(3, 0), "input has no in_features"),
    ("gated_linear", "bias", torch.zeros(20), "bias has features of gate and up 20, out has 40"),
    ("gated_linear", "input", torch.zeros(3, 24).half(), "input is Half, it must be Float"),
    ("gated_linear", "activation", "gelu", "activation is 'gelu', it must be silu or gelu_tanh"),
    ("pack_quantized_weight", "format", "Q3_K", "format is 'Q3_K', it must be one of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K"),
    ("pack_quantized_weight", "format", "Q4_1", "packed has tile_bytes 544, Q4_1 has 320"),
    ("pack_quantized_weight", "packed", uint8(1, 3, 544), "packed has 1 panels, weight with 20 output features needs 2"),
    ("pack_quantized_weight", "packed", torch.zeros(2, 3, 544), "packed is Float, it must be Byte"),
    ("pack_quantized_weight", "packed", uint8(4, 3, 544)[::2], "packed must be dense from dimension 0 on"),
    ("pack_quantized_weight", "weight", uint8(20, 96), "weight has row bytes 96, packed has 102"),
    ("pack_quantized_weight", "weight", torch.zeros(20, 96), "weight is Float, it must be Byte"),
    ("quantized_linear", "format", "q8_0", "format is 'q8_0', it must be one of"),
    ("quantized_linear", "format", "Q6_K", "packed_weight has tile_bytes 544, Q6_K has 3360"),
    ("quantized_linear", "input", torch.zeros(3, 64), "input has in_features 64, packed_weight has 96"),
    ("quantized_linear", "input", torch.zeros(3, 192)[:, ::2], "input must be dense from dimension 1 on"),
    ("quantized_linear", "out", torch.zeros(3, 40), "packed_weight has 2 panels, out with 40 output features needs 3"),
    ("quantized_linear", "out", torch.zeros(2, 20), "out has num_tokens 2, input has 3"),
    ("quantized_linear", "out", torch.zeros(3, 20).half(), "out is Half, input is Float"),
    ("quantized_linear", "input", torch.zeros(3, 0), "input has no in_features"),
    ("quantized_linear", "bias", torch.zeros(32), "bias has out_features 32, out has 20"),
    ("quantized_gated_linear", "out", torch.zeros(3, 40), "packed_weight has 4 panels, out with 40 output features needs 6"),
    ("quantized_gated_linear", "input", torch.zeros(3, 0), "input has no in_features"),
    ("quantized_gated_linear", "bias", torch.zeros(32), "bias has features of gate and up 32, out has 64"),
    ("quantized_gated_linear", "activation", "gelu", "activation is 'gelu', it must be silu or gelu_tanh"),
    ("pack_w8a16_weight", "weight", torch.zeros(40, 140).half(), "weight is Half, it must be Float"),
    ("pack_w8a16_weight", "weight", torch.zeros(70, 140), "packed has panels 2, weight has 3"),
    ("pack_w8a16_weight", "packed", torch.zeros(2, 2, 2048).char(), "packed has steps of 64 input features 2, weight has 3"),
    ("w8a16_linear", "input", torch.zeros(3, 300), "packed_weight has steps of 64 input features 3, input has 5"),
    ("w8a16_linear", "packed_weight", torch.zeros(2, 3, 2048), "packed_weight is Float, it must be Char"),
    ("w8a16_linear", "factors", torch.zeros(3, 1, 64), "factors has panels 3, packed_weight has 2"),
    ("w8a16_linear", "factors", torch.zeros(2, 2, 64), "factors has groups of input features 2, input has 1"),
    ("w8a16_linear", "factors", torch.zeros(2, 1, 32), "factors has factors in a panel 32, the layout has 64"),
    ("w8a16_linear", "out", torch.zeros(3, 70), "packed_weight has panels 2, out has 3"),
    ("w8a16_linear", "out", torch.zeros(3, 40).half(), "out is Half, input is Float"),
    ("w8a16_linear", "bias", torch.zeros(64), "bias has out_features 64, out has 40"),
    ("w8a16_linear", "input", torch.zeros(3, 0), "input has no in_features"),
    ("w8a16_gated_linear", "out", torch.zeros(3, 40), "packed_weight has panels 2, out has 4"),
    ("w8a16_gated_linear", "bias", torch.zeros(32), "bias has features of gate and up 32, out has 64"),
    ("w8a16_gated_linear", "activation", "relu", "activation is 'relu', it must be silu or gelu_tanh"),
    ("w8a16_embedding", "indices", int64(0, 64, 1), "indices[1] is 64, it must be in [0, 64)"),
    ("w8a16_embedding", "out", torch.zeros(3, 300), "packed_weight has steps of 64 input features 3, out has 5"),
    ("quantized_linear", "bias", torch.zeros(20).half(), "bias is Half, input is Float"),
    ("quantized_embedding", "indices", int64(0, 32, 1), "indices[1] is 32, it must be in [0, 32)"),
    ("quantized_embedding", "indices", int64(0, -1, 1), "indices[1] is -1, it must be in [0, 32)"),
    ("quantized_embedding", "indices", int64(0, 1), "out has num_tokens 3, indices has 2"),
    ("quantized_embedding", "out", torch.zeros(3, 64), "out has in_features 64, packed_weight has 96"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "argument", "value", "message"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_wrong_argument(ops: Ops, op: str, argument: str, value: Any, message: str) -> None:
    args = valid_args()[op] | {argument: value}
    before = {name: v.clone() for name, v in args.items() if isinstance(v, Tensor)}
    with pytest.raises(ValueError, match="^" + re.escape(f"{op}: {message}")) as error:
        getattr(ops, op)(**args)
    assert "\n" not in str(error.value)
    for name, tensor in before.items():
        assert torch.equal(args[name], tensor)


@pytest.mark.parametrize("op", sorted(valid_args()))
def test_valid_arguments_are_accepted(op: str) -> None:
    getattr(get_ops("cpu"), op)(**valid_args()[op])


# ---- what depends on several arguments -----------------------------------------------------------------------------


def attention(**changes: Any) -> None:
    get_ops("cpu").paged_attention(**(valid_args()["paged_attention"] | changes))


def test_cache_head_dim_against_the_query() -> None:
    with pytest.raises(ValueError, match=r"^paged_attention: k_cache has head_dim 64, query has 32$"):
        attention(k_cache=key_cache(head_dim=64), v_cache=torch.zeros(3, 2, 16, 64))


def test_query_heads_are_a_multiple() -> None:
    with pytest.raises(ValueError, match=r"k_cache has num_kv_heads 3, which does not divide query's num_heads 4"):
        attention(k_cache=key_cache(heads=3), v_cache=torch.zeros(3, 3, 16, 32))


@pytest.mark.parametrize("block_size", [0, 24])
def test_block_size_is_a_power_of_two(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"k_cache has block_size {block_size}, it must be a power of two"):
        attention(k_cache=key_cache(block_size=block_size), v_cache=torch.zeros(3, 2, block_size, 32))


def test_cpu_keys_are_dimension_major() -> None:
    with pytest.raises(ValueError, match=r"k_cache has stride\(2\) 32, on the CPU K is dimension-major: it must be 1"):
        attention(k_cache=torch.zeros(3, 2, 16, 32))


def test_cpu_takes_no_plan() -> None:
    with pytest.raises(ValueError, match="plan is for GPUs, on the CPU it must be None"):
        attention(plan=torch.zeros(1, 4).int(), workspace=torch.zeros(4))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((2, 0, 5, -1), "plan[0] names sequence 2, seq_lens has num_seqs 2"),
        ((1, 0, 6, -1), "plan[0] covers keys 0 to 6, seq_lens[1] is 5"),
        ((1, 4, 3, -1), "plan[0] covers keys 4 to 3, seq_lens[1] is 5"),
        ((1, 0, 5, 2), "plan[0] ends at slot 3, workspace has room for 2"),
    ],
)
def test_plan_values(row: tuple[int, ...], message: str) -> None:
    plan = {"plan": torch.tensor([row], dtype=torch.int32), "workspace": torch.zeros(2 * 4 * 33)}  # a slot: 4 heads of 32 + 1
    with pytest.raises(ValueError, match="^paged_attention: " + re.escape(message)):
        get_ops("emulated").paged_attention(**(valid_args()["paged_attention"] | plan))


def test_scales_follow_the_cache_type() -> None:
    int8 = {"k_cache": key_cache().to(torch.int8), "v_cache": torch.zeros(3, 2, 16, 32, dtype=torch.int8)}
    with pytest.raises(ValueError, match="a cache of type Char needs k_scale and v_scale"):
        attention(**int8)
    with pytest.raises(ValueError, match="k_scale must have 3 dimensions, not 1"):
        attention(**int8, k_scale=torch.ones(2), v_scale=torch.ones(2))
    with pytest.raises(ValueError, match="k_scale has block_size 8, k_cache has 16"):
        attention(**int8, k_scale=torch.ones(3, 2, 8), v_scale=torch.ones(3, 2, 16))
    with pytest.raises(ValueError, match="a cache of type Float takes no k_scale and v_scale"):
        attention(k_scale=torch.ones(2), v_scale=torch.ones(2))
    fp8 = {name: cache.to(torch.float8_e4m3fn) for name, cache in int8.items()}
    with pytest.raises(ValueError, match="v_scale has num_kv_heads 3, k_cache has 2"):
        attention(**fp8, k_scale=torch.ones(2), v_scale=torch.ones(3))


#: Weights that fit an input without features: kernels plan by a row's length.
FEATURELESS: dict[str, Args] = {
    "linear": {"packed_weight": torch.zeros(2, 0, 16)},
    "gated_linear": {"packed_weight": torch.zeros(4, 0, 16)},
    "quantized_linear": {"packed_weight": uint8(2, 0, 544)},
    "quantized_gated_linear": {"packed_weight": uint8(4, 0, 544)},
    "w8a16_linear": {"packed_weight": torch.zeros(2, 0, 2048).char(), "factors": torch.zeros(2, 0, 64)},
}


@pytest.mark.parametrize("op", sorted(FEATURELESS))
def test_products_of_nothing_are_refused(op: str) -> None:
    args = valid_args()[op] | FEATURELESS[op] | {"input": torch.zeros(3, 0)}
    with pytest.raises(ValueError, match=rf"^{op}: input has no in_features$"):
        getattr(get_ops("cpu"), op)(**args)


def test_int8_products_of_nothing_are_refused(ops: Ops) -> None:
    codes, weight = torch.zeros(3, 0).char(), torch.zeros(16, 0).char()
    with pytest.raises(ValueError, match=r"^int8_linear: input has no in_features$"):
        ops.int8_linear(torch.zeros(3, 16), codes, torch.ones(3), weight, torch.ones(1))


def test_tensors_without_elements_are_dense(ops: Ops) -> None:
    """Their strides are at least 1 even where a dense tensor's would be 0."""
    ops.pack_linear_weight(torch.zeros(2, 0, 16), torch.zeros(32, 0))
    scale = torch.ones(2)
    ops.quantize_int8_rows(torch.zeros(2, 0).char(), scale, torch.zeros(2, 0))
    assert scale.tolist() == [0, 0]


def test_swapped_pools_overlap_wholly_or_not_at_all(ops: Ops) -> None:
    pool, mapping = torch.arange(6.0).repeat_interleave(8).view(6, 8), torch.tensor([[0, 2]])
    for dst in (pool[2:], pool[1:2], pool.view(-1)[4:-4].view(5, 8)):
        with pytest.raises(ValueError, match=r"^swap_blocks: dst overlaps src, but starts at another address$"):
            ops.swap_blocks(pool[:4], dst, mapping)
    with pytest.raises(ValueError, match=r"^swap_blocks: dst overlaps src, but starts at another address$"):
        ops.swap_blocks(pool[3:], pool[:4], mapping)
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    ops.swap_blocks(pool[:3], pool[3:], mapping)
    ops.swap_blocks(pool, pool[:5], torch.tensor([[1, 3]]))
    assert pool[:, 0].tolist() == [0, 1, 2, 1, 4, 0]


def test_empty_batches_are_nothing_to_do(ops: Ops) -> None:
    ops.rms_norm(torch.empty(0, 40), torch.empty(0, 40), torch.ones(40), 1e-5)
    ops.silu_and_mul(torch.empty(0, 20), torch.empty(0, 40))
    ops.copy_blocks(torch.zeros(4, 8), torch.empty(0, 2, dtype=torch.int64))
    empty = {"out": torch.empty(0, 4, 32), "query": torch.empty(0, 4, 32), "query_start_loc": int32(0, 0, 0)}
    ops.paged_attention(**(valid_args()["paged_attention"] | empty))


def test_a_sequence_without_queries_may_have_any_blocks() -> None:
    """Padding: its row of the block table is not read."""
    attention(
        block_table=torch.tensor([[1, 2], [2, 0], [99, 99]]).int(), query_start_loc=int32(0, 3, 4, 4), seq_lens=int32(20, 5, 20)
    )
