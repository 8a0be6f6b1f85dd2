"""Reads `quantization_config` of a Hugging Face folder: which of the supported layouts its weights have, and which are plain.

The keys are those of AutoGPTQ, AutoAWQ, vLLM's FP8 and compressed-tensors. What the kernels cannot run is an error that names
the key: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyengine.errors import ModelLoadError
from pyengine.loader.hf_config import read_json

#: How the tensors of one matrix are named and laid out. packed: compressed-tensors' pack-quantized.
Layout = Literal["gptq", "awq", "packed", "fp8", "int8"]

_METHODS = ("gptq", "awq", "fp8", "compressed-tensors")
_GROUP_STEP = 32  # group sizes are multiples of it
#: Where older tools left the configuration.
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What a checkpoint says of its quantised matrices.

    Args:
        method: quant_method, as `--quantization` takes it.
        group_size: 4 bits: features of the input that share a scale; -1: all of them.
        act_order: groups are of any features; a tensor says of which.
        has_zeros: packed: there is a tensor of zeros; else all are 8.
        zero_offset: gptq: what is added to a stored zero.
        excluded: modules that stay plain, by name, part of a name, or "re:" and a regular expression.
        excluded_key: the key that lists them.
        included: the only modules that are quantised, by the ends of their names; None: all.
    """

    method: str
    layout: Layout
    group_size: int = -1
    act_order: bool = False
    has_zeros: bool = True
    zero_offset: int = 0
    excluded: tuple[str, ...] = ()
    excluded_key: str = "modules_to_not_convert"
    included: tuple[str, ...] | None = None

    def excludes(self, module: str) -> bool:
        """Whether the configuration says that `module` stays plain."""
        if self.included is not None and not any(f".{module}".endswith(f".{name}") for name in self.included):
            return True
        for name in self.excluded:
            pattern = name.removeprefix("re:")
            if re.match(pattern, module) if pattern != name else f".{name}." in f".{module}.":
                return True
        return False


class _Section:
    """Typed access to one object of a configuration file, with errors that name the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def fail(self, key: str, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}{key} {message}")

    def get(self, *keys: str) -> tuple[str, Any]:
        """The first of several spellings that is there and not null, with its value; else the first, and None."""
        found = next((key for key in keys if self.values.get(key) is not None), keys[0])
        return found, self.values.get(found)

    def one_of(self, *keys: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """The value of a key, which must be one of `supported`; `default`, where it is not None, stands for a missing one."""
        key, value = self.get(*keys)
        value = default if value is None else value
        if any(type(value) is type(option) and value == option for option in supported):
            return value
        known = ", ".join("null" if option is None else str(option).lower() for option in supported)
        raise self.fail(key, "is missing" if value is None else f"is {value!r}, which is not supported; supported: {known}")

    def empty(self, key: str) -> None:
        """Refuse a key that asks for something."""
        value = self.values.get(key)
        if value:
            raise self.fail(key, f"is {value!r}, which is not supported")

    def group_size(self, *keys: str) -> int:
        key, value = self.get(*keys)
        if type(value) is not int or not (value == -1 or (value > 0 and value % _GROUP_STEP == 0)):
            raise self.fail(key, f"is {value!r}, which is not supported; supported: -1 and multiples of {_GROUP_STEP}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(key, f"is {value!r}, not a list of names")
        for name in value:
            if name.startswith("re:"):
                try:
                    re.compile(name.removeprefix("re:"))
                except re.error as error:
                    raise self.fail(key, f"has {name!r}, which is no regular expression: {error}") from error
        return tuple(value)

    def section(self, key: str) -> _Section:
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "is missing" if value is None else f"is {value!r}, not an object")
        return _Section(f"{self.where}{key}.", value)


def read_quantization_config(folder: Path) -> QuantizationConfig | None:
    """What a folder says of the quantisation of its weights; None: they are plain.

    Raises:
        ModelLoadError: naming the file and the key whose value is missing or not supported.
    """
    section = _find(folder)
    if section is None:
        return None
    method = section.one_of("quant_method", supported=_METHODS)
    readers = {"gptq": _read_gptq, "awq": _read_awq, "fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}
    return readers[method](section)


def _find(folder: Path) -> _Section | None:
    path = folder / "config.json"
    config = read_json(path)
    for key in ("quantization_config", "compression_config"):  # the second is compressed-tensors' older name
        if config.get(key) is not None:
            return _Section(f"{path}: ", config).section(key)
    for name, method in OLD_FILES.items():
        if (folder / name).exists():
            return _Section(f"{folder / name}: ", {"quant_method": method} | read_json(folder / name))
    return None


def _read_gptq(section: _Section) -> QuantizationConfig:
    section.one_of("bits", supported=(4,))
    checkpoint_format = section.one_of("checkpoint_format", supported=("gptq", "gptq_v2"), default="gptq")
    section.one_of("pack_dtype", supported=("int32",), default="int32")
    for key in ("dynamic", "is_marlin_format"):
        section.empty(key)
    blocks = section.values.get("modules_in_block_to_quantize")
    included = None
    if blocks is not None:
        if not isinstance(blocks, list) or not all(isinstance(names, list) for names in blocks):
            raise section.fail("modules_in_block_to_quantize", f"is {blocks!r}, not a list of lists of names")
        included = tuple(str(name) for names in blocks for name in names)
    return QuantizationConfig(
        method="gptq",
        layout="gptq",
        group_size=section.group_size("group_size"),
        act_order=section.one_of("desc_act", supported=(True, False), default=False),
        zero_offset=1 if checkpoint_format == "gptq" else 0,
        excluded=section.names("modules_to_not_convert"),
        included=included,
    )


def _read_awq(section: _Section) -> QuantizationConfig:
    section.one_of("bits", "w_bit", supported=(4,))
    section.one_of("zero_point", supported=(True,), default=True)
    version = section.values.get("version")
    if version is not None and str(version).lower() != "gemm":
        raise section.fail("version", f"is {version!r}, which is not supported; supported: gemm")
    return QuantizationConfig(
        method="awq",
        layout="awq",
        group_size=section.group_size("group_size", "q_group_size"),
        excluded=section.names("modules_to_not_convert"),
    )


def _read_fp8(section: _Section) -> QuantizationConfig:
    section.one_of("activation_scheme", supported=("dynamic", "static"), default="dynamic")
    for key in ("weight_block_size", "kv_cache_scheme"):
        section.empty(key)
    section.one_of("fmt", supported=("e4m3",), default="e4m3")
    key, _ = section.get("modules_to_not_convert", "ignored_layers")
    return QuantizationConfig(method="fp8", layout="fp8", excluded=section.names(key), excluded_key=key)


def _read_compressed_tensors(section: _Section) -> QuantizationConfig:
    format = section.one_of("format", supported=("float-quantized", "int-quantized", "pack-quantized"))
    for key in ("kv_cache_scheme", "transform_config"):
        section.empty(key)
    if section.values.get("sparsity_config"):
        section.section("sparsity_config").one_of("format", supported=("dense",), default="dense")
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise section.fail("config_groups", f"has {len(groups.values)} groups, which is not supported; one is")
    group = groups.section(next(iter(groups.values)))
    if group.names("targets") != ("Linear",):
        raise group.fail("targets", f"is {group.values.get('targets')!r}, which is not supported; supported: ['Linear']")
    group.one_of("format", supported=(format,), default=format)
    group.empty("output_activations")
    return _read_compressed_weights(format, section.names("ignore"), group)


def _read_compressed_weights(format: str, ignore: tuple[str, ...], group: _Section) -> QuantizationConfig:
    weights = group.section("weights")
    weights.one_of("dynamic", supported=(False,), default=False)
    common: dict[str, Any] = {"method": "compressed-tensors", "excluded": ignore, "excluded_key": "ignore"}
    if format == "pack-quantized":
        group.empty("input_activations")
        weights.one_of("num_bits", supported=(4,))
        weights.one_of("type", supported=("int",), default="int")
        strategy = weights.one_of("strategy", supported=("group", "channel"))
        # "static" and "dynamic" are other names of "weight" and "group".
        orders = (True, False, "group", "dynamic", "weight", "static")
        act_order = weights.one_of("actorder", supported=orders, default=False)
        symmetric = weights.one_of("symmetric", supported=(True, False), default=True)
        return QuantizationConfig(
            layout="packed",
            group_size=weights.group_size("group_size") if strategy == "group" else -1,
            act_order=act_order in (True, "group", "dynamic"),
            has_zeros=not symmetric,
            **common,
        )
    kind = "float" if format == "float-quantized" else "int"
    weights.one_of("num_bits", supported=(8,))
    weights.one_of("type", supported=(kind,), default="int")
    weights.one_of("strategy", supported=("tensor", "channel"))
    weights.one_of("symmetric", supported=(True,), default=True)
    if kind == "float":
        if group.values.get("input_activations") is not None:
            inputs = group.section("input_activations")
            inputs.one_of("num_bits", supported=(8,))
            inputs.one_of("type", supported=("float",))
        return QuantizationConfig(layout="fp8", **common)
    inputs = group.section("input_activations")  # rounded to int8 in any case, one scale a token
    inputs.one_of("num_bits", supported=(8,))
    inputs.one_of("type", supported=("int",), default="int")
    inputs.one_of("dynamic", supported=(True,))
    inputs.one_of("strategy", supported=("token",), default="token")
    inputs.one_of("symmetric", supported=(True,), default=True)
    return QuantizationConfig(layout="int8", **common)
