"""Builds variants of the emulated extension: with the sanitizer, from changed sources. Objects are kept by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from planting import plant

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "emulation-tests"
_COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-DPE_EMULATED"]
_LAUNCHERS = ("attention", "cache", "layers", "quantization", "sampling")
_KERNEL_UNITS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*/cuda/*.cu"))


def _torch_flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    return [
        *("-isystem", str(include), "-isystem", sysconfig.get_path("include")),
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]


def _units() -> dict[str, list[str]]:
    """Every translation unit of the extension, with the flags that are its own."""
    launchers = [path for path in sorted(ROOT.glob("csrc/*/*.cpp")) if path.parent.name in _LAUNCHERS]
    checks = [ROOT / "csrc/common/tensor_arg.cpp", ROOT / "csrc/common/value_checks.cpp", ROOT / "csrc/bindings.cpp"]
    runtime = sorted(ROOT.glob("csrc/emulation/*.cpp"))
    units = {str(path.relative_to(ROOT)): _torch_flags() for path in [*launchers, *checks]}
    units |= {str(path.relative_to(ROOT)): [] for path in runtime}
    units |= {unit: [] for unit in _KERNEL_UNITS}
    return units


def _headers_hash(tree: Path, unit: str) -> str:
    """Of all headers that the unit may include, and a few more."""
    own = unit.split("/")[1]
    kernel_headers = [f"csrc/{folder}/cuda/*.cuh" for folder in (own, "layers")]
    patterns = ["csrc/common/*.h", "csrc/common/*.cuh", "csrc/emulation/*.h", f"csrc/{own}/*.h", "csrc/layers/*.h"]
    patterns += kernel_headers if unit in _KERNEL_UNITS else ["csrc/*/*.h"]
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted({path for pattern in patterns for path in tree.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile(tree: Path, unit: str, flags: Sequence[str]) -> Path:
    """The unit's object; compiled only if neither it, a header nor a flag is new."""
    source = tree / unit
    key = hashlib.sha256("\0".join([_headers_hash(tree, unit), source.read_text(), *flags]).encode()).hexdigest()[:24]
    output = CACHE / f"{source.stem}-{key}.o"
    if not output.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = output.with_suffix(f".{os.getpid()}.part")
        language = ["-x", "c++"] if unit.endswith(".cu") else []
        command = [os.environ.get("CXX", "g++"), *_COMMON_FLAGS, *flags, *language, "-c", str(source), "-o", str(partial)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if result.returncode != 0:
            raise RuntimeError(f"{unit} does not compile:\n{result.stderr[-4000:]}")
        partial.replace(output)
    return output


def _flags(unit: str, own: Sequence[str], sanitizer: bool) -> list[str]:
    if not sanitizer:
        return ["-O1", *own]
    instrumented = ["-fsanitize=thread"] if unit in _KERNEL_UNITS else []
    return ["-O1", "-g", "-DPYENGINE_SANITIZER", *instrumented, *own]


def _link(objects: Sequence[Path], output: Path) -> Path:
    library = Path(torch.__file__).parent / "lib"
    command = [
        *(os.environ.get("CXX", "g++"), "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(output)),
        *(str(library / "libtorch_cpu.so"), str(library / "libc10.so"), f"-Wl,-rpath,{library}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        raise RuntimeError(f"{output.name} does not link:\n{result.stderr[-4000:]}")
    return output


def build_module(output: Path, *, sanitizer: bool) -> Path:
    """The extension from the sources as they are, at `output`, with or without the memory and race checker."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(_compile, ROOT, u, _flags(u, own, sanitizer)) for u, own in _units().items()]
        return _link([job.result() for job in jobs], output)


def build_mutant(folder: Path, changes: Mapping[str, tuple[str, str]], units: Sequence[str], *, sanitizer: bool) -> Path:
    """The extension with changed sources, in `folder`.

    Args:
        changes: file, relative to the repository, to (text, what to put in its place); the text must be there exactly once.
        units: translation units that the changes touch; the others are taken from the unchanged build.
    """
    tree = folder / "tree"
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    for name, (old, new) in changes.items():
        plant(tree / name, old, new)
    own_flags = _units()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(_compile, tree, u, _flags(u, own_flags[u], sanitizer)) for u in units]
        jobs += [pool.submit(_compile, ROOT, u, _flags(u, own, sanitizer)) for u, own in own_flags.items() if u not in units]
        # The changed objects come first: of an inline function in several objects the linker keeps the first.
        return _link([job.result() for job in jobs], folder / "_emulated.so")
