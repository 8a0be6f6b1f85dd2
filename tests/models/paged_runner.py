"""Runs a model over a paged KV cache kept by hand: what the worker does, in few lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyengine.config import LoadConfig
from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache, LogitsRows
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.weights import load_model
from pyengine.ops import get_ops
from pyengine.worker.step_replay import EagerStepRunner, ReplayedStepRunner, StepRunner

BLOCK_SIZE = 16
NUM_BLOCKS = 64


@dataclass
class PagedRunner:
    """A model and a cache whose blocks are handed out in random order; both stay for all steps."""

    path: Path
    device: str = "cpu"
    dtype: str = "float32"
    quantization: str | None = None  # "gguf": weights as they are; None: dequantised
    repack: bool = False  # quantised weights to 8 bits
    kv_dtype: str | None = None  # dtype by default
    max_replayed_tokens: int = 0  # steps of up to so many tokens are replayed
    tokens: dict[str, list[int]] = field(default_factory=dict)  # whose KV is in the cache
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checkpoint = open_checkpoint(str(self.path))
        arch = checkpoint.arch
        config = LoadConfig(
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            repack=self.repack,
            num_threads=1,
        )
        self.model = load_model(checkpoint, config, get_ops(self.device))
        self.torch_device = torch.device("cuda" if self.device == "cuda" else "cpu")
        shape = (NUM_BLOCKS, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
        dtype = getattr(torch, self.kv_dtype or self.dtype)
        self.caches = []
        for _ in range(arch.num_layers):
            k, v = (torch.full(shape, float("nan"), dtype=dtype, device=self.torch_device) for _ in "kv")
            if self.device == "cpu":  # the CPU pool keeps K dimension-major
                k = k.transpose(2, 3).contiguous().transpose(2, 3)
            self.caches.append(LayerKVCache(k, v))
        self.steps: StepRunner = EagerStepRunner(self.model, self.caches)
        if self.max_replayed_tokens:
            self.steps = ReplayedStepRunner(
                self.model, self.caches, max_num_tokens=self.max_replayed_tokens, max_num_rows=self.max_replayed_tokens
            )
        self.free = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()

    def tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.torch_device)

    def step(self, batch: dict[str, list[int]], wanted: dict[str, int] | None = None) -> dict[str, Tensor]:
        """Run each sequence's new tokens in one batch; logits fp32 [its last wanted tokens, vocab], of all by default."""
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
            query_start_loc=self.tensor(starts, torch.int32),
            seq_lens=self.tensor(seq_lens, torch.int32),
            block_table=self.tensor([table + [0] * (width - len(table)) for table in tables], torch.int32),
            slot_mapping=self.tensor(slots),
        )
        counts = [len(new) if wanted is None else wanted[name] for name, new in batch.items()]
        rows = None if wanted is None else self.logits_rows(metadata, counts)
        hidden = self.steps.forward(self.tensor(ids), self.tensor(positions), metadata, rows)
        parts = self.steps.compute_logits(hidden).cpu().clone().split(counts)
        return dict(zip(batch, parts, strict=True))

    def logits_rows(self, step: AttentionMetadata, counts: list[int]) -> LogitsRows:
        """The last counts[i] tokens of each sequence i."""
        ends = step.query_start_loc[1:].tolist()
        indices = [token for end, count in zip(ends, counts, strict=True) for token in range(end - count, end)]
        kept = [i for i, count in enumerate(counts) if count]
        starts = [sum(counts[:i]) for i in kept] + [len(indices)]
        metadata = AttentionMetadata(
            num_seqs=len(kept),
            num_tokens=len(indices),
            max_query_len=max(counts),
            max_seq_len=step.max_seq_len,
            query_start_loc=self.tensor(starts, torch.int32),
            seq_lens=step.seq_lens[kept],
            block_table=step.block_table[kept],
            slot_mapping=step.slot_mapping[:0],
        )
        return LogitsRows(self.tensor(indices), metadata)
