"""Paged attention problems: ragged batches over a shuffled cache whose unused slots hold NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import references
import torch
from kernel_backend import KernelBackend
from references import AttentionOptions
from torch import Tensor

NULL_BLOCK = 0  # padding of block tables; it holds NaN
#: Standard deviation of values. Tensor cores take probabilities in 16 bits: an error of up to 2^-9 of the sum of p |v| (bf16),
#: which has to stay small beside the absolute tolerance.
VALUE_SPREAD = 0.25


@dataclass(frozen=True)
class CaseShape:
    """Sizes and types of one problem. `sequences`: (query_len, seq_len) of each."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # None: dtype
    sliding_window: int = 0
    logit_softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    query_scale: float = 1.0  # larger: softmaxes that are nearly one-hot, and soft-caps that bite
    seed: int = 0


@dataclass
class PagedCase:
    """Tensors of one problem, as the op takes them (contiguous caches; `run` lays them out for a backend)."""

    shape: CaseShape
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    options: AttentionOptions

    def run(self, backend: KernelBackend, *, with_lse: bool = True) -> tuple[Tensor, Tensor]:
        """The backend's output and log-sum-exp (NaN without `with_lse`)."""
        shape = self.shape
        # A slice of a wider tensor: the token stride is not num_heads * head_dim.
        qkv = torch.zeros(len(self.query), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
        query = qkv[:, : shape.num_heads]
        query.copy_(self.query)
        out = torch.full_like(self.query, float("nan"))
        lse = torch.full(self.query.shape[:2], float("nan"))
        backend.ops.paged_attention(
            out,
            query,
            backend.key_cache(self.k_cache),
            self.v_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            max(query_len for query_len, _ in shape.sequences),
            max(seq_len for _, seq_len in shape.sequences),
            self.options.scale,
            sliding_window=self.options.sliding_window,
            logit_softcap=self.options.logit_softcap,
            alibi_slopes=self.options.alibi_slopes,
            sinks=self.options.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            lse=lse if with_lse else None,
        )
        return out, lse

    def reference(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64."""
        return references.paged_attention(
            self.query,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            self.options,
            self.k_scale,
            self.v_scale,
        )


def make_case(shape: CaseShape) -> PagedCase:
    """A random problem of this shape. Each sequence's blocks are scattered; slots that hold no token are NaN."""
    generator = torch.Generator().manual_seed(shape.seed)
    kv_dtype = shape.kv_dtype or shape.dtype
    per_seq = [-(-seq_len // shape.block_size) for _, seq_len in shape.sequences]
    num_blocks = 1 + sum(per_seq) + 2
    order = torch.randperm(num_blocks - 1, generator=generator).to(torch.int32) + 1
    block_table = torch.full((len(per_seq), max(per_seq) + 1), NULL_BLOCK, dtype=torch.int32)
    first = 0
    for seq, count in enumerate(per_seq):
        block_table[seq, :count] = order[first : first + count]
        first += count
    caches = [_random_cache(shape, kv_dtype, spread, num_blocks, block_table, generator) for spread in (1.0, VALUE_SPREAD)]
    query_lens = torch.tensor([query_len for query_len, _ in shape.sequences], dtype=torch.int32)
    starts = torch.zeros(len(per_seq) + 1, dtype=torch.int32)
    starts[1:] = query_lens.cumsum(0)
    query = torch.randn(int(starts[-1]), shape.num_heads, shape.head_dim, generator=generator) * shape.query_scale
    options = AttentionOptions(
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        logit_softcap=shape.logit_softcap,
        alibi_slopes=2.0 ** -torch.arange(1, shape.num_heads + 1).float() if shape.alibi else None,
        sinks=torch.randn(shape.num_heads, generator=generator) if shape.sinks else None,
    )
    seq_lens = torch.tensor([seq_len for _, seq_len in shape.sequences], dtype=torch.int32)
    (k_cache, k_scale), (v_cache, v_scale) = caches
    return PagedCase(shape, query.to(shape.dtype), k_cache, v_cache, k_scale, v_scale, block_table, starts, seq_lens, options)


@lru_cache(maxsize=512)
def solved_case(shape: CaseShape, bf16_query: bool = False) -> tuple[PagedCase, Tensor, Tensor]:
    """A problem with its output and log-sum-exp in float64: once for all backends. Not to be changed.

    With `bf16_query`, the solution of the query rounded to bf16.
    """
    case = make_case(shape)
    exact = replace(case, query=case.query.bfloat16()) if bf16_query else case
    return case, *exact.reference()


def multiplies_in_bf16(backend: KernelBackend, shape: CaseShape) -> bool:
    """Whether queries and weights are rounded to bf16 on their way into products, whatever the query's type is."""
    return backend.isa == "amx" and (shape.kv_dtype or shape.dtype) == torch.bfloat16 and shape.block_size % 16 == 0


def _random_cache(
    shape: CaseShape, dtype: torch.dtype, spread: float, num_blocks: int, block_table: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    size = (num_blocks, shape.num_kv_heads, shape.block_size)
    unused = torch.ones(num_blocks, shape.block_size, dtype=torch.bool)
    for seq, (_, seq_len) in enumerate(shape.sequences):
        for position in range(seq_len):
            block = int(block_table[seq, position // shape.block_size])
            unused[block, position % shape.block_size] = False
    if dtype == torch.int8:
        cache = torch.randint(-127, 128, (*size, shape.head_dim), generator=generator).to(torch.int8)
        scale = torch.rand(*size, generator=generator) * 0.02 + 0.005
        return cache, scale.masked_fill(unused[:, None, :], float("nan"))
    values = torch.randn(*size, shape.head_dim, generator=generator) * spread
    values = values.masked_fill(unused[:, None, :, None], float("nan"))
    fp8_scale = torch.rand(shape.num_kv_heads, generator=generator) * 0.5 + 0.5
    return values.to(dtype), fp8_scale if dtype.itemsize == 1 else None
