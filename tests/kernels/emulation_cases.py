"""Every CUDA kernel on small problems in checked memory, against the references. Run as a program by tests that build the
emulated extension anew:

    PYTHONPATH=.:tests/kernels python tests/kernels/emulation_cases.py MODULE [--cases PREFIX[,PREFIX...]]

Exit status 0: all cases hold in forward, reverse and random thread order, with the same bits, and the checker found nothing.
Exit status 3: one does not; the last line says which and why.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import references
import torch
from checkpoint_weights import random_weight
from checks import ATTENTION_TOLERANCE, as_bits, assert_close
from paged_case import CaseShape, make_case
from torch import Tensor

from pyengine.sampling.draw import TokenDrawer
from pyengine.sampling.philox import uniforms
from pyengine.worker.backends.attention_plan import plan_attention, workspace_size

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
ORDERS = ("forward", "reverse", "random")


class Device:
    """The emulated ops of one build, and tensors in its checked memory."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.ops: Any = torch.ops.pyengine_emulated
        self._buffers: list[int] = []

    def empty(self, *shape: int, dtype: torch.dtype, name: str, initialised: bool = False) -> Tensor:
        """A buffer of 0xFF bytes; reading it before it is written is an error, unless `initialised`."""
        size = max(1, torch.Size(shape).numel() * dtype.itemsize)
        address = self.module.emulated_allocate(size, name, initialised)
        self._buffers.append(address)
        raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        return raw[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def put(self, tensor: Tensor, name: str, *, nan_is_unwritten: bool = False) -> Tensor:
        """A copy of the tensor. With `nan_is_unwritten` its NaN elements count as never written."""
        copy = self.empty(*tensor.shape, dtype=tensor.dtype, name=name, initialised=not nan_is_unwritten)
        copy.copy_(tensor)
        if nan_is_unwritten:
            written = ~tensor.to(FP32).isnan().reshape(-1, tensor.shape[-1])
            size, width = tensor.dtype.itemsize, tensor.shape[-1]
            for row, flags in enumerate(written):
                if flags.all():
                    self.module.emulated_mark_initialised(copy.data_ptr() + row * width * size, width * size)
                else:
                    for i in flags.nonzero().flatten().tolist():
                        self.module.emulated_mark_initialised(copy.data_ptr() + (row * width + i) * size, size)
        return copy

    def strided(self, rows: int, columns: int, padding: int, dtype: torch.dtype, name: str) -> Tensor:
        """Random [rows, columns] with `padding` never written elements between its rows."""
        whole = torch.randn(rows, columns + padding)
        whole[:, columns:] = float("nan")
        return self.put(whole.to(dtype), name, nan_is_unwritten=True)[:, :columns]

    def release(self) -> None:
        for address in self._buffers:
            self.module.emulated_release(address)
        self._buffers.clear()


CASES: dict[str, Callable[[Device], list[Tensor]]] = {}


def case(name: str) -> Callable[[Callable[[Device], list[Tensor]]], Callable[[Device], list[Tensor]]]:
    """Registers a case: it runs ops, checks the results and returns them."""

    def register(function: Callable[[Device], list[Tensor]]) -> Callable[[Device], list[Tensor]]:
        CASES[name] = function
        return function

    return register


# ---- attention ---------------------------------------------------------------------------------------------------------
def attention_case(name: str, split_size: int | None = None, **shape: Any) -> None:
    def run(device: Device) -> list[Tensor]:
        return run_attention(device, CaseShape(**shape), split_size)

    CASES[name] = run


def run_attention(device: Device, shape: CaseShape, split_size: int | None) -> list[Tensor]:
    problem = make_case(shape)
    fp8 = problem.k_cache.dtype in (E4M3, E5M2)
    out = device.empty(*problem.query.shape, dtype=shape.dtype, name="out")
    lse = device.empty(*problem.query.shape[:2], dtype=FP32, name="lse")
    query_lens, seq_lens = [q for q, _ in shape.sequences], [s for _, s in shape.sequences]
    plan = workspace = None
    if split_size:
        work = plan_attention(query_lens, seq_lens, shape.num_heads, shape.num_kv_heads, split_size=split_size)
        plan = device.put(torch.tensor([*work.work, (-1, 0, 0, -1)], dtype=torch.int32), "plan")
        floats = workspace_size(work.num_slots, shape.num_heads, shape.head_dim)
        workspace = device.empty(floats, dtype=FP32, name="workspace")
    options = problem.options

    def optional(tensor: Tensor | None, name: str) -> Tensor | None:
        return None if tensor is None else device.put(tensor, name)

    device.ops.paged_attention(
        out,
        device.put(problem.query, "query"),
        device.put(problem.k_cache, "k_cache", nan_is_unwritten=not fp8),
        device.put(problem.v_cache, "v_cache", nan_is_unwritten=not fp8),
        device.put(problem.block_table, "block_table"),
        device.put(problem.query_start_loc, "query_start_loc"),
        device.put(problem.seq_lens, "seq_lens"),
        max(query_lens),
        max(seq_lens),
        options.scale,
        options.sliding_window,
        options.logit_softcap,
        optional(options.alibi_slopes, "alibi_slopes"),
        optional(options.sinks, "sinks"),
        optional(problem.k_scale, "k_scale"),
        optional(problem.v_scale, "v_scale"),
        lse,
        plan,
        workspace,
    )
    expected, expected_lse = problem.reference()
    atol, rtol = ATTENTION_TOLERANCE[shape.dtype]
    if problem.k_cache.dtype.itemsize == 1:
        atol = 1e-2
    assert_close(out, expected, atol, rtol)
    assert_close(lse, expected_lse, 1e-4 if shape.dtype == FP32 else 5e-3, 1e-5)
    return [out, lse]


DECODE = ((1, 1), (1, 17), (3, 70), (1, 145))
PREFILL = ((20, 45), (1, 30), (70, 70))
attention_case("simt/decode", sequences=DECODE, head_dim=32, sinks=True)
attention_case("simt/split", split_size=64, sequences=((1, 150), (2, 129), (1, 64), (40, 70)), sliding_window=80, sinks=True)
attention_case("simt/prefill", sequences=PREFILL, num_heads=5, num_kv_heads=1, block_size=8, head_dim=80, sliding_window=16)
attention_case("simt/int8", sequences=((3, 40), (1, 33)), kv_dtype=INT8, logit_softcap=5.0)
attention_case("simt/fp8", sequences=((3, 40), (1, 33)), kv_dtype=E4M3, alibi=True, head_dim=128)
attention_case("decode/bf16", sequences=DECODE, dtype=BF16, head_dim=128, sinks=True)
attention_case(
    "decode/fp16", sequences=((1, 40), (2, 99)), dtype=FP16, head_dim=112, num_heads=6, block_size=8, logit_softcap=5.0
)
attention_case("decode/alibi", sequences=((2, 40), (1, 77)), dtype=BF16, head_dim=128, alibi=True, sliding_window=40)
attention_case("decode/wide-group", sequences=((1, 40), (1, 77)), dtype=BF16, head_dim=128, num_heads=40, num_kv_heads=2)
attention_case("decode/fp8", sequences=DECODE, dtype=BF16, kv_dtype=E4M3, head_dim=128, block_size=32)
attention_case("decode/fp8-narrow", sequences=((1, 40), (1, 77)), dtype=FP16, kv_dtype=E5M2, head_dim=120)
attention_case("decode/int8", sequences=DECODE, dtype=FP16, kv_dtype=INT8, head_dim=128, sliding_window=50)
attention_case("decode/split", split_size=64, sequences=((1, 200), (2, 129), (1, 64)), dtype=BF16, head_dim=128, sinks=True)
attention_case("prefill/bf16", sequences=PREFILL, dtype=BF16, head_dim=128, sinks=True)
attention_case("prefill/window", sequences=((60, 190), (9, 40)), dtype=FP16, head_dim=128, sliding_window=30, logit_softcap=5.0)
attention_case("prefill/fp8", sequences=((40, 75),), dtype=BF16, kv_dtype=E4M3, head_dim=128, alibi=True)
attention_case("prefill/int8", sequences=((40, 75),), dtype=FP16, kv_dtype=INT8, head_dim=120, block_size=8, sliding_window=20)


# ---- cache -------------------------------------------------------------------------------------------------------------
def run_reshape(device: Device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, padding: int) -> list[Tensor]:
    tokens, heads, blocks, block_size = 7, 3, 4, 8
    key = device.strided(tokens, heads * head_dim, padding, dtype, "key").unflatten(1, (heads, head_dim))
    value = device.strided(tokens, heads * head_dim, padding, dtype, "value").unflatten(1, (heads, head_dim))
    shape = (blocks, heads, block_size, head_dim)
    caches = [device.empty(*shape, dtype=kv_dtype, name=name) for name in ("k_cache", "v_cache")]
    slots = torch.tensor([3, -1, 31, 8, 17, 0, 12])
    scales: list[Tensor | None] = [None, None]
    if kv_dtype == INT8:
        scales = [device.empty(*shape[:3], dtype=FP32, name=name) for name in ("k_scale", "v_scale")]
    elif kv_dtype.itemsize == 1:
        scales = [device.put(torch.rand(heads) * 0.1 + 0.02, name) for name in ("k_scale", "v_scale")]
    device.ops.reshape_and_cache(key, value, *caches, device.put(slots, "slot_mapping"), *scales)
    for source, cache, scale in zip((key, value), caches, scales, strict=True):
        untouched = torch.ones(blocks * block_size, dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        by_slot = as_bits(cache.transpose(1, 2)).view(blocks * block_size, -1)
        assert (by_slot[untouched] == 0xFF).all(), "a slot that no token maps to was written"
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            stored, x = cache[slot // block_size, :, slot % block_size], source[token].to(FP32)
            if kv_dtype == INT8:
                assert scale is not None
                limit = x.abs().amax(-1) / 127
                assert_close(scale[slot // block_size, :, slot % block_size], limit, 0, 1e-6)
                assert ((stored.to(FP32) * limit[:, None] - x).abs() <= limit[:, None] * 0.501).all(), "INT8 code"
            elif scale is not None:
                expected = references.quantize_fp8((x / scale[:, None]).to(torch.float64), kv_dtype)
                assert torch.equal(as_bits(stored), as_bits(expected)), "FP8 code"
            else:
                assert torch.equal(as_bits(stored), as_bits(source[token])), "cached element"
    return [*caches, *(scale for scale in scales if scale is not None)]


CASES["reshape/bf16"] = lambda device: run_reshape(device, BF16, BF16, 64, 8)
CASES["reshape/narrow"] = lambda device: run_reshape(device, FP32, FP32, 20, 3)
CASES["reshape/fp8"] = lambda device: run_reshape(device, FP16, E4M3, 80, 0)
CASES["reshape/int8"] = lambda device: run_reshape(device, BF16, INT8, 128, 8)


@case("copy_blocks")
def copy_blocks(device: Device) -> list[Tensor]:
    results = []
    for width in (512, 5000, 13):
        before = torch.randint(0, 256, (6, width), dtype=torch.uint8)
        pool = device.put(before, "pool")
        device.ops.copy_blocks(pool, device.put(torch.tensor([[1, 3], [0, 4]]), "block_mapping"))
        expected = before.clone()
        expected[3], expected[4] = before[1], before[0]
        assert torch.equal(pool, expected), "copied block"
        results.append(pool)
    return results


# ---- layers ------------------------------------------------------------------------------------------------------------
def run_norm(device: Device, dtype: torch.dtype, hidden: int, padding: int) -> list[Tensor]:
    tokens = 3
    x = device.strided(tokens, hidden, padding, dtype, "input")
    weight = device.put(torch.rand(hidden).to(dtype), "weight")
    out = device.empty(tokens, hidden, dtype=dtype, name="out")
    device.ops.rms_norm(out, x, weight, 1e-6)
    tolerance = 1e-5 if dtype == FP32 else 1e-2
    assert_close(out, references.rms_norm(x, weight, 1e-6), tolerance, tolerance)
    residual = device.strided(tokens, hidden, padding, dtype, "residual")
    total = (x.to(FP32) + residual.to(FP32)).to(dtype)
    device.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(as_bits(residual), as_bits(total)), "residual"
    assert_close(x, references.rms_norm(total, weight, 1e-6), tolerance, tolerance)
    return [out, x.clone(), residual.clone()]


CASES["rms_norm/bf16"] = lambda device: run_norm(device, BF16, 2304, 8)
CASES["rms_norm/narrow"] = lambda device: run_norm(device, FP32, 301, 3)


def run_fused(device: Device, dtype: torch.dtype, is_neox: bool, head_dim: int, rotary_dim: int, padding: int) -> list[Tensor]:
    tokens, heads, kv_heads = 3, 3, 2
    query = device.strided(tokens, heads * head_dim, padding, dtype, "query").unflatten(1, (heads, head_dim))
    key = device.strided(tokens, kv_heads * head_dim, padding, dtype, "key").unflatten(1, (kv_heads, head_dim))
    positions, table = torch.tensor([9, 0, 15]), torch.rand(16, rotary_dim) * 2 - 1
    expected = [references.rotary_embedding(positions, x, table, is_neox) for x in (query, key)]
    caches = [device.empty(2, kv_heads, 8, head_dim, dtype=dtype, name=name) for name in ("k_cache", "v_cache")]
    slots = device.put(torch.tensor([9, -1, 2]), "slot_mapping")
    device.ops.rotary_reshape_and_cache(
        *(device.put(positions, "positions"), query, key, key, device.put(table, "cos_sin_cache"), *caches, slots, is_neox)
    )
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    assert_close(query, expected[0], tolerance, tolerance)
    for token, slot in ((0, 9), (2, 2)):
        assert_close(caches[0][slot // 8, :, slot % 8], expected[1][token], tolerance, tolerance)
        assert torch.equal(as_bits(caches[1][slot // 8, :, slot % 8]), as_bits(key[token])), "cached value"
    return [query.clone(), *caches]


CASES["fused/neox"] = lambda device: run_fused(device, BF16, True, 64, 64, 8)
CASES["fused/gptj"] = lambda device: run_fused(device, FP32, False, 20, 12, 1)


def run_rotary(device: Device, dtype: torch.dtype, is_neox: bool, head_dim: int, rotary_dim: int, padding: int) -> list[Tensor]:
    tokens, heads, kv_heads = 4, 5, 2
    query = device.strided(tokens, heads * head_dim, padding, dtype, "query").unflatten(1, (heads, head_dim))
    key = device.strided(tokens, kv_heads * head_dim, padding, dtype, "key").unflatten(1, (kv_heads, head_dim))
    positions = device.put(torch.tensor([0, 9, 3, 15]), "positions")
    table = device.put(torch.rand(16, rotary_dim) * 2 - 1, "cos_sin_cache")
    expected = [references.rotary_embedding(positions, x, table, is_neox) for x in (query, key)]
    device.ops.rotary_embedding(positions, query, key, table, is_neox)
    for x, wanted in zip((query, key), expected, strict=True):
        assert_close(x, wanted, 1e-5 if dtype == FP32 else 2e-2, 1.3e-6 if dtype == FP32 else 1e-2)
    return [query.clone(), key.clone()]


CASES["rotary/neox"] = lambda device: run_rotary(device, FP32, True, 64, 64, 4)
CASES["rotary/gptj"] = lambda device: run_rotary(device, BF16, False, 64, 32, 8)
CASES["rotary/narrow"] = lambda device: run_rotary(device, FP32, True, 20, 12, 1)
CASES["rotary/gptj-narrow"] = lambda device: run_rotary(device, FP32, False, 20, 12, 1)


@case("activation")
def activation(device: Device) -> list[Tensor]:
    results = []
    for dtype, d, padding in ((FP32, 1100, 4), (BF16, 2056, 8), (FP16, 37, 1)):
        x = device.strided(3, 2 * d, padding, dtype, "input")
        tolerance = 1e-5 if dtype == FP32 else 1e-2
        for op, expected in (
            (device.ops.silu_and_mul, references.silu_and_mul(x)),
            (device.ops.gelu_and_mul, references.gelu_and_mul(x, True)),
            (lambda out, x: device.ops.gelu_and_mul(out, x, False), references.gelu_and_mul(x, False)),
        ):
            out = device.empty(3, d, dtype=dtype, name="out")
            op(out, x)
            assert_close(out, expected, tolerance, tolerance)
            results.append(out)
    return results


# ---- quantised products ------------------------------------------------------------------------------------------------
def linear_case(name: str, op: str, rows: int, k: int, n: int, dtype: torch.dtype, **options: Any) -> None:
    def run(device: Device) -> list[Tensor]:
        weight = random_weight(op, k, n, dtype=dtype, **options)
        arguments = [device.put(x, f"argument {i}") if isinstance(x, Tensor) else x for i, x in enumerate(weight.arguments)]
        x = device.strided(rows, k, 16, dtype, "input")
        bias = device.put(torch.randn(n).to(dtype), "bias")
        out = device.empty(rows, n, dtype=dtype, name="out")
        wide = x.double()
        if op == "int8_linear":
            codes = device.empty(rows, k, dtype=INT8, name="codes")
            scale = device.empty(rows, dtype=FP32, name="scale")
            device.ops.quantize_int8_rows(codes, scale, x)
            assert_close(scale, wide.abs().amax(1) / 127, 0, 1e-6)
            dequantised = codes.double() * scale.double()[:, None]
            assert ((dequantised - wide).abs() <= scale.double()[:, None] * 0.501).all(), "INT8 code"
            device.ops.int8_linear(out, codes, scale, *arguments, bias)
            wide = dequantised
        else:
            getattr(device.ops, op)(out, x, *arguments, bias)
        expected = wide @ weight.dense.T + bias.double()
        assert_close(out, expected, 1e-4 if dtype == FP32 else 2e-3, 2e-6 if dtype == FP32 else 2**-7)
        return [out]

    CASES[name] = run


linear_case("linear/gptq", "gptq_linear", 5, 384, 72, BF16, group=64)
linear_case("linear/gptq-rows", "gptq_linear", 37, 320, 64, FP16)
linear_case("linear/awq", "awq_linear", 3, 384, 136, FP16, group=128)
linear_case("linear/awq-rows", "awq_linear", 20, 256, 64, BF16)
linear_case("linear/fp8", "fp8_linear", 4, 592, 72, BF16)
linear_case("linear/fp8-rows", "fp8_linear", 66, 144, 64, FP16, one_scale=True)
linear_case("linear/int8", "int8_linear", 3, 592, 72, BF16)
linear_case("linear/int8-rows", "int8_linear", 70, 144, 64, FP32, one_scale=True)


# ---- sampling, merging -------------------------------------------------------------------------------------------------
@case("sample")
def sample(device: Device) -> list[Tensor]:
    rows, vocab = 6, 1100
    logits = device.strided(rows, vocab, 3, FP32, "logits")
    ids = device.empty(rows, dtype=torch.int64, name="token_ids")
    parameters = {
        "temperature": torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.0]),
        "top_k": torch.tensor([0, 5, 40, 0, 3, 0], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.8, 0.5, 1.0, 1.0, 0.9]),
        "min_p": torch.tensor([0.0, 0.0, 0.01, 0.0, 0.0, 0.0]),
        "seeds": torch.arange(rows) - 2,
        "positions": torch.arange(rows) * 3,
    }
    device.ops.sample_top_k_top_p(ids, logits, *(device.put(x, name) for name, x in parameters.items()))
    for row, token in enumerate(ids.tolist()):
        expected = int(logits[row].argmax()) if row == 3 else sampler_draw(logits[row], row, parameters)
        assert token == expected, f"row {row} drew {token}, not {expected}"
    return [ids]


@case("sample/flat")
def sample_flat(device: Device) -> list[Tensor]:
    """Logits so alike that draws go all over the vocabulary, and a cut-off one token further would show."""
    rows, vocab = 18, 7000  # several tiles of the kernel
    logits = device.put(torch.randn(rows, vocab) * 0.01, "logits")
    ids = device.empty(rows, dtype=torch.int64, name="token_ids")
    parameters = {
        "temperature": torch.ones(rows),
        "top_k": torch.tensor([0, 2, 3] * (rows // 3), dtype=torch.int32),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "seeds": torch.arange(rows),
        "positions": torch.arange(rows),
    }
    device.ops.sample_top_k_top_p(ids, logits, *(device.put(x, name) for name, x in parameters.items()))
    expected = [sampler_draw(logits[row], row, parameters) for row in range(rows)]
    assert ids.tolist() == expected, "drawn tokens"
    return [ids]


def sampler_draw(logits: Tensor, row: int, parameters: dict[str, Tensor]) -> int:
    """What the Python sampler draws from logits [vocab_size]."""
    options = {name: parameters[name][row].item() for name in ("temperature", "top_k", "top_p", "min_p")}
    uniform = float(uniforms(int(parameters["seeds"][row]), int(parameters["positions"][row]), 1)[0])
    return TokenDrawer(len(logits)).draw(logits.contiguous().numpy(), float(logits.max()), uniform=uniform, **options)


@case("logits")
def change_logits(device: Device) -> list[Tensor]:
    rows, vocab = 2, 300
    logits = device.strided(rows, vocab, 2, FP32, "logits")
    before = logits.clone()
    counts = torch.randint(0, 3, (rows, vocab), dtype=torch.int32)
    mask, ones = torch.rand(rows, vocab) < 0.3, torch.ones(rows)
    arguments = {"prompt_mask": mask, "output_counts": counts, "repetition": ones, "presence": ones * 2, "frequency": ones * 3}
    device.ops.apply_penalties(logits, *(device.put(x, name) for name, x in arguments.items()))
    assert_close(logits, before - 3.0 * counts - 2.0 * (counts > 0), 1e-5, 0)
    bitmask = torch.full((rows, -(-vocab // 32)), 0x55555555, dtype=torch.int32)
    expected = logits.clone()
    expected[:, 1::2] = -torch.inf
    device.ops.apply_bitmask(logits, device.put(bitmask, "bitmask"))
    assert torch.equal(logits, expected), "masked logits"
    return [logits.clone()]


@case("merge")
def merge(device: Device) -> list[Tensor]:
    part_out, part_lse = torch.randn(5, 3, 40), torch.randn(5, 3)
    out = device.empty(2, 3, 40, dtype=BF16, name="out")
    lse = device.empty(2, 3, dtype=FP32, name="lse")
    starts = device.put(torch.tensor([0, 2, 5], dtype=torch.int32), "part_start")
    device.ops.merge_attention_states(out, device.put(part_out, "part_out"), device.put(part_lse, "part_lse"), starts, lse)
    for row, parts in enumerate((slice(0, 2), slice(2, 5))):
        weights = torch.softmax(part_lse[parts], 0)
        assert_close(out[row], (weights[..., None] * part_out[parts]).sum(0), 2**-8, 2**-8)
        assert_close(lse[row], torch.logsumexp(part_lse[parts], 0), 1e-5, 1e-5)
    return [out, lse]


# ---- running them ------------------------------------------------------------------------------------------------------
@contextmanager
def ordered(module: ModuleType, order: str, seed: int) -> Iterator[None]:
    """Runs launches' threads and blocks in that order."""
    module.emulated_set_schedule(order, order, seed)
    yield
    module.emulated_set_schedule("forward", "forward", 1)


def check_case(name: str, module: ModuleType) -> None:
    """AssertionError or RuntimeError unless the case holds, with equal bits, in every order and without a finding."""
    first: list[Tensor] = []
    for seed, order in enumerate(ORDERS):
        torch.manual_seed(0)
        device = Device(module)
        with ordered(module, order, seed + 1):
            results = [result.clone() for result in CASES[name](device)]
        reports = module.emulated_take_reports()
        device.release()
        assert not reports, f"{len(reports)} findings, the first: {reports[0]}"
        first = first or results
        for a, b in zip(first, results, strict=True):
            assert torch.equal(as_bits(a), as_bits(b)), f"{order} order gives other bits than forward order"


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_emulated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("module", type=Path)
    parser.add_argument("--cases", default="", help="prefixes of names, separated by commas; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    module = load_module(arguments.module)
    names = [name for name in CASES if any(name.startswith(prefix) for prefix in arguments.cases.split(","))]
    if not names:
        parser.error(f"no case starts with {arguments.cases}")
    for name in names:
        try:
            check_case(name, module)
        except (AssertionError, RuntimeError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'failed'}", flush=True)
            return 3
    print(f"{len(names)} cases hold", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
