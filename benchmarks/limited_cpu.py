"""Runs programs as if on a lesser CPU: all engines alike, whatever instruction sets they choose from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from machine import cpu_flags

SOURCE = Path(__file__).parent / "peers" / "avx2_only.c"
#: instruction sets that programs can be limited to
LIMITS = ("avx2",)


def limited_environment(isa: str, folder: Path) -> dict[str, str]:
    """Variables that limit a process and its children to `isa`; builds what that takes in `folder`.

    Raises:
        SystemExit: this machine cannot do it, or has no C compiler.
    """
    if isa not in LIMITS:
        raise SystemExit(f"--isa {isa}: programs can be limited to {', '.join(LIMITS)}")
    if "cpuid_fault" not in cpu_flags():
        raise SystemExit(f"--isa {isa} needs an Intel CPU and Linux that let CPUID fault (cpuid_fault in /proc/cpuinfo)")
    library = folder.resolve() / f"{SOURCE.stem}.so"
    command = ["cc", "-O2", "-Wall", "-shared", "-fPIC", "-Wl,-z,initfirst", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--isa {isa}: {error}") from None
    return {"LD_PRELOAD": str(library)}
