"""The op contracts: schemas equal docs/architecture.md, call signatures equal the schemas, fakes and opcheck."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from pyengine.errors import ConfigError
from pyengine.ops import CPU_OPS, DEVICE_OPS, Ops, get_ops, load_core, load_emulated

ARCHITECTURE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
NAMESPACES = {"pyengine": load_core, "pyengine_emulated": load_emulated}


def documented_schemas() -> list[str]:
    """The lines of the block after "Built:"."""
    block = re.search(r"^Built:\n\n```\n(.*?)^```$", ARCHITECTURE, flags=re.M | re.S)
    assert block is not None
    return block[1].splitlines()


def registered(namespace: str) -> dict[str, torch.FunctionSchema]:
    NAMESPACES[namespace]()
    prefix = f"{namespace}::"
    names = [n.removeprefix(prefix) for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)]
    return {name: getattr(getattr(torch.ops, namespace), name).default._schema for name in names}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_registered_schemas_equal_the_documented(namespace: str) -> None:
    documented = {}
    for line in documented_schemas():
        schema = torch._C.parse_schema(f"{namespace}::{line}")
        documented[schema.name.removeprefix(f"{namespace}::")] = schema
    if namespace == "pyengine_emulated":
        for op in CPU_OPS:
            del documented[op]
    actual = registered(namespace)
    assert actual.keys() == documented.keys()
    for name, schema in documented.items():
        assert str(actual[name]) == str(schema)


def test_emulated_lacks_what_the_document_says() -> None:
    assert "The ops of matrix products and `argmax` (from `pack_linear_weight` on) are for CPU tensors" in ARCHITECTURE
    assert registered("pyengine").keys() - registered("pyengine_emulated").keys() == set(CPU_OPS)
    assert CPU_OPS[0] == "pack_linear_weight"


def test_ops_has_a_field_for_each_op() -> None:
    assert [f.name for f in fields(Ops)] == ["name", *DEVICE_OPS, *CPU_OPS]
    assert [line.split("(")[0] for line in documented_schemas()] == [*DEVICE_OPS, *CPU_OPS]


@pytest.mark.parametrize("op", DEVICE_OPS + CPU_OPS)
def test_call_signature_equals_the_schema(op: str) -> None:
    protocol = get_type_hints(Ops)[op]
    parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    assert [p.name for p in parameters] == [a.name for a in registered("pyengine")[op].arguments]
    for parameter, argument in zip(parameters, registered("pyengine")[op].arguments, strict=True):
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        if argument.name != "input" or op != "fused_add_rms_norm":
            assert f"{argument.name}: " in protocol.__call__.__doc__ or str(argument.type) in ("float", "int", "bool")


# ---- opcheck ---------------------------------------------------------------------------------------------------------


def kv_caches(namespace: str) -> tuple[torch.Tensor, torch.Tensor]:
    """k_cache and v_cache [3, 2, 16, 32], K dimension-major for CPU kernels."""
    k_cache = torch.randn(3, 2, 32, 16).transpose(2, 3) if namespace == "pyengine" else torch.randn(3, 2, 16, 32)
    return k_cache, torch.randn(3, 2, 16, 32)


def uint8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 60, shape, dtype=torch.uint8)  # as fp16 these are finite


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def bf16_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """out [3, 16] and input [3, 64]."""
    return torch.empty(3, 16, dtype=torch.bfloat16), torch.randn(3, 64).to(torch.bfloat16)


def sample_inputs(namespace: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """For each op, arguments that it accepts."""
    return {
        "reshape_and_cache": lambda: (
            torch.randn(4, 2, 32),
            torch.randn(4, 2, 32),
            *kv_caches(namespace),
            torch.tensor([16, -1, 17, 40]),
        ),
        "paged_attention": lambda: (
            torch.empty(4, 4, 32),
            torch.randn(4, 4, 32),
            *kv_caches(namespace),
            torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
            torch.tensor([0, 3, 4], dtype=torch.int32),
            torch.tensor([20, 5], dtype=torch.int32),
            *(3, 20, 0.2),
        ),
        "copy_blocks": lambda: (torch.randn(4, 3, 8), torch.tensor([[0, 2], [1, 3]])),
        "swap_blocks": lambda: (torch.randn(4, 3, 8), torch.randn(5, 3, 8), torch.tensor([[0, 4], [1, 3]])),
        "rms_norm": lambda: (torch.empty(3, 40), torch.randn(3, 40), torch.randn(40), 1e-5),
        "fused_add_rms_norm": lambda: (torch.randn(3, 40), torch.randn(3, 40), torch.randn(40), 1e-5),
        "rotary_embedding": lambda: (
            torch.tensor([0, 5, 9]),
            torch.randn(3, 4, 32),
            torch.randn(3, 2, 32),
            torch.randn(10, 32),
        ),
        "rotary_reshape_and_cache": lambda: (
            torch.tensor([0, 5, 9]),
            torch.randn(3, 4, 32),
            torch.randn(3, 2, 32),
            torch.randn(3, 2, 32),
            torch.randn(10, 32),
            *kv_caches(namespace),
            torch.tensor([16, -1, 40]),
        ),
        "merge_attention_states": lambda: (
            torch.empty(2, 4, 32),
            torch.randn(3, 4, 32),
            torch.randn(3, 4),
            torch.tensor([0, 1, 3], dtype=torch.int32),
        ),
        "apply_penalties": lambda: (
            torch.randn(2, 50),
            torch.rand(2, 50) < 0.5,
            torch.randint(0, 3, (2, 50), dtype=torch.int32),
            torch.tensor([1.0, 1.2]),
            torch.tensor([0.0, 0.5]),
            torch.tensor([0.0, 0.5]),
        ),
        "apply_bitmask": lambda: (torch.randn(2, 50), torch.randint(-(2**31), 2**31, (2, 2), dtype=torch.int32)),
        "sample_top_k_top_p": lambda: (
            torch.empty(2, dtype=torch.int64),
            torch.randn(2, 50),
            torch.tensor([0.0, 1.0]),
            torch.tensor([0, 5], dtype=torch.int32),
            torch.tensor([1.0, 0.9]),
            torch.tensor([0.0, 0.1]),
            torch.tensor([1, 2]),
            torch.tensor([0, 7]),
        ),
        "gptq_linear": lambda: (*bf16_rows(), words(8, 16), torch.rand(2, 16).bfloat16(), words(2, 2), 32),
        "awq_linear": lambda: (*bf16_rows(), words(64, 2), torch.rand(2, 16).bfloat16(), words(2, 2), 32),
        "fp8_linear": lambda: (*bf16_rows(), torch.randn(16, 64).to(torch.float8_e4m3fn), torch.rand(16)),
        "int8_linear": lambda: (
            torch.empty(3, 16),
            torch.ones(3, 64, dtype=torch.int8),
            torch.rand(3),
            torch.ones(16, 64, dtype=torch.int8),
            torch.rand(1),
            torch.randn(16),
        ),
        "quantize_int8_rows": lambda: (torch.empty(3, 64, dtype=torch.int8), torch.empty(3), torch.randn(3, 64)),
        "silu_and_mul": lambda: (torch.empty(3, 20), torch.randn(3, 40)),
        "gelu_and_mul": lambda: (torch.empty(3, 20), torch.randn(3, 40), False),
        "pack_linear_weight": lambda: (torch.empty(2, 24, 16), torch.randn(20, 24)),
        "linear": lambda: (torch.empty(3, 20), torch.randn(3, 24), torch.randn(2, 24, 16), torch.randn(20)),
        "gated_linear": lambda: (torch.empty(3, 20), torch.randn(3, 24), torch.randn(4, 24, 16), "silu", torch.randn(40)),
        "pack_quantized_weight": lambda: (uint8(2, 3, 544), uint8(20, 3 * 34), "Q8_0"),
        "quantized_linear": lambda: (torch.empty(3, 20), torch.randn(3, 96), uint8(2, 3, 544), "Q8_0", torch.randn(20)),
        "quantized_gated_linear": lambda: (
            torch.empty(3, 32),
            torch.randn(3, 96),
            uint8(4, 3, 544),
            "Q8_0",
            "silu",
            torch.randn(64),
        ),
        "quantized_embedding": lambda: (torch.empty(3, 96), torch.tensor([0, 7, 20]), uint8(2, 3, 544), "Q8_0"),
        "pack_w8a16_weight": lambda: (torch.empty(2, 3, 2048, dtype=torch.int8), torch.empty(2, 1, 64), torch.randn(40, 140)),
        "w8a16_linear": lambda: (
            torch.empty(3, 40),
            torch.randn(3, 140),
            torch.ones(2, 3, 2048, dtype=torch.int8),
            torch.rand(2, 1, 64),
            torch.randn(40),
        ),
        "w8a16_gated_linear": lambda: (
            torch.empty(3, 32),
            torch.randn(3, 140),
            torch.ones(2, 3, 2048, dtype=torch.int8),
            torch.rand(2, 1, 64),
            "silu",
            torch.randn(64),
        ),
        "w8a16_embedding": lambda: (
            torch.empty(3, 140),
            torch.tensor([0, 7, 39]),
            torch.ones(2, 3, 2048, dtype=torch.int8),
            torch.rand(2, 1, 64),
        ),
        "argmax": lambda: (torch.empty(3, dtype=torch.int64), torch.empty(3), torch.randn(3, 50)),
    }


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("op", DEVICE_OPS + CPU_OPS)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_opcheck(namespace: str, op: str) -> None:
    if op not in registered(namespace):
        assert (namespace, op in CPU_OPS) == ("pyengine_emulated", True)
        return
    overload = getattr(getattr(torch.ops, namespace), op).default
    args = sample_inputs(namespace)[op]()
    # torch lacks the arithmetic on FP8 with which its check of a schema changes arguments.
    torch.library.opcheck(overload, args, test_utils=("test_faketensor",) if op == "fp8_linear" else ALL_CHECKS)
    overload(*args)
    for argument, value in zip(overload._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            assert not value.isnan().any()


def test_fakes_write_nothing() -> None:
    ops = get_ops("cpu")
    with torch._subclasses.FakeTensorMode() as mode:
        out, x = (mode.from_tensor(torch.zeros(3, n)) for n in (20, 40))
        assert ops.silu_and_mul(out, x) is None


# ---- op sets ---------------------------------------------------------------------------------------------------------


def test_op_sets_are_frozen_and_cached() -> None:
    ops = get_ops("cpu")
    assert get_ops("cpu") is ops
    with pytest.raises(AttributeError):
        ops.name = "other"  # type: ignore[misc]


def test_linear_of_the_emulated_set_is_the_cpu_one() -> None:
    assert get_ops("emulated").linear is get_ops("cpu").linear
    assert get_ops("emulated").rms_norm is not get_ops("cpu").rms_norm


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match="device: no ops for 'tpu'"):
        get_ops("tpu")


def test_cuda_needs_a_build_with_cuda() -> None:
    if load_core().has_cuda:
        assert get_ops("cuda").name == "cuda"
    else:
        with pytest.raises(ConfigError, match="PYENGINE_CUDA=1"):
            get_ops("cuda")


def test_ops_release_the_gil(num_threads: None) -> None:
    load_core().set_num_threads(1)
    ops = get_ops("cpu")
    out, x, weight = torch.empty(1000, 512), torch.ones(1000, 1024), torch.ones(32, 1024, 16)
    interval: list[float] = []

    def run() -> None:
        begin = time.perf_counter()
        for _ in range(8):
            ops.linear(out, x, weight)
        interval.extend((begin, time.perf_counter()))

    thread = threading.Thread(target=run)
    seen = []
    thread.start()
    while thread.is_alive():
        seen.append(time.perf_counter())
    begin, end = interval
    # Held, the GIL could change hands only between the calls: no more than a few of the sixteenths would have been seen.
    sixteenths = {int((t - begin) / (end - begin) * 16) for t in seen if begin < t < end}
    assert len(sixteenths) > 8
