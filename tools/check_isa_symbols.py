"""Fail when an object compiled for one instruction set defines a symbol that other objects could be linked to.

The linker keeps one copy of a weak symbol (an inline function, a template instance). Were it the copy that was compiled with
AVX-512, the program would die on a machine without it. So every symbol with external linkage that a unit of csrc/*/cpu/
defines must belong to the unit's own namespace, pyengine::cpu::ISA.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ISA_NAMESPACES = tuple(f"pyengine::cpu::{isa}::" for isa in ("scalar", "avx2", "avx512", "avx512_vnni", "amx", "neon"))


def leaked_symbols(objects: Sequence[Path], nm: str = "nm") -> list[str]:
    """ "OBJECT: SYMBOL" for each externally linked symbol that is defined outside the instruction sets' namespaces."""
    leaks = []
    for path in objects:
        listing = subprocess.run(
            [nm, "--extern-only", "--defined-only", "--demangle", "--format=posix", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for line in listing.splitlines():
            if line and not any(namespace in line for namespace in ISA_NAMESPACES):
                leaks.append(f"{path}: {line}")
    return leaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("objects", nargs="+", type=Path)
    args = parser.parse_args()
    leaks = leaked_symbols(args.objects, args.nm)
    for leak in leaks:
        print(f"symbol outside its instruction set's namespace: {leak}", file=sys.stderr)
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
