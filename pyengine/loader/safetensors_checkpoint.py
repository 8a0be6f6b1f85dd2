"""A Hugging Face folder as a checkpoint: `model.safetensors`, or shards with `model.safetensors.index.json`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.layers.weights import Weight
from pyengine.loader.base import Checkpoint, TensorInfo
from pyengine.loader.checkpoint_blocks import dequantize
from pyengine.loader.hf_config import read_arch, read_json
from pyengine.loader.quantization_config import read_quantization_config
from pyengine.loader.quantized_modules import PLAIN_DTYPES, QuantizedModules
from pyengine.models.registry import SUPPORTED_ARCHITECTURES

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
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
        self._files_read = tuple(dict.fromkeys(info.file for info in infos.values()))
        self._modules: QuantizedModules | None = None
        if (config := read_quantization_config(path)) is not None:
            self.arch = replace(self.arch, quantization=config.method)
            self._modules = QuantizedModules(config, infos)
            infos = self._modules.infos
        else:
            _check_plain(infos)
        self.tensor_infos = infos

    def tensors(self, *, quantized: bool = False) -> Iterator[tuple[str, Weight]]:
        if self._modules is None:
            yield from self._read()
            return
        for name, weight in self._modules.read(self._read()):
            yield name, weight if quantized or isinstance(weight, Tensor) else dequantize(weight)

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the files."""
        for file in self._files_read:
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
    return infos


def _check_plain(infos: dict[str, TensorInfo]) -> None:
    for name, info in infos.items():
        if info.dtype not in PLAIN_DTYPES:
            known = ", ".join(PLAIN_DTYPES)
            raise ModelLoadError(f"{info.file}: tensor {name} has type {info.dtype}, which is not supported; {known} are")
