"""Reads machine code of CUDA objects: which kernels there are, what they use, and which instructions they are made of."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_ARCH = re.compile(r"^\s*arch = (sm_\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass
class Kernel:
    """One kernel for one architecture. Instructions are (address, name with modifiers, operands)."""

    name: str
    arch: str
    registers: int = 0
    local_bytes: int = 0
    threads: int = 0
    instructions: list[tuple[int, str, str]] = field(default_factory=list)

    def count(self, pattern: str) -> int:
        """Instructions whose name matches the regular expression from its start."""
        return sum(1 for _, name, _ in self.instructions if re.match(pattern, name))

    def main_loop(self) -> Counter[str]:
        """Instruction names of the smallest loop that has tensor-core instructions; empty without one."""
        best: list[str] = []
        for address, name, operands in self.instructions:
            target = re.search(r"0x([0-9a-f]+)", operands)
            if not name.startswith("BRA") or target is None or int(target.group(1), 16) >= address:
                continue
            begin = int(target.group(1), 16)
            body = [n for a, n, _ in self.instructions if begin <= a <= address]
            if any(n.startswith(("HMMA", "IMMA")) for n in body) and (not best or len(body) < len(best)):
                best = body
        return Counter(best)


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _demangle(names: list[str]) -> dict[str, str]:
    """Mangled names to the shortest form that tells them apart: no return type, no namespace before the name, no parameters."""
    result = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    short = {}
    for mangled, text in zip(names, result.splitlines(), strict=True):
        match = re.search(r"([A-Za-z_0-9]+_kernel(?:<.*>)?)\(", text)
        short[mangled] = match.group(1) if match else text
    return short


def read_object(path: Path, cuobjdump: str) -> list[Kernel]:
    """The kernels of an object file, for every architecture that it has machine code for."""
    kernels: dict[tuple[str, str], Kernel] = {}
    arch = ""
    for line in _run(cuobjdump, "--dump-resource-usage", path).splitlines():
        if match := _ARCH.search(line):
            arch = match.group(1)
        elif match := re.match(r"\s*Function (\S+):", line):
            kernels[match.group(1), arch] = Kernel(match.group(1), arch)
        elif match := _RESOURCES.search(line):
            kernel = list(kernels.values())[-1]
            kernel.registers, kernel.local_bytes = int(match.group(1)), int(match.group(2)) + int(match.group(4))
    current: Kernel | None = None
    for line in _run(cuobjdump, "-sass", path).splitlines():
        if match := _ARCH.search(line):
            arch = match.group(1)
        elif match := _FUNCTION.search(line):
            current = kernels[match.group(1), arch]
        elif current and (match := _INSTRUCTION.search(line)):
            current.instructions.append((int(match.group(1), 16), match.group(2), match.group(3)))
    threads = dict(re.findall(r"\.entry (\w+)\(.*?\.maxntid (\d+)", _run(cuobjdump, "-ptx", path), re.DOTALL))
    short = _demangle([kernel.name for kernel in kernels.values()])
    for kernel in kernels.values():
        kernel.threads = int(threads.get(kernel.name, 0))
        kernel.name = short[kernel.name]
    return [kernel for kernel in kernels.values() if kernel.instructions]
