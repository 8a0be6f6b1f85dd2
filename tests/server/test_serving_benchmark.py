"""benchmarks/serving.py against a fake engine: it sends its key, and what is missing is one line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fake_engine import FakeEngine
from running_server import RunningServer
from server_process import ROOT

from pyengine.server.auth import KEY_VARIABLE, ApiKeys

LOAD = ("--num-prompts", "3", "--long-share", "0", "--short-input", "16", "--short-output", "5")


def run(target: str, out: Path, key: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/serving.py", "--target", target, *LOAD, "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    environment |= {"PYTHONPATH": str(ROOT)} | ({KEY_VARIABLE: key} if key else {})
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def test_the_key_comes_from_the_environment(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start_server(FakeEngine(), keys=ApiKeys(("sk-right",)))
    done = run(server.target, tmp_path / "plot.png", "sk-right")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "plot.json").read_text())["server"]
    assert (figures["completed"], figures["failed"]) == (3, 0)
    for key in (None, "sk-wrong"):
        done = run(server.target, tmp_path / "none.png", key)
        assert done.returncode == 1
        assert done.stderr.startswith("error: UNAUTHENTICATED: ")
        assert done.stderr.endswith(f"; set {KEY_VARIABLE}\n")
        assert done.stderr.count("\n") == 1


def test_no_server_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{free.getsockname()[1]}"
        done = run(target, tmp_path / "none.png")
    assert done.returncode == 1
    assert done.stderr == f"error: no server answers at {target}; start one with: python -m pyengine.server\n"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/serving.py",
        "--model",
        str(tmp_path / "nothing"),
        "--out",
        str(tmp_path / "none.png"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert said[0].startswith("the server did not start: ")
    assert str(tmp_path / "nothing") in said[-1]


def test_a_server_of_its_own_asks_for_no_key(tiny_llama: Path) -> None:
    """Whatever key the environment holds is that of another server."""
    code = """
import sys; sys.path.insert(0, "benchmarks")
from serving import grpc, pb, rpc, serve
with serve(sys.argv[1], ["--max-model-len", "64"]) as target, grpc.insecure_channel(target) as channel:
    print(rpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="a"), timeout=60).token_ids)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), KEY_VARIABLE: "sk-other"}
    command = [sys.executable, "-c", code, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_nothing_is_run() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, 'benchmarks'); import serving; serving.main()"
    command = [sys.executable, "-c", code, "--target", "127.0.0.1:1"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr == "error: the plot needs matplotlib: pip install matplotlib, or make dev\n"
