"""Host memory for large tensors that kernels stream through: in huge pages, where the system has them.

With 4 KiB pages, the address translation of weights and KV cache takes a share of a decode step's time that can be had back.
"""

from __future__ import annotations

import errno
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 * 1024 * 1024  # bytes
_ALIGNMENT = 64  # of tensors inside a chunk, bytes: a cache line


class _Pages(mmap.mmap):
    """Untouched (zero) anonymous memory that asks for huge pages. A system without them gives ordinary ones.

    Raises:
        OSError: there is not so much memory.
    """

    start: int  # of the first huge page, bytes from the mapping's own start

    def __new__(cls, num_bytes: int) -> _Pages:
        # One page more, for the system aligns to 4 KiB only.
        pages = super().__new__(cls, -1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                if error.errno != errno.EINVAL:  # which a kernel that was built without them says
                    raise
        pages.start = -torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
        return pages

    def cut(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor at `offset` bytes after the first huge page. It keeps the mapping alive."""
        values = torch.frombuffer(self, dtype=dtype, offset=self.start + offset, count=math.prod(shape))
        return values.view(*shape)


def empty_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor in pages of its own, not written: each page is given when it is first used, and reads as zeros.

    It starts at a huge page, and the memory goes back when it and all its views are gone.

    Raises:
        OSError: there is not so much memory.
    """
    if not math.prod(shape):
        return torch.empty(*shape, dtype=dtype)
    return _Pages(math.prod(shape) * dtype.itemsize).cut(0, shape, dtype)


class ChunkAllocator:
    """Cuts tensors one after another from chunks of huge pages, so that small ones share them. Threads may share it.

    A chunk lives as long as any tensor in it, and no longer: the allocator itself keeps none.

    Args:
        chunk_bytes: of a chunk; a tensor of more than half of that gets pages of its own.
    """

    def __init__(self, chunk_bytes: int = 32 * HUGE_PAGE) -> None:
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._chunk: weakref.ref[_Pages] | None = None  # the one that is being filled
        self._used = 0  # bytes of it

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor whose values are undefined, aligned to 64 bytes.

        Raises:
            OSError: there is not so much memory.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0 or num_bytes > self._chunk_bytes // 2:
            return empty_pages(shape, dtype)
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if chunk is None or start + num_bytes > self._chunk_bytes:
                chunk, start = _Pages(self._chunk_bytes), 0
                self._chunk = weakref.ref(chunk)
            self._used = start + num_bytes
            return chunk.cut(start, shape, dtype)
