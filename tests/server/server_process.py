"""A server in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKE = [str(Path(__file__).with_name("serve_fake.py"))]
REAL = ["-m", "pyengine.server"]


class ServerProcess:
    """Its standard error is collected in `lines`. Use as a context manager: what still runs at the end is killed."""

    def __init__(self, *arguments: str) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that matches; fails once the process has closed its standard error."""
        seen = 0
        while True:
            with self._more:
                while seen == len(self.lines):
                    assert not self._ended, f"no line matches {pattern!r} in:\n" + "\n".join(self.lines)
                    self._more.wait()
                found = re.search(pattern, self.lines[seen])
            if found:
                return found
            seen += 1

    def wait_ready(self) -> str:
        """HOST:PORT."""
        return self.wait_for(r"^serving on (\S+)$").group(1)

    def exit_code(self) -> int:
        code = self.process.wait()
        self._reader.join()
        return code

    @property
    def log(self) -> str:
        return "\n".join(self.lines)
