"""A Hugging Face folder as a checkpoint: `model.safetensors`, or shards with `model.safetensors.index.json`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.loader.base import Checkpoint, TensorInfo
from pyengine.loader.hf_config import read_arch, read_json
from pyengine.models.registry import SUPPORTED_ARCHITECTURES

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsCheckpoint(Checkpoint):
    """A Hugging Face folder.

    Raises:
        ModelLoadError: one line naming the file, and the key, tensor or scheme that is wrong or not supported.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.format = name, path, "safetensors"
        self.arch = read_arch(path, SUPPORTED_ARCHITECTURES)
        infos: dict[str, TensorInfo] = {}
        index = self._read_index()
        for file in self._files(index):
            infos.update(_read_infos(file, infos))
        for tensor, shard in index.items():
            if tensor not in infos or infos[tensor].file.name != shard:
                raise ModelLoadError(f"{path / shard}: tensor {tensor} is missing, though {_INDEX} places it there")
        self.tensor_infos = infos

    def tensors(self, *, quantized: bool = False) -> Iterator[tuple[str, Tensor]]:
        for file in dict.fromkeys(info.file for info in self.tensor_infos.values()):
            with _opened(file) as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    try:
                        tensor = weights.get_tensor(name)
                    except SafetensorError as error:
                        raise ModelLoadError(f"{file}: tensor {name} cannot be read: {error}") from error
                    yield name, tensor

    def _read_index(self) -> dict[str, str]:
        """Tensor name to shard name; empty where there is no index."""
        path = self.path / _INDEX
        if (self.path / _WEIGHTS).exists() or not path.exists():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ModelLoadError(f"{path}: weight_map is missing or is not an object of file names")
        return weight_map

    def _files(self, index: dict[str, str]) -> list[Path]:
        if not index:
            if (self.path / _WEIGHTS).exists():
                return [self.path / _WEIGHTS]
            found = ", ".join(sorted(file.name for file in self.path.iterdir() if file.suffix in (".bin", ".pt", ".pth")))
            hint = f"; {found} cannot be used: only safetensors is read" if found else ""
            raise ModelLoadError(f"{self.path}: there is no {_WEIGHTS} or {_INDEX}{hint}")
        shards = sorted(set(index.values()))
        missing = [shard for shard in shards if not (self.path / shard).exists()]
        if missing:
            raise ModelLoadError(f"{self.path / _INDEX}: of {len(shards)} shards these are missing: {', '.join(missing)}")
        return [self.path / shard for shard in shards]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with file.open("rb") as raw:
            if raw.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelLoadError(f"{file}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        weights = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelLoadError(f"{file}: not a whole safetensors file: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from error
    with weights:
        yield weights


def _read_infos(file: Path, seen: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    infos = {}
    with _opened(file) as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            if name in seen:
                raise ModelLoadError(f"{file}: tensor {name} is also in {seen[name].file.name}")
            part = weights.get_slice(name)
            infos[name] = TensorInfo(tuple(part.get_shape()), part.get_dtype(), file)
            if infos[name].dtype not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise ModelLoadError(f"{file}: tensor {name} has type {infos[name].dtype}, which is not supported; {known} are")
    return infos
