"""The memory of a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.layers.attention_metadata import LayerKVCache
from pyengine.ops.host_memory import empty_pages
from pyengine.worker.backend import KVCacheSpec

CACHE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


class BlockPool:
    """A `KVPool`: one tensor for all blocks and layers, so that copying or swapping a block moves one contiguous piece.

    The memory is reserved and not written: the operating system gives each page when it is first used, on CPUs in huge pages.

    Args:
        spec: shape and type.
        num_blocks: rows, the null block included.
        device: where the pool lives.
        pin_memory: page-locked host memory, which a GPU copies from and to directly.
        k_dim_major: K lies [head_dim, block_size] inside a block, as the CPU kernels want it; else [block_size, head_dim].

    Raises:
        OSError, RuntimeError: there is not so much memory on the host, or on a GPU.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        device: torch.device,
        pin_memory: bool = False,
        k_dim_major: bool = False,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, spec.block_size)
        data_shape = (*shape[:-1], spec.block_size * spec.head_dim)
        dtype = CACHE_DTYPES[spec.dtype]
        self.data: Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim]
        if device.type == "cpu" and not pin_memory:
            self.data = empty_pages(data_shape, dtype)
        else:
            self.data = torch.empty(data_shape, dtype=dtype, device=device, pin_memory=pin_memory)
        self.scales: Tensor | None = None  # fp32 [num_blocks, num_layers, 2, num_kv_heads, block_size]
        if spec.dtype == "int8":
            self.scales = torch.empty(shape, dtype=torch.float32, device=device, pin_memory=pin_memory)
        self._k_dim_major = k_dim_major

    def layer(self, index: int) -> LayerKVCache:
        """The views [num_blocks, num_kv_heads, block_size, head_dim] that layer `index` reads and writes."""
        spec = self.spec
        k, v = self.data[:, index, 0], self.data[:, index, 1]  # [num_blocks, num_kv_heads, block_size * head_dim]
        if self._k_dim_major:
            k = k.unflatten(2, (spec.head_dim, spec.block_size)).transpose(2, 3)
        else:
            k = k.unflatten(2, (spec.block_size, spec.head_dim))
        v = v.unflatten(2, (spec.block_size, spec.head_dim))
        if self.scales is None:
            return LayerKVCache(k, v)
        return LayerKVCache(k, v, self.scales[:, index, 0], self.scales[:, index, 1])
