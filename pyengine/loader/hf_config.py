"""Reads a Hugging Face folder's `config.json` and `generation_config.json` into a `ModelArchConfig`.

Written without Transformers: its import is slow, and a broken file should give one line that names the key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyengine.config import DType, ModelArchConfig
from pyengine.errors import ModelLoadError

_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelLoadError: naming the file, where it is missing or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value


class _Config:
    """Typed access to config.json's values."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, read_json(path)

    def fail(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(f"{key} is missing" if value is None else f"{key} is {value!r}, not a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}, not a number")
        return float(value)

    def names(self, key: str, default: list[str]) -> list[str]:
        value = self.get(key, default)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(f"{key} is {value!r}, not a list of names")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise self.fail(f"{key} is {value!r}, not token ids")
        return tuple(ids)


def read_arch(folder: Path, supported_architectures: tuple[str, ...]) -> ModelArchConfig:
    """What the folder's configuration files say of the network.

    Raises:
        ModelLoadError: naming the file and the key, or the architecture that is not supported.
    """
    config = _Config(folder / "config.json")
    architecture = _architecture(config, supported_architectures)
    num_heads, hidden_size = config.positive("num_attention_heads"), config.positive("hidden_size")
    num_kv_heads = config.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.fail(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    rope_theta, rope_scaling = _rope(config)
    eos_token_ids = config.token_ids("eos_token_id")
    generation_file = folder / "generation_config.json"
    if generation_file.exists():  # chat models list every end of turn here
        eos_token_ids = _Config(generation_file).token_ids("eos_token_id") or eos_token_ids
    return ModelArchConfig(
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=config.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.positive("head_dim", hidden_size // num_heads),
        max_position_embeddings=config.positive("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        hidden_act=str(config.get("hidden_act", "silu")),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=_sliding_window(config),
        dtype=_dtype(config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
    )


def _architecture(config: _Config, supported: tuple[str, ...]) -> str:
    architectures = config.names("architectures", [])
    for architecture in architectures:
        if architecture in supported:
            return architecture
    found = ", ".join(architectures) or f"none (model_type {config.get('model_type')!r})"
    raise config.fail(f"architecture {found} is not supported; supported: {', '.join(supported)}")


def _dtype(config: _Config) -> DType:
    """`dtype`, or `torch_dtype` as older files spell it."""
    name = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    for dtype in _DTYPES:
        if name == dtype:
            return dtype
    raise config.fail(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")


def _rope(config: _Config) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` or, as older files have it, `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(parameters, dict):
        raise config.fail(f"rope_parameters is {parameters!r}, not an object")
    parameters = {key: value for key, value in parameters.items() if value is not None}
    theta = parameters.pop("rope_theta", config.number("rope_theta", 10000.0))
    if not isinstance(theta, int | float):
        raise config.fail(f"rope_theta is {theta!r}, not a number")
    partial = parameters.pop("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1:
        raise config.fail(f"partial_rotary_factor {partial} is not supported")
    rope_type = parameters.pop("type", None)  # the older spelling of rope_type
    rope_type = parameters.pop("rope_type", rope_type or "default")
    if rope_type == "default":
        return float(theta), None
    return float(theta), {"rope_type": rope_type, **parameters}


def _sliding_window(config: _Config) -> int | None:
    """The window that every layer has, or None.

    Qwen's files switch it on with `use_sliding_window`, from layer `max_window_layers` on; `layer_types` lists the layers.
    """
    if config.get("sliding_window") is None or not config.get("use_sliding_window", True):
        return None
    num_layers = config.positive("num_hidden_layers")
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config.values else 0
    if not isinstance(first, int):
        raise config.fail(f"max_window_layers is {first!r}, not an integer")
    kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    kinds = config.names("layer_types", kinds)
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise config.fail(f"layers of different kinds ({', '.join(sorted(set(kinds)))}) are not supported")
    return config.positive("sliding_window")
