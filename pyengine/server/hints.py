"""Types of dataclass fields."""

from __future__ import annotations

import types
import typing
from typing import Any


def not_none(hint: Any) -> Any:
    """`X` of `X | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint
