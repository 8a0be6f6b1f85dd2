"""KV pools, copies, swaps, streams and events of the backends that run here."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pyengine.ops import load_core
from pyengine.worker.backend import Backend, KVCacheSpec, KVPool
from pyengine.worker.backends import create_backend
from pyengine.worker.kv_pool import CACHE_DTYPES, BlockPool

DEVICES = ("cpu", "emulated")


def make_spec(dtype: str = "float32", **changes: int) -> KVCacheSpec:
    return KVCacheSpec(**({"num_layers": 3, "num_kv_heads": 2, "head_dim": 32, "block_size": 16} | changes), dtype=dtype)


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return create_backend(request.param, 2)


def fill(pool: KVPool) -> None:
    """Every block, layer and head gets bytes of its own."""
    generator = torch.Generator().manual_seed(pool.num_blocks)
    raw = pool.data.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    if pool.scales is not None:
        pool.scales.copy_(torch.rand(pool.scales.shape, generator=generator))


def block(pool: KVPool, index: int) -> tuple[bytes, bytes]:
    scales = b"" if pool.scales is None else pool.scales[index].numpy().tobytes()
    return pool.data[index].view(torch.uint8).numpy().tobytes(), scales


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_pool_is_block_major(backend: Backend, dtype: str) -> None:
    spec = make_spec(dtype)
    pool = backend.allocate_pool(spec, 5, host=False)
    assert pool.data.shape == (5, 3, 2, 2, 16 * 32)
    assert pool.data.is_contiguous()
    assert (pool.scales is not None) == (dtype == "int8")
    element = pool.data.element_size()
    for index in range(3):
        layer = pool.layer(index)
        for part, view in enumerate((layer.k, layer.v)):
            assert view.shape == (5, 2, 16, 32)
            assert view.data_ptr() == pool.data[0, index, part].data_ptr()
            assert view.stride(0) == pool.data.stride(0)
            assert view.stride(1) == 16 * 32
        assert layer.v.stride()[2:] == (32, 1)
        assert layer.k.stride()[2:] == ((1, 16) if backend.name == "cpu" else (32, 1))
        if layer.k_scale is not None and layer.v_scale is not None and pool.scales is not None:
            assert layer.k_scale.shape == layer.v_scale.shape == (5, 2, 16)
            assert layer.v_scale.data_ptr() == pool.scales[0, index, 1].data_ptr()
    # The last element of the last view is the last of the pool: nothing lies between or beyond.
    last = pool.layer(2).v[4, 1, 15, 31]
    assert last.data_ptr() + element == pool.data.data_ptr() + pool.data.numel() * element


def test_new_keys_and_values_land_in_their_blocks(backend: Backend) -> None:
    pool = backend.allocate_pool(make_spec(), 4, host=False)
    pool.data.zero_()
    key, value = torch.rand(2, 2, 32), torch.rand(2, 2, 32)
    layer = pool.layer(1)
    backend.ops.reshape_and_cache(key, value, layer.k, layer.v, torch.tensor([2 * 16 + 5, 3 * 16]))
    assert torch.equal(layer.k[2, :, 5], key[0])
    assert torch.equal(layer.v[3, :, 0], value[1])
    assert int((pool.data != 0).any(dim=-1).sum()) == 8  # 2 blocks, 1 layer, K and V, 2 heads
    assert bool((pool.data[2:, 1] != 0).any(dim=-1).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3", "int8"])
def test_blocks_are_copied_whole(backend: Backend, dtype: str) -> None:
    pool = backend.allocate_pool(make_spec(dtype), 6, host=False)
    fill(pool)
    before = [block(pool, i) for i in range(6)]
    backend.copy_blocks(pool, [(1, 4), (3, 2)])
    after = [block(pool, i) for i in range(6)]
    assert after == [before[0], before[1], before[3], before[3], before[1], before[5]]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_are_swapped_out_and_in_whole(backend: Backend, dtype: str) -> None:
    pool = backend.allocate_pool(make_spec(dtype), 6, host=False)
    host = backend.allocate_pool(make_spec(dtype), 3, host=True)
    fill(pool)
    fill(host)
    before = [block(pool, i) for i in range(6)]
    event = backend.swap_blocks(pool, host, [(1, 2), (2, 0), (5, 1)])
    event.synchronize()
    assert event.query()
    assert [block(host, i) for i in range(3)] == [before[2], before[5], before[1]]
    assert [block(pool, i) for i in range(6)] == before
    event = backend.swap_blocks(host, pool, [(2, 3), (0, 4)])
    backend.compute_stream().wait_event(event)
    assert event.query()
    assert [block(pool, i) for i in range(6)] == [before[0], before[1], before[2], before[1], before[2], before[5]]


def test_the_emulated_copy_stream_is_late_and_keeps_its_order() -> None:
    """Rule 4's tool: until its event a copy has not landed, and a later one on the stream sees an earlier one's result."""
    backend = create_backend("emulated", 1)
    pool = backend.allocate_pool(make_spec(), 4, host=False)
    host = backend.allocate_pool(make_spec(), 2, host=True)
    fill(pool)
    fill(host)
    first = block(pool, 1)
    backend.swap_blocks(pool, host, [(1, 0)])
    event = backend.swap_blocks(host, pool, [(0, 3)])
    assert block(pool, 3) != first
    backend.copy_stream().synchronize()
    assert event.query()
    assert block(pool, 3) == first


def test_emulated_events_are_released() -> None:
    backend = create_backend("emulated", 1)
    stream = backend.copy_stream()
    event = stream.record_event()
    event_id = getattr(event, "event_id", None)
    module = getattr(backend, "_module", None)
    assert module is not None
    assert module.emulated_event_query(event_id)
    del event
    gc.collect()
    with pytest.raises(ValueError, match="does not exist"):
        module.emulated_event_query(event_id)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_are_set(device: str) -> None:
    before = load_core().get_num_threads()
    try:
        create_backend(device, 1)  # type: ignore[arg-type]
        assert load_core().get_num_threads() == 1
    finally:
        load_core().set_num_threads(before)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_rule_15_a_pool_takes_memory_only_as_it_is_used() -> None:
    before = resident_bytes()
    spec = make_spec(num_layers=32, num_kv_heads=8, head_dim=128)  # 4 MiB a block
    pool = BlockPool(spec, 512, device=torch.device("cpu"))
    layers = [pool.layer(i) for i in range(32)]
    assert pool.data.numel() * 4 == 2**31
    assert resident_bytes() - before < 2**25
    layers[0].k[:8].fill_(1.0)
    assert 2**18 < resident_bytes() - before < 2**26
