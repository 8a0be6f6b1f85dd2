"""Paged attention: decode by bytes, prefill by operations, against torch's scaled_dot_product_attention on gathered KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache
from pyengine.worker.backend import KVCacheSpec
from pyengine.worker.backends.attention_planner import AttentionPlanner
from pyengine.worker.kv_pool import BlockPool

from bench_device import BenchDevice, Result

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass
class Problem:
    """One launch: sequences of (query_len, seq_len), over a cache whose blocks are shuffled."""

    heads: Heads
    query: Tensor  # [num_tokens, num_heads, head_dim]
    out: Tensor
    cache: LayerKVCache
    metadata: AttentionMetadata

    def run(self, device: BenchDevice) -> None:
        m = self.metadata
        device.ops.paged_attention(
            self.out,
            self.query,
            self.cache.k,
            self.cache.v,
            m.block_table,
            m.query_start_loc,
            m.seq_lens,
            m.max_query_len,
            m.max_seq_len,
            self.heads.head_dim**-0.5,
            k_scale=self.cache.k_scale,
            v_scale=self.cache.v_scale,
            plan=m.plan,
            workspace=m.workspace,
        )


def random_cache(device: BenchDevice, heads: Heads, num_blocks: int, kv_dtype: str) -> LayerKVCache:
    """A layer's cache full of values of about unit size."""
    spec = KVCacheSpec(
        num_layers=1, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, block_size=BLOCK_SIZE, dtype=kv_dtype
    )
    pool = BlockPool(spec, num_blocks, device=device.device)
    for rows in pool.data.split(4096):  # in pieces: the fp32 draws of a whole pool need not fit
        if kv_dtype == "int8":
            rows.copy_(torch.randint(-127, 128, rows.shape, device=device.device))
        else:
            rows.copy_(torch.randn(rows.shape, device=device.device) * 0.5)
    if pool.scales is not None:
        pool.scales.uniform_(0.005, 0.01)
    return pool.layer(0)


def make_problem(
    device: BenchDevice, heads: Heads, sequences: Sequence[tuple[int, int]], kv_dtype: str = "bfloat16"
) -> Problem:
    """A problem with its plan."""
    blocks = [-(-seq_len // BLOCK_SIZE) for _, seq_len in sequences]
    order = torch.randperm(sum(blocks)) + 1  # block 0 stays the null block
    table = torch.zeros(len(sequences), max(blocks), dtype=torch.int32)
    first = 0
    for seq, count in enumerate(blocks):
        table[seq, :count] = order[first : first + count]
        first += count
    query_lens, seq_lens = [q for q, _ in sequences], [s for _, s in sequences]
    starts = torch.zeros(len(sequences) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens).cumsum(0)
    num_tokens = sum(query_lens)
    query = torch.randn(num_tokens, heads.num_heads, heads.head_dim, device=device.device).to(torch.bfloat16)
    metadata = AttentionMetadata(
        num_seqs=len(sequences),
        num_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc=starts.to(device.device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device.device),
        block_table=table.to(device.device),
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    AttentionPlanner(device.device).fill(
        metadata,
        query_lens,
        seq_lens,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
    )
    return Problem(heads, query, torch.empty_like(query), random_cache(device, heads, sum(blocks) + 1, kv_dtype), metadata)


def gathered(problem: Problem, cache: Tensor, seq_len: int) -> Tensor:
    """Keys or values of all sequences, equally long: [num_seqs, num_kv_heads, seq_len, head_dim], bf16."""
    table = problem.metadata.block_table[:, : -(-seq_len // BLOCK_SIZE)].long()
    rows = cache[table].transpose(1, 2).flatten(2, 3)  # [num_seqs, num_kv_heads, blocks * block_size, head_dim]
    return rows[:, :, :seq_len].to(torch.bfloat16)


def sdpa(device: BenchDevice, problem: Problem, query_len: int, seq_len: int, repeat: int) -> tuple[float, float]:
    """torch's time on gathered keys and values, and the largest difference from it. Queries start at position 0 or are one."""
    keys, values = (gathered(problem, cache, seq_len) for cache in (problem.cache.k, problem.cache.v))
    query = (
        problem.query.unflatten(0, (-1, query_len)).transpose(1, 2).contiguous()
    )  # [num_seqs, num_heads, query_len, head_dim]

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=query_len > 1, scale=problem.heads.head_dim**-0.5, enable_gqa=True
        )

    seconds = device.time(run, repeat)
    problem.run(device)
    expected = run().transpose(1, 2).flatten(0, 1)
    return seconds, (problem.out.float() - expected.float()).abs().max().item()


def visible_pairs(sequences: Sequence[tuple[int, int]]) -> int:
    """Pairs of a query and a key that it sees, all sequences."""
    return sum(q * s - q * (q - 1) // 2 for q, s in sequences)


def bench_decode(device: BenchDevice, bandwidth: float) -> Iterator[Result]:
    """One query token a sequence. Bytes: keys, values, scales, queries, outputs."""
    heads = device.pick(Heads(32, 8, 128), Heads(4, 2, 64))
    batches = device.pick(
        {
            "64 x 4096": [(1, 4096)] * 64,
            "16 x 16384": [(1, 16384)] * 16,
            "1 x 131072": [(1, 131072)],
            "256 x 1024": [(1, 1024)] * 256,
        },
        {"2 x 40": [(1, 40)] * 2, "1 x 600": [(1, 600)]},
    )
    ragged = device.pick([(1, 97 + 61 * i) for i in range(128)], [(1, 20), (1, 33)])
    for kv_dtype, element in (("bfloat16", 2), ("fp8_e4m3", 1), ("int8", 1)):
        for name, sequences in {**batches, "ragged": ragged}.items():
            problem = make_problem(device, heads, sequences, kv_dtype)
            tokens = sum(s for _, s in sequences)
            scales = 8 * heads.num_kv_heads * tokens if kv_dtype == "int8" else 0
            moved = 2 * tokens * heads.num_kv_heads * heads.head_dim * element + scales + 4 * problem.query.numel()
            repeat = 15
            seconds = device.time(lambda problem=problem: problem.run(device), repeat)
            baseline = error = None
            if kv_dtype == "bfloat16" and name != "ragged":
                baseline, error = sdpa(device, problem, 1, sequences[0][1], repeat)
            yield Result(
                "decode",
                f"{kv_dtype}, {name}",
                seconds,
                bytes=moved,
                share=moved / seconds / bandwidth,
                baseline="torch SDPA" if baseline else "",
                baseline_seconds=baseline,
                error=error,
            )


def bench_prefill(device: BenchDevice, rate: float) -> Iterator[Result]:
    """Whole prompts and chunks of them. Operations: 4 head_dim for each visible pair and head."""
    heads = device.pick(Heads(32, 8, 128), Heads(4, 2, 64))
    batches = device.pick(
        {"4 x 2048": [(2048, 2048)] * 4, "1 x 8192": [(8192, 8192)], "512 of 8192": [(512, 8192)]},
        {"2 x 20": [(20, 20)] * 2, "20 of 40": [(20, 40)]},
    )
    for kv_dtype in ("bfloat16", "fp8_e4m3"):
        for name, sequences in batches.items():
            problem = make_problem(device, heads, sequences, kv_dtype)
            flops = 4 * heads.head_dim * heads.num_heads * visible_pairs(sequences)
            seconds = device.time(lambda problem=problem: problem.run(device))
            baseline = error = None
            query_len, seq_len = sequences[0]
            if kv_dtype == "bfloat16" and query_len == seq_len:
                baseline, error = sdpa(device, problem, query_len, seq_len, 15)
            yield Result(
                "prefill",
                f"{kv_dtype}, {name}",
                seconds,
                flops=flops,
                share=flops / seconds / rate,
                baseline="torch SDPA" if baseline else "",
                baseline_seconds=baseline,
                error=error,
            )
