"""The contracts of docs/architecture.md that are not kernels: statuses, import rules, configuration."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pyengine.config import EngineArgs, EngineConfig, HardwareInfo, ModelArchConfig
from pyengine.config_resolution import kv_bytes_per_block, resolve, resolve_load
from pyengine.errors import ALL_ERRORS, ConfigError, PyEngineError

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

ARCH = ModelArchConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    dtype="float32",
)
MACHINE = HardwareInfo(has_cuda=False, available_memory=8 * 1024**3, num_cores=2)


def test_error_table_matches_the_classes() -> None:
    section = ARCHITECTURE.split("## Errors and statuses")[1].split("\n## ")[0]
    listed: dict[str, tuple[str, str]] = {}
    for row in re.findall(r"^\| (`.*?) \| (\w+) \| (\d+) \|$", section, flags=re.M):
        listed.update(dict.fromkeys(re.findall(r"`(\w+)", row[0]), (row[1], row[2])))
    at_start = {"ConfigError", "ModelLoadError"}
    expected = {e.__name__: (e.grpc_status, str(e.http_status)) for e in ALL_ERRORS if e.__name__ not in at_start}
    assert listed == expected
    assert all(name in section for name in at_start)


def test_every_error_is_listed_once() -> None:
    def descendants(cls: type) -> set[type]:
        return {c for child in cls.__subclasses__() for c in {child} | descendants(child)}

    assert descendants(PyEngineError) == set(ALL_ERRORS)


def test_ops_that_the_engine_does_not_call_are_named() -> None:
    section = ARCHITECTURE.split("\n## Ops")[1].split("\n## ")[0]
    ops = re.findall(r"^(\w+)\(.* -> \(\)$", section, flags=re.M)
    (paragraph,) = re.findall(r"^Not called by the engine yet.*?\n\n", section, flags=re.M | re.S)
    package = ROOT / "pyengine"
    sources = "\n".join(file.read_text() for file in package.rglob("*.py") if file.parent != package / "ops")
    uncalled = {op for op in ops if not re.search(rf"\.{op}\b", sources)}
    assert uncalled == set(ops) & set(re.findall(r"`(\w+)`", paragraph))


def test_imports_go_one_way() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_named_in_the_life_of_a_request_exist() -> None:
    life = ARCHITECTURE.split("## The life of one request")[1].split("\n## ")[0]
    names = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?|\w+\.py)`", life))
    assert len(names) > 12
    for name in names:
        candidates = [ROOT / name, *(ROOT / "pyengine" / part / name for part in ("", "engine", "worker"))]
        assert any(path.exists() for path in candidates), name


def test_library_import_needs_no_server_packages() -> None:
    """`LLM` itself needs only torch, transformers, safetensors and numpy."""
    code = (
        "import sys, pyengine\n"
        "from pyengine import LLM, SamplingParams\n"
        "bad = {'grpc', 'google.protobuf', 'gguf', 'fastapi', 'uvicorn'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def resolved(**changes: object) -> EngineConfig:
    return resolve(EngineArgs(**changes), "model", ARCH, MACHINE)  # type: ignore[arg-type]


def test_pool_is_capped_by_what_the_sequences_can_use() -> None:
    config = resolved(max_num_seqs=4, max_model_len=100, block_size=16)
    assert config.cache.num_blocks == 4 * 7


def test_pool_is_a_share_of_memory() -> None:
    block = kv_bytes_per_block(ARCH, 16, "float32")
    machine = HardwareInfo(has_cuda=False, available_memory=100 * block, num_cores=2)
    config = resolve(EngineArgs(gpu_memory_utilization=0.25), "model", ARCH, machine)
    assert config.cache.num_blocks == 25
    assert any("fewer than max_model_len" in note for note in config.notes)


def test_rule_15_default_flags_resolve_on_a_small_machine() -> None:
    machine = HardwareInfo(has_cuda=False, available_memory=2**26, num_cores=1)
    config = resolve(EngineArgs(), "model", ARCH, machine)
    assert config.cache.num_blocks > 0
    assert config.notes


@pytest.mark.parametrize(("device", "kernels", "chosen"), [(False, True, "cpu"), (True, True, "cuda"), (True, False, "cpu")])
def test_a_device_without_kernels_is_not_chosen_and_named(device: bool, kernels: bool, chosen: str) -> None:
    config = resolve(EngineArgs(), "model", ARCH, replace(MACHINE, has_cuda=device, has_cuda_kernels=kernels))
    assert config.device.device == chosen
    assert any("no CUDA kernels" in note for note in config.notes) == (device and not kernels)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "num_kv_blocks"])
def test_what_cannot_fit_into_memory_is_refused_with_the_most_that_fits(name: str) -> None:
    machine = HardwareInfo(has_cuda=False, available_memory=2**27, num_cores=1)
    with pytest.raises(ConfigError, match=f"^{name}: 1000000000 .* 0.12 GiB .* at most [0-9]+") as error:
        resolve(EngineArgs(**{name: 10**9}), "model", ARCH, machine)  # type: ignore[arg-type]
    most = int(error.value.message.split("at most ")[1].split()[0])
    assert most > 256
    resolve(EngineArgs(**{name: most}), "model", ARCH, machine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{name}: "):
        resolve(EngineArgs(**{name: most + 1}), "model", ARCH, machine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"block_size": 12}, "block_size"),
        ({"block_size": 4}, "block_size"),
        ({"max_model_len": 2048}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"swap_space": float("nan")}, "swap_space"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda"}, "device"),
        ({"preemption_mode": "later"}, "preemption_mode"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, "max_num_batched_tokens"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**flags)
    assert caught.value.field == field


def test_load_and_final_configuration_agree() -> None:
    args = EngineArgs(dtype="bfloat16", num_threads=3)
    load, config = resolve_load(args, ARCH, MACHINE), resolve(args, "model", ARCH, MACHINE)
    assert (load.device, load.dtype, load.num_threads) == (config.device.device, config.model.dtype, config.device.num_threads)


@pytest.mark.parametrize(
    ("flags", "quantization", "kv_cache_dtype"),
    [
        ({"device": "cpu"}, "gguf", "bfloat16"),
        ({"device": "cpu", "quantization": "gguf", "dtype": "float16"}, "gguf", "bfloat16"),
        ({"device": "cpu", "kv_cache_dtype": "float32"}, "gguf", "float32"),
        ({"device": "cpu", "quantization": "none"}, None, "float32"),
        ({"device": "cpu", "quantization": "none", "dtype": "float16"}, None, "float16"),
        ({"device": "emulated"}, None, "float32"),
        ({"device": "cuda"}, None, "bfloat16"),
    ],
)
def test_gguf_weights_run_as_they_are_on_cpus(flags: dict[str, Any], quantization: str | None, kv_cache_dtype: str) -> None:
    arch, machine = replace(ARCH, quantization="gguf"), replace(MACHINE, has_cuda=True)
    config = resolve(EngineArgs(**flags), "model", arch, machine)
    assert config.model.quantization == resolve_load(EngineArgs(**flags), arch, machine).quantization == quantization
    assert config.cache.kv_cache_dtype == kv_cache_dtype
    assert any("dequantised" in note for note in config.notes) == (quantization is None)


def test_gguf_cannot_be_asked_for_elsewhere() -> None:
    with pytest.raises(ConfigError, match="quantization: gguf runs on cpu, not on emulated"):
        resolve(EngineArgs(device="emulated", quantization="gguf"), "model", replace(ARCH, quantization="gguf"), MACHINE)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_plain_weights_may_be_quantised_on_cpus(scheme: str) -> None:
    args = EngineArgs(device="cpu", quantization=scheme)
    config = resolve(args, "model", ARCH, MACHINE)
    assert (config.model.quantization, config.cache.kv_cache_dtype) == (scheme, "bfloat16")
    with pytest.raises(ConfigError, match=f"quantization: {scheme} is made from plain weights, but the checkpoint's are gguf"):
        resolve_load(args, replace(ARCH, quantization="gguf"), MACHINE)
    with pytest.raises(ConfigError, match=f"quantization: {scheme} runs on cpu, not on cuda"):
        resolve_load(EngineArgs(device="cuda", quantization=scheme), ARCH, replace(MACHINE, has_cuda=True))


@pytest.mark.parametrize(
    ("flags", "found", "has_amx", "repack"),
    [
        ({}, "gguf", True, True),
        ({}, "gguf", False, False),
        ({}, None, True, False),
        ({}, "gptq", True, True),
        ({"quantization": "int4"}, None, True, True),
        ({"quantization": "none"}, "gguf", True, False),
        ({"repack": "none"}, "gguf", True, False),
        ({"repack": "int8"}, "gguf", False, True),
        ({"device": "emulated"}, "gguf", True, False),
    ],
)
def test_quantised_weights_are_repacked_for_amx(flags: dict[str, Any], found: str | None, has_amx: bool, repack: bool) -> None:
    args, arch = EngineArgs(**{"device": "cpu", **flags}), replace(ARCH, quantization=found)
    assert resolve_load(args, arch, replace(MACHINE, has_amx=has_amx)).repack == repack
    notes = resolve(args, "model", arch, replace(MACHINE, has_amx=has_amx)).notes
    assert any("repacked to 8 bits" in note for note in notes) == repack


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target_itl_ms", "x", "must be a number, got 'x'"),
        ("target_itl_ms", True, "must be a number, got True"),
        ("gpu_memory_utilization", "0.5", "must be a number, got '0.5'"),
        ("swap_space", None, "must be a number, got None"),
        ("enable_prefix_caching", "maybe", "must be True or False, got 'maybe'"),
        ("enforce_eager", 1, "must be True or False, got 1"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: {message}"):
        EngineArgs(**{name: value})  # type: ignore[arg-type]


def test_what_cannot_be_repacked() -> None:
    with pytest.raises(ConfigError, match="repack: must be one of auto, none, int8, got 'int4'"):
        EngineArgs(repack="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="repack: int8 is made from quantised weights"):
        resolve_load(EngineArgs(device="cpu", repack="int8"), ARCH, MACHINE)
    with pytest.raises(ConfigError, match="repack: int8 runs on cpu, not on emulated"):
        resolve_load(EngineArgs(device="emulated", repack="int8"), replace(ARCH, quantization="gguf"), MACHINE)


def test_an_unknown_scheme_is_named_with_those_that_are_supported() -> None:
    with pytest.raises(
        ConfigError, match="quantization: 'marlin' is not supported; supported: none, gguf, int8, int4, gptq, awq"
    ):
        EngineArgs(quantization="marlin")


@pytest.mark.parametrize(
    ("flags", "quantization", "dtype", "kv_cache_dtype"),
    [
        ({"device": "cpu"}, "gptq", "float32", "bfloat16"),
        ({"device": "cpu", "quantization": "gptq"}, "gptq", "float32", "bfloat16"),
        ({"device": "emulated"}, "gptq", "float16", "float16"),
        ({"device": "cuda", "dtype": "bfloat16"}, "gptq", "bfloat16", "bfloat16"),
        ({"device": "cuda", "quantization": "none"}, None, "float16", "float16"),
        ({"device": "emulated", "quantization": "none"}, None, "float32", "float32"),
    ],
)
def test_quantised_folders_run_as_they_are(
    flags: dict[str, Any], quantization: str | None, dtype: str, kv_cache_dtype: str
) -> None:
    arch, machine = replace(ARCH, quantization="gptq", dtype="float16"), replace(MACHINE, has_cuda=True)
    config = resolve(EngineArgs(**flags), "model", arch, machine)
    assert (config.model.quantization, config.model.dtype) == (quantization, dtype)
    assert config.cache.kv_cache_dtype == kv_cache_dtype
    assert any("blocks of 32" in note for note in config.notes) == (config.device.device == "cpu")


@pytest.mark.parametrize(
    ("found", "flags", "message"),
    [
        ("gptq", {"quantization": "awq"}, "quantization: awq was asked for, but the checkpoint's is gptq"),
        (None, {"quantization": "fp8"}, "quantization: fp8 was asked for, but the checkpoint's is none"),
        ("fp8", {"quantization": "int8", "device": "cpu"}, "quantization: int8 is made from plain weights, .* are fp8"),
        ("awq", {"device": "cuda", "dtype": "float32"}, "dtype: awq weights run on cuda with float16 or bfloat16, not"),
    ],
)
def test_quantisation_that_is_not_the_checkpoints(found: str | None, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_load(EngineArgs(**flags), replace(ARCH, quantization=found), replace(MACHINE, has_cuda=True))


def test_every_flag_is_documented_where_it_stands() -> None:
    source = (ROOT / "pyengine" / "config.py").read_text()
    for f in fields(EngineArgs):
        assert re.search(rf"^    {f.name}: .*  # \w", source, flags=re.M), f"{f.name} has no comment in EngineArgs"
