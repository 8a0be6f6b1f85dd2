"""Loads the compiled extensions, on demand and loudly."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch

from pyengine.errors import ConfigError
from pyengine.ops._fake import register_fakes

_HOW_TO_BUILD = "build it with `make build` in a checkout, or `pip install --no-build-isolation .`"


@cache
def load_core() -> ModuleType:
    """`pyengine._C`, with the ops of namespace `pyengine` registered.

    Raises:
        ConfigError: it was not built, was built against another torch, or PYENGINE_CPU_ISA is wrong.
    """
    core = _import("pyengine._C")
    try:
        core.get_isa()  # chooses the instruction set, so that a wrong one is known now
    except ValueError as error:
        raise ConfigError("PYENGINE_CPU_ISA", str(error)) from error
    register_fakes("pyengine")
    return core


@cache
def load_emulated() -> ModuleType:
    """`pyengine._emulated`, with the ops of namespace `pyengine_emulated` registered.

    Raises:
        ConfigError: as `load_core`.
    """
    emulated = _import("pyengine._emulated")
    register_fakes("pyengine_emulated")
    return emulated


def namespace(name: str) -> Any:
    """torch's handle of an op namespace that was loaded."""
    return getattr(torch.ops, name)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError("device", f"the compiled extension {name} is missing; {_HOW_TO_BUILD}") from error
    except ImportError as error:
        message = f"the compiled extension {name} does not load with torch {torch.__version__} ({error}); {_HOW_TO_BUILD}"
        raise ConfigError("device", message) from error
