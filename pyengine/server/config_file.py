"""`--config FILE`: the flags' values from a YAML or JSON file, by the flags' names. The command line wins over it."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml

from pyengine.errors import ConfigError
from pyengine.server.hints import not_none


def load_config_file(path: str, owners: tuple[type, ...]) -> dict[str, Any]:
    """The values that a file sets, by field. An empty value stands for the default, as it does everywhere in YAML.

    Secrets have no place in it: it takes the flags' names, and no flag is a secret.

    Args:
        path: ".json" is read as JSON, everything else as YAML: one name a line, with dashes or underscores.
        owners: the dataclasses whose fields are flags.

    Raises:
        ConfigError: naming the file, and the name in it that is unknown, there twice or has a value of another type.
    """
    try:
        text = Path(path).read_text()
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError("config", f"cannot read {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError("config", f"{path} must hold names and their values")
    hints: dict[str, Any] = {}
    for owner in owners:
        types = typing.get_type_hints(owner)
        hints |= {field.name: not_none(types[field.name]) for field in fields(owner)}
    del hints["config"]
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise ConfigError("config", f"{path}: {key!r} is not the name of a flag")
        if name in values:
            raise ConfigError("config", f"{path}: {name} is there twice")
        values[name] = _checked(value, hints[name], f"{path}: {key}")
    return {name: value for name, value in values.items() if value is not None}


def _checked(value: Any, kind: Any, where: str) -> Any:
    if value is None:
        return None
    if typing.get_origin(kind) is Literal:
        # YAML takes a bare word such as `none` or `off` for itself or for a boolean; quotes make it a text.
        if value not in typing.get_args(kind):
            raise ConfigError("config", f"{where} must be one of {', '.join(typing.get_args(kind))}, got {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
        raise ConfigError("config", f"{where} must be {names[kind]}, got {value!r}")
    return value
