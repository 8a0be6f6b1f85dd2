"""What every checkpoint offers, whatever its format: names, shapes, and tensors one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pyengine.config import ModelArchConfig
from pyengine.layers.weights import Weight


class TensorInfo(NamedTuple):
    """A tensor as a file's header describes it; its values are not read."""

    shape: tuple[int, ...]
    dtype: str  # as the format spells it: F32, BF16, Q4_1, ...
    file: Path
    stored_as: str = ""  # the first of several tensors that make this one; "": it is one


class Checkpoint(ABC):
    """A model on disk. Opening one reads headers only; nothing is held open between calls of `tensors`."""

    name: str  # as the user gave it; the package's name for the default model
    path: Path  # a Hugging Face folder or a GGUF file
    format: Literal["safetensors", "gguf"]
    arch: ModelArchConfig
    tensor_infos: Mapping[str, TensorInfo]  # by Hugging Face name

    @abstractmethod
    def tensors(self, *, quantized: bool = False) -> Iterator[tuple[str, Weight]]:
        """Each tensor under its Hugging Face name, on the CPU.

        A tensor may be a view of the mapped file: copy what is to be kept.

        Args:
            quantized: give matrices as the file has them where kernels know their format; else dequantise them.

        Raises:
            ModelLoadError: naming file and tensor, where a value cannot be read.
        """
