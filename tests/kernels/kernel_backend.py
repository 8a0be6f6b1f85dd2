"""One set of ops that kernel tests run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

CPU_ISAS = ("scalar", "avx2", "avx512")
#: Those of the quantised kernels, and of attention and linear; avx512_vnni and amx take every other kernel from avx512.
QUANTIZED_ISAS = (*CPU_ISAS, "avx512_vnni", "amx")
ATTENTION_ISAS = (*CPU_ISAS, "amx")


@dataclass(frozen=True)
class KernelBackend:
    """One set of ops, with the instruction set that was forced for it."""

    name: str
    ops: Any  # an Ops, or one that mirrors CPU tensors to a device
    isa: str | None  # None: not a CPU backend

    @property
    def is_cpu(self) -> bool:
        return self.isa is not None

    @property
    def is_slow(self) -> bool:
        """Whether threads are emulated: such a backend gets the smaller problems only."""
        return self.name in ("emulated", "mirror")

    def key_cache(self, cache: Tensor) -> Tensor:
        """`cache` [num_blocks, num_kv_heads, block_size, head_dim] in the layout of keys that this backend takes."""
        return cache.transpose(2, 3).contiguous().transpose(2, 3) if self.is_cpu else cache.contiguous()
