"""Runs emulation_cases.py over a module, in a process of its own: a bug may crash it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_cases(module: Path, cases: str = "") -> subprocess.CompletedProcess[str]:
    """The finished process; emulation_cases.py says what its exit statuses mean."""
    command = [sys.executable, str(HERE / "emulation_cases.py"), str(module), f"--cases={cases}"]
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    return subprocess.run(command, env=dict(os.environ, PYTHONPATH=paths), capture_output=True, text=True, timeout=900)
