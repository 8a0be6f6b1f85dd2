"""reshape_and_cache, copy_blocks and swap_blocks on every backend: exact, and nothing else written."""

from __future__ import annotations

import pytest
import references
import torch
from checks import as_bits, assert_close, assert_same_bits, pairwise, poison
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_backend import KernelBackend
from torch import Tensor

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

NUM_TOKENS = 42
FLOAT_TYPES = [(FP32, FP32), (FP16, FP16), (BF16, BF16)]
FP8_TYPES = [(FP32, E4M3), (FP16, E4M3), (BF16, E4M3), (FP32, E5M2), (BF16, E5M2)]
GRID = pairwise([64, 80, 256], [8, 16, 32], [1, 3, 8], FLOAT_TYPES)
FP8_GRID = pairwise([64, 80, 256], [8, 16, 32], FP8_TYPES)
INT8_GRID = pairwise([64, 80, 256], [8, 16, 32], [FP32, FP16, BF16])


def random_slots(num_tokens: int, num_slots: int, seed: int) -> Tensor:
    """Distinct slots for most tokens, -1 for some."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens]
    skipped = torch.rand(num_tokens, generator=generator) < 0.15
    return slots.masked_fill(skipped, -1)


def random_kv(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """key, value [num_tokens, num_kv_heads, head_dim], slices of one wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, 5 * num_kv_heads, head_dim, generator=generator).to(dtype)
    return qkv[:, 3 * num_kv_heads : 4 * num_kv_heads], qkv[:, 4 * num_kv_heads :]


def scatter(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """A copy of cache [num_blocks, num_kv_heads, block_size, ...] with each token's row at its slot."""
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // cache.shape[2], :, slot % cache.shape[2]] = rows[token]
    return expected


def written(cache: Tensor, slots: Tensor) -> Tensor:
    """[tokens that were written, num_kv_heads, ...] of the cache, in the order of slots."""
    used = slots[slots >= 0]
    return cache[used // cache.shape[2], :, used % cache.shape[2]]


@pytest.mark.parametrize(("head_dim", "block_size", "num_kv_heads", "types"), GRID)
def test_reshape_and_cache(
    backend: KernelBackend, head_dim: int, block_size: int, num_kv_heads: int, types: tuple[torch.dtype, torch.dtype]
) -> None:
    num_blocks = -(-64 // block_size) + 1
    slots = random_slots(NUM_TOKENS, num_blocks * block_size, seed=head_dim)
    key, value = random_kv(NUM_TOKENS, num_kv_heads, head_dim, types[0], seed=block_size)
    k_cache = backend.key_cache(poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=types[1]))
    v_cache = poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=types[1])
    expected = scatter(k_cache, key, slots), scatter(v_cache, value, slots)
    backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


def prompt_slots(block_size: int, lengths: list[int], first: int, seed: int) -> Tensor:
    """Slots of sequences whose tokens follow each other from place `first` of a block on, in blocks in any order."""
    blocks_each = [-(-(first + length) // block_size) for length in lengths]
    table = torch.randperm(sum(blocks_each), generator=torch.Generator().manual_seed(seed))
    table, _ = table.sort() if seed % 2 == 0 else (table, None)  # also blocks that are neighbours
    places = []
    for length, blocks in zip(lengths, table.split(blocks_each), strict=True):
        positions = torch.arange(first, first + length)
        places.append(blocks[positions // block_size] * block_size + positions % block_size)
    return torch.cat(places)


@pytest.mark.parametrize("types", [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (BF16, FP32)])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_kv_heads", "lengths", "first"),
    [(64, 16, 3, [70, 1, 33], 5), (16, 32, 1, [40, 20], 0), (80, 8, 2, [9, 50], 7), (320, 16, 1, [40], 3)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_reshape_and_cache_of_prompts(
    cpu_backend: KernelBackend,
    head_dim: int,
    block_size: int,
    num_kv_heads: int,
    lengths: list[int],
    first: int,
    seed: int,
    types: tuple[torch.dtype, torch.dtype],
) -> None:
    slots = prompt_slots(block_size, lengths, first, seed)
    num_blocks = int(slots.max()) // block_size + 1
    slots[len(slots) // 2] = -1
    key, value = random_kv(len(slots), num_kv_heads, head_dim, types[0], seed=block_size)
    k_cache = cpu_backend.key_cache(poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=types[1]))
    v_cache = poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=types[1])
    expected = scatter(k_cache, key.to(types[1]), slots), scatter(v_cache, value.to(types[1]), slots)
    cpu_backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


@pytest.mark.parametrize("types", [(FP32, BF16), (FP32, FP16), (BF16, FP32), (BF16, FP16)])
def test_reshape_and_cache_converts(cpu_backend: KernelBackend, types: tuple[torch.dtype, torch.dtype]) -> None:
    slots = random_slots(NUM_TOKENS, 64, seed=1)
    key, value = random_kv(NUM_TOKENS, 2, 48, types[0], seed=2)
    k_cache = cpu_backend.key_cache(poison(4, 2, 16, 48, dtype=types[1]))
    v_cache = poison(4, 2, 16, 48, dtype=types[1])
    expected = scatter(k_cache, key.to(types[1]), slots), scatter(v_cache, value.to(types[1]), slots)
    cpu_backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


@pytest.mark.parametrize(("head_dim", "block_size", "types"), FP8_GRID)
def test_reshape_and_cache_fp8(
    backend: KernelBackend, head_dim: int, block_size: int, types: tuple[torch.dtype, torch.dtype]
) -> None:
    num_blocks, num_kv_heads = -(-64 // block_size), 4
    slots = random_slots(NUM_TOKENS, num_blocks * block_size, seed=head_dim)
    key, value = random_kv(NUM_TOKENS, num_kv_heads, head_dim, types[0], seed=block_size)
    # Powers of two, so that the quotient is exact; small ones bring values beyond FP8's range.
    k_scale, v_scale = torch.tensor([1.0, 0.5, 2.0**-9, 4.0]), torch.tensor([2.0, 1.0, 0.25, 2.0**-16])
    k_cache = backend.key_cache(poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=types[1]))
    v_cache = poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=types[1])
    k_codes = references.quantize_fp8(key.float() / k_scale[:, None], types[1])
    v_codes = references.quantize_fp8(value.float() / v_scale[:, None], types[1])
    expected = scatter(k_cache, k_codes, slots), scatter(v_cache, v_codes, slots)
    backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots, k_scale, v_scale)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_rounding_of_every_half(backend: KernelBackend, dtype: torch.dtype) -> None:
    """Every fp16 value, infinities and NaN among them: nearest even, saturated at the largest finite value."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(1024, 1, 64)
    k_cache = backend.key_cache(torch.zeros(64, 1, 16, 64).to(dtype))
    v_cache = torch.zeros(64, 1, 16, 64).to(dtype)
    ones = torch.ones(1)
    backend.ops.reshape_and_cache(halves, halves, k_cache, v_cache, torch.arange(1024), ones, ones)
    limit = references.FP8_MAX[dtype]
    expected = halves.float().clamp(-limit, limit).to(dtype).reshape(64, 1, 16, 64)
    for cache in (k_cache, v_cache):
        assert torch.equal(cache.float().isnan(), expected.float().isnan())
        finite = ~expected.float().isnan()
        assert torch.equal(as_bits(cache).view(expected.shape)[finite], as_bits(expected).view(expected.shape)[finite])


@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), INT8_GRID)
def test_reshape_and_cache_int8(backend: KernelBackend, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    num_blocks, num_kv_heads = -(-64 // block_size), 3
    slots = random_slots(NUM_TOKENS, num_blocks * block_size, seed=head_dim)
    key, value = random_kv(NUM_TOKENS, num_kv_heads, head_dim, dtype, seed=block_size)
    key[3], value[5] = 0, 1e-30
    size = (num_blocks, num_kv_heads, block_size)
    k_cache = backend.key_cache(poison(*size, head_dim, dtype=INT8))
    v_cache = poison(*size, head_dim, dtype=INT8)
    scales = poison(*size, dtype=FP32), poison(*size, dtype=FP32)
    before = k_cache.clone(), v_cache.clone()
    backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots, *scales)
    for x, cache, old, scale in zip((key, value), (k_cache, v_cache), before, scales, strict=True):
        x = x[slots >= 0].to(torch.float64)
        assert_close(written(scale, slots), x.abs().amax(dim=-1) / 127, 0, 1e-6)
        codes = written(cache, slots).to(torch.float64)
        step = x.abs().amax(dim=-1, keepdim=True) / 127
        assert ((codes * step - x).abs() <= step * 0.50001).all()  # nearest
        assert codes.abs().max() <= 127
        assert torch.equal(
            scatter(cache, torch.full((NUM_TOKENS, 1, 1), 5, dtype=INT8), slots),
            scatter(old, torch.full((NUM_TOKENS, 1, 1), 5, dtype=INT8), slots),
        )
        unwritten = scatter(scale, torch.full((NUM_TOKENS, 1), float("nan")), slots)
        assert unwritten.isnan().all()


def test_int8_rounds_to_even(backend: KernelBackend) -> None:
    row = torch.zeros(1, 1, 64)
    row[0, 0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    k_cache = backend.key_cache(torch.zeros(1, 1, 16, 64, dtype=INT8))
    v_cache = torch.zeros(1, 1, 16, 64, dtype=INT8)
    scales = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    backend.ops.reshape_and_cache(row, row, k_cache, v_cache, torch.tensor([5]), *scales)
    for cache in (k_cache, v_cache):
        assert cache[0, 0, 5, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_int8_takes_tiny_rows_for_zeros(backend: KernelBackend) -> None:
    """127 divided by the largest magnitude would be infinite."""
    rows = torch.tensor([1e-38, 2.0**-101, 2.0**-100]).view(3, 1, 1).repeat(1, 1, 64)
    k_cache = backend.key_cache(torch.ones(1, 1, 16, 64, dtype=INT8))
    v_cache = torch.ones(1, 1, 16, 64, dtype=INT8)
    scales = torch.ones(1, 1, 16), torch.ones(1, 1, 16)
    backend.ops.reshape_and_cache(rows, rows, k_cache, v_cache, torch.tensor([5, 6, 7]), *scales)
    for cache, scale in zip((k_cache, v_cache), scales, strict=True):
        assert cache[0, 0, 5:8].unique(dim=1).tolist() == [[0], [0], [127]]
        assert scale[0, 0, 5:7].tolist() == [0, 0]
        assert_close(scale[0, 0, 7], torch.tensor(2.0**-100 / 127), 0, 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_int8_shows_bad_values(backend: KernelBackend, bad: float) -> None:
    row = torch.randn(1, 1, 64)
    row[0, 0, 9] = bad
    k_cache = backend.key_cache(torch.zeros(1, 1, 16, 64, dtype=INT8))
    v_cache = torch.zeros(1, 1, 16, 64, dtype=INT8)
    scales = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    backend.ops.reshape_and_cache(row, row, k_cache, v_cache, torch.tensor([5]), *scales)
    for scale in scales:
        assert not torch.isfinite(scale[0, 0, 5])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reshape_and_cache_random(backend: KernelBackend, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(0, 90))
    block_size = data.draw(st.sampled_from([8, 16, 32, 64]))
    num_blocks = -(-num_tokens // block_size) + data.draw(st.integers(1, 3))
    num_kv_heads = data.draw(st.integers(1, 5))
    head_dim = data.draw(st.sampled_from([32, 64, 96, 112, 120, 128, 192]))
    dtype = data.draw(st.sampled_from([FP32, FP16, BF16]))
    seed = data.draw(st.integers(0, 1000))
    slots = random_slots(num_tokens, num_blocks * block_size, seed)
    key, value = random_kv(num_tokens, num_kv_heads, head_dim, dtype, seed)
    k_cache = backend.key_cache(poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype))
    v_cache = poison(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype)
    expected = scatter(k_cache, key, slots), scatter(v_cache, value, slots)
    backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


def test_reshape_and_cache_many_tokens(cpu_backend: KernelBackend) -> None:
    """Enough tokens for several threads."""
    slots = torch.randperm(1024)[:1000]
    key, value = random_kv(1000, 3, 64, FP32, seed=0)
    k_cache = cpu_backend.key_cache(poison(64, 3, 16, 64, dtype=FP32))
    v_cache = poison(64, 3, 16, 64, dtype=FP32)
    expected = scatter(k_cache, key, slots), scatter(v_cache, value, slots)
    cpu_backend.ops.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


# block elements: odd sizes, one unit of work, several
@pytest.mark.parametrize("block_shape", [(3,), (2, 2, 5, 16), (4, 2, 3, 16 * 64), (300, 301)])
@pytest.mark.parametrize("dtype", [FP32, BF16, INT8])
def test_copy_blocks(backend: KernelBackend, block_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = torch.randint(-128, 128, (12, *block_shape)).to(dtype)
    mapping = torch.tensor([[0, 5], [0, 7], [3, 1], [11, 2]])
    expected = pool.clone()
    expected[mapping[:, 1]] = pool[mapping[:, 0]]
    backend.ops.copy_blocks(pool, mapping)
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("block_shape", [(3,), (2, 2, 5, 16), (300, 301)])
@pytest.mark.parametrize("dtype", [FP32, FP16, INT8])
def test_swap_blocks(backend: KernelBackend, block_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    src = torch.randint(-128, 128, (9, *block_shape)).to(dtype)
    dst = torch.randint(-128, 128, (6, *block_shape)).to(dtype)
    mapping = torch.tensor([[8, 0], [2, 5], [2, 3]])
    expected, source = dst.clone(), src.clone()
    expected[mapping[:, 1]] = src[mapping[:, 0]]
    backend.ops.swap_blocks(src, dst, mapping)
    assert_same_bits(dst, expected)
    assert_same_bits(src, source)


def test_no_blocks_to_copy(backend: KernelBackend) -> None:
    pool, other = torch.randn(4, 2, 6), torch.randn(3, 2, 6)
    before = pool.clone(), other.clone()
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    backend.ops.copy_blocks(pool, nothing)
    backend.ops.swap_blocks(pool, other, nothing)
    assert_same_bits(pool, before[0])
    assert_same_bits(other, before[1])
