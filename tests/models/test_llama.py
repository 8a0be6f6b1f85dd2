"""Logits of tiny random checkpoints equal Transformers' in fp32: prefill, decode, mixed batches, variants, rope scalings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from pyengine.config import LoadConfig
from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.weights import load_model
from pyengine.ops import get_ops

BLOCK_SIZE = 16
NUM_BLOCKS = 64
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "odd-sizes": {
        "vocab_size": 509,
        "hidden_size": 66,
        "intermediate_size": 75,
        "head_dim": 120,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    **{f"rope-{name}": {"rope_parameters": {"rope_theta": 10000.0, **scaling}} for name, scaling in ROPE.items()},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "use_sliding_window": False},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "use_sliding_window": False},
}


@dataclass
class PagedRunner:
    """Runs a model over a paged KV cache kept by hand, with shuffled blocks: what the worker does, in few lines."""

    path: Path
    device: str = "cpu"
    dtype: str = "float32"
    tokens: dict[str, list[int]] = field(default_factory=dict)  # whose KV is in the cache
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checkpoint = open_checkpoint(str(self.path))
        arch = checkpoint.arch
        config = LoadConfig(device=self.device, dtype=self.dtype, quantization=None, num_threads=1, seed=0)
        self.model = load_model(checkpoint, config, get_ops(self.device))
        shape = (NUM_BLOCKS, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
        dtype = getattr(torch, self.dtype)
        self.caches = []
        for _ in range(arch.num_layers):
            k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in "kv")
            if self.device == "cpu":  # the CPU pool keeps K dimension-major
                k = k.transpose(2, 3).contiguous().transpose(2, 3)
            self.caches.append(LayerKVCache(k, v))
        self.free = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()

    def step(self, batch: dict[str, list[int]]) -> dict[str, Tensor]:
        """Run each sequence's new tokens in one batch; logits fp32 [its new tokens, vocab]."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, new in batch.items():
            seen, table = self.tokens.setdefault(name, []), self.blocks.setdefault(name, [])
            for token in new:
                if len(seen) == len(table) * BLOCK_SIZE:
                    table.append(self.free.pop())
                positions.append(len(seen))
                slots.append(table[-1] * BLOCK_SIZE + len(seen) % BLOCK_SIZE)
                seen.append(token)
            ids += new
            starts.append(len(ids))
        seq_lens = [len(self.tokens[name]) for name in batch]
        tables = [self.blocks[name] for name in batch]
        width = max(map(len, tables))
        metadata = AttentionMetadata(
            num_seqs=len(batch),
            num_tokens=len(ids),
            max_query_len=max(map(len, batch.values())),
            max_seq_len=max(seq_lens),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), self.caches, metadata)
        logits = self.model.compute_logits(hidden)
        return {name: logits[start:end] for name, start, end in zip(batch, starts, starts[1:], strict=False)}


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(path: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Transformers' logits, fp32 [len(ids), vocab]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, **VARIANTS[variant])
    runner = PagedRunner(path)
    ids, other = random_ids(90, 0), random_ids(40, 1)
    # A prefill in unequal chunks beside another sequence that comes and goes, then decode steps.
    got = [
        runner.step({"a": ids[:37]})["a"],
        runner.step({"b": other[:20], "a": ids[37:70]})["a"],
        runner.step({"a": ids[70:80], "b": other[20:21]})["a"],
        *(runner.step({"b": [other[21 + i]], "a": [ids[80 + i]]})["a"] for i in range(10)),
    ]
    torch.testing.assert_close(torch.cat(got), reference(path, ids), **TOLERANCE)


def test_batch_composition_does_not_change_a_bit(tiny_llama: Path) -> None:
    together, alone = PagedRunner(tiny_llama), PagedRunner(tiny_llama)
    prompts = {str(i): random_ids(5 + 7 * i, i) for i in range(5)}
    mixed = together.step(prompts)
    for name, ids in prompts.items():
        assert torch.equal(mixed[name], alone.step({name: ids})[name])
    mixed = together.step({name: [7] for name in prompts})
    for name in prompts:
        assert torch.equal(mixed[name], alone.step({name: [7]})[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_transformers(dtype: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, dtype=getattr(torch, dtype))
    ids = random_ids(40, 2)
    exact = reference(path, ids)
    got = PagedRunner(path, dtype=dtype).step({"a": ids})["a"]
    theirs = reference(path, ids, getattr(torch, dtype))
    assert got.dtype == torch.float32
    # Both round; ours may be no further from fp32 than twice what Transformers' own rounding costs.
    assert (got - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_emulated_gives_the_cpu_logits(tiny_llama: Path) -> None:
    ids = random_ids(20, 3)
    runners = [PagedRunner(tiny_llama, device=device) for device in ("cpu", "emulated")]
    for batch in ({"a": ids[:16], "b": ids[:3]}, {"a": [ids[16]], "b": [ids[3]]}):
        cpu, emulated = (runner.step(batch) for runner in runners)
        for name in batch:
            torch.testing.assert_close(emulated[name], cpu[name], atol=1e-3, rtol=1e-3)


def test_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, tie_word_embeddings=True)
    runner = PagedRunner(path)
    table = AutoModelForCausalLM.from_pretrained(path).model.embed_tokens.weight
    rows = runner.model.lm_head.rows(torch.arange(VOCAB_SIZE))
    assert torch.equal(rows, table)
    assert "lm_head.weight" not in runner.model.weight_shapes()
