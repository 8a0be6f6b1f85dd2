"""Tensors in huge pages: disjoint, aligned, untouched until used, and given back."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyengine.ops.host_memory import HUGE_PAGE, ChunkAllocator, empty_pages


def memory_pages(field: int) -> int:
    """A number of /proc/self/statm in bytes: 0 is the address space, 1 is what is resident."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * 4096


def byte_range(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize


def assert_disjoint(tensors: list[Tensor]) -> None:
    ranges = sorted(byte_range(tensor) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def test_pages_are_aligned_zero_and_writable() -> None:
    memory = empty_pages((3, HUGE_PAGE + 5), torch.uint8)
    assert memory.shape == (3, HUGE_PAGE + 5)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert not memory.any()
    memory.fill_(7)
    assert (memory == 7).all()


def test_pages_are_not_touched_until_used() -> None:
    before = memory_pages(1)
    memory = empty_pages((512, HUGE_PAGE // 4), torch.float32)
    assert memory_pages(1) - before < 16 * HUGE_PAGE
    memory[100] = 1.0
    assert memory_pages(1) - before < 20 * HUGE_PAGE
    assert memory[100].all()


def test_pages_go_back_with_the_last_view() -> None:
    before = memory_pages(0)
    view = empty_pages((512 * HUGE_PAGE,), torch.uint8)[100:200]
    assert memory_pages(0) - before >= 512 * HUGE_PAGE
    assert not view.any()
    del view
    assert memory_pages(0) - before < 64 * HUGE_PAGE


def test_more_than_there_is() -> None:
    with pytest.raises(OSError, match="memory"):
        empty_pages((2**58,), torch.uint8)


def test_tensors_share_a_chunk_without_overlap() -> None:
    allocator = ChunkAllocator(4 * HUGE_PAGE)
    shapes = [(3,), (5, 7), (100, 100), (1,), (1000, 300), (2, 3, 4), (1000, 900)]
    tensors = []
    for index, shape in enumerate(shapes * 3):
        dtype = [torch.float32, torch.bfloat16, torch.uint8][index % 3]
        tensor = allocator.empty(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(index)
        tensors.append(tensor)
    assert_disjoint(tensors)
    assert all((tensor == index).all() for index, tensor in enumerate(tensors))


def test_a_large_tensor_gets_its_own_pages() -> None:
    allocator = ChunkAllocator(HUGE_PAGE)
    small, large = allocator.empty((8,), torch.float32), allocator.empty((HUGE_PAGE,), torch.float32)
    assert large.data_ptr() % HUGE_PAGE == 0
    assert_disjoint([small, large, allocator.empty((8,), torch.float32)])


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    assert ChunkAllocator().empty(shape, torch.float32).shape == shape
    assert empty_pages(shape, torch.float32).shape == shape


def test_a_chunk_outlives_its_allocator() -> None:
    tensor = ChunkAllocator(HUGE_PAGE).empty((1000,), torch.float32)
    tensor.fill_(3.0)
    assert tensor.sum() == 3000.0


def test_an_allocator_keeps_no_chunk() -> None:
    allocator = ChunkAllocator(512 * HUGE_PAGE)
    before = memory_pages(0)
    tensors = [allocator.empty((100,), torch.float32) for _ in range(3)]
    assert memory_pages(0) - before >= 512 * HUGE_PAGE
    tensors.clear()
    assert memory_pages(0) - before < 64 * HUGE_PAGE
    assert allocator.empty((100,), torch.float32).data_ptr() % HUGE_PAGE == 0  # the next one starts another


def test_many_threads() -> None:
    allocator = ChunkAllocator(HUGE_PAGE)
    tensors: list[Tensor] = []

    def allocate() -> None:
        for size in range(1, 200):
            tensors.append(allocator.empty((size * 10,), torch.float32))

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tensors) == 4 * 199
    assert_disjoint(tensors)
