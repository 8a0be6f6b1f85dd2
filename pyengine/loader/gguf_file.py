"""Reads the header of a GGUF file: metadata, and where each tensor lies.

The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little endian. String arrays (a vocabulary holds 10^5 strings)
are decoded only when they are asked for, so that a start which has its tokenizer cached does not pay for them.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pyengine.errors import ModelLoadError

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
#: Value types of fixed size, by number.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


class GGUFTensor(NamedTuple):
    """One tensor's place in the file."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it
    type_id: int  # ggml's number of the element type
    offset: int  # from the start of the tensor data, bytes


class _StringArray(NamedTuple):
    length: int
    offset: int  # of the first string, from the start of the file


class _Cursor:
    """Reads values one after another from a mapped file; running off its end is an error of the file's."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self.offset = 0

    def _fail(self) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: the file ends inside its header (truncated?)")

    def u32(self) -> int:
        return int(self.scalars(_U32, 1)[0])

    def u64(self) -> int:
        return int(self.scalars(_U64, 1)[0])

    def scalars(self, layout: struct.Struct, count: int) -> tuple[Any, ...]:
        size = layout.size * count
        if size > len(self._data) - self.offset:
            raise self._fail()
        values = struct.unpack_from(f"<{count}{layout.format[1:]}", self._data, self.offset)
        self.offset += size
        return values

    def string(self) -> str:
        start, end = self._string_span()
        try:
            return self._data[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self._path}: a string in the header at byte {start} is not UTF-8") from error

    def skip_strings(self, count: int) -> None:
        data, offset, read = self._data, self.offset, _U64.unpack_from
        last = len(data) - _U64.size
        for _ in range(count):  # 10^5 of them: no calls in this loop
            if offset > last:
                raise self._fail()
            offset += _U64.size + read(data, offset)[0]
        if offset > len(data):
            raise self._fail()
        self.offset = offset

    def _string_span(self) -> tuple[int, int]:
        size = self.u64()
        if size > len(self._data) - self.offset:
            raise self._fail()
        start = self.offset
        self.offset += size
        return start, self.offset


class GGUFFile:
    """The header of one GGUF file. Holds no open file.

    Raises:
        ModelLoadError: naming the file, where it is missing, truncated or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        self._spans: dict[str, tuple[int, int]] = {}  # of each key's value, bytes from the start of the file
        self.tensors: dict[str, GGUFTensor] = {}
        with _mapped(path) as data:
            self.size = len(data)
            cursor = _Cursor(data, path)
            num_tensors = self._read_metadata(cursor)
            self._read_tensors(cursor, num_tensors)
        alignment = self._values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{path}: general.alignment is {alignment!r}, not a positive integer")
        self.data_offset = -(-cursor.offset // alignment) * alignment  # bytes from the start of the file

    def _read_metadata(self, cursor: _Cursor) -> int:
        if cursor.u32() != int.from_bytes(b"GGUF", "little"):
            raise ModelLoadError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.u32()
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported; 2 and 3, little endian, are")
        num_tensors, num_keys = cursor.u64(), cursor.u64()
        for _ in range(num_keys):
            key = cursor.string()
            start = cursor.offset
            self._values[key] = self._read_value(cursor, key, cursor.u32())
            self._spans[key] = (start, cursor.offset)
        return num_tensors

    def _read_value(self, cursor: _Cursor, key: str, value_type: int) -> Any:
        if value_type in _SCALARS:
            return cursor.scalars(struct.Struct("<" + _SCALARS[value_type]), 1)[0]
        if value_type == _STRING:
            return cursor.string()
        if value_type == _ARRAY:
            element_type, count = cursor.u32(), cursor.u64()
            if element_type in _SCALARS:
                return cursor.scalars(struct.Struct("<" + _SCALARS[element_type]), count)
            if element_type == _STRING:
                array = _StringArray(count, cursor.offset)
                cursor.skip_strings(count)
                return array
            value_type = element_type
        raise ModelLoadError(f"{self.path}: key {key} has a value of unknown type {value_type}")

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> None:
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.u32()
            if num_dims > _MAX_DIMS or name in self.tensors:
                problem = f"has {num_dims} dimensions" if num_dims > _MAX_DIMS else "is there twice"
                raise ModelLoadError(f"{self.path}: tensor {name} {problem}")
            dims = cursor.scalars(_U64, num_dims)
            self.tensors[name] = GGUFTensor(name, tuple(reversed(dims)), cursor.u32(), cursor.u64())

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: number, bool, string, or a tuple of numbers. Use `strings` for an array of strings."""
        return self._values.get(key, default)

    def length(self, key: str) -> int:
        """The number of elements of an array."""
        value = self._values[key]
        return value.length if isinstance(value, _StringArray) else len(value)

    def strings(self, key: str) -> list[str]:
        """An array of strings, read from the file now."""
        array = self._values[key]
        if not isinstance(array, _StringArray):
            raise ModelLoadError(f"{self.path}: key {key} is not an array of strings")
        with _mapped(self.path) as data:
            cursor = _Cursor(data, self.path)
            cursor.offset = array.offset
            return [cursor.string() for _ in range(array.length)]

    def fingerprint(self, keys: Iterable[str]) -> str:
        """SHA-256 of those keys' values, absent ones included as such. Equal values give equal prints in any file."""
        digest = hashlib.sha256()
        with _mapped(self.path) as data:
            for key in sorted(keys):
                start, end = self._spans.get(key, (0, 0))
                digest.update(f"{key}:{end - start}:".encode())
                digest.update(data[start:end])
        return digest.hexdigest()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # what mmap says of an empty file
        raise ModelLoadError(f"{path}: the file is empty") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
