"""The cases of emulation_cases.py on a GPU, one run each, against the references: a short program for compute-sanitizer.

    PYTHONPATH=.:tests/kernels python tests/kernels/device_cases.py cuda [--cases PREFIX[,PREFIX...]]

Exit status 0: all cases hold. 3: one does not; the last line says which and why. With `emulated` it runs the same program over
the emulated device.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import torch
from emulation_cases import CASES
from mirror import MirroredOps
from torch import Tensor

from pyengine.ops import get_ops


class MirrorDevice:
    """What a case needs of `emulation_cases.Device`, with tensors in plain memory and ops that mirror them to the device."""

    def __init__(self, name: str) -> None:
        self.ops: Any = MirroredOps(get_ops(name), torch.device("cuda" if name == "cuda" else "cpu"))
        self.module = SimpleNamespace(emulated_mark_initialised=lambda address, size: None)

    def empty(self, *shape: int, dtype: torch.dtype, name: str, initialised: bool = False) -> Tensor:
        """0xFF bytes: NaN in every floating-point type."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)

    def put(self, tensor: Tensor, name: str, *, nan_is_unwritten: bool = False) -> Tensor:
        return tensor.clone()

    def strided(self, rows: int, columns: int, padding: int, dtype: torch.dtype, name: str) -> Tensor:
        """Random [rows, columns] with `padding` NaN elements between its rows."""
        whole = torch.randn(rows, columns + padding)
        whole[:, columns:] = float("nan")
        return whole.to(dtype)[:, :columns]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("device", choices=["cuda", "emulated"])
    parser.add_argument("--cases", default="", help="prefixes of names, separated by commas; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in CASES if any(name.startswith(prefix) for prefix in arguments.cases.split(","))]
    if not names:
        parser.error(f"no case starts with {arguments.cases}")
    for name in names:
        torch.manual_seed(0)
        try:
            CASES[name](MirrorDevice(arguments.device))  # type: ignore[arg-type]
        except (AssertionError, RuntimeError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'failed'}", flush=True)
            return 3
    print(f"{len(names)} cases hold", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
