"""Bugs planted by replacing a piece of a source."""

from __future__ import annotations

from pathlib import Path


def plant(path: Path, old: str, new: str) -> str:
    """Replace `old`, which must be there once. Returns the source as it was."""
    source = path.read_text()
    assert source.count(old) == 1, f"{path} has {source.count(old)} times: {old}"
    path.write_text(source.replace(old, new))
    return source
