"""README.md's examples, run as they are written; only the port is another one."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GRPC_PORT, HTTP_PORT = "50051", "8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=240)


@dataclass(frozen=True)
class Ports:
    """Where the server listens, in place of the ports that the README names."""

    grpc: str
    http: str

    def put_into(self, example: str) -> str:
        return example.replace(GRPC_PORT, self.grpc).replace(f":{HTTP_PORT}", f":{self.http}")


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


@pytest.fixture(scope="module")
def ports() -> Iterator[Ports]:
    """`make serve` on free ports, until it answers; afterwards it must leave cleanly."""
    free = Ports(*free_ports(2))
    serve = blocks("sh")[0].strip()
    assert serve == "make serve"
    process = subprocess.Popen(
        [*serve.split(), f"PORT={free.grpc}", f"HTTP_PORT={free.http}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{free.grpc}") as channel:
            grpc.channel_ready_future(channel).result(timeout=200)
            health = health_pb2_grpc.HealthStub(channel)
            for response in health.Watch(health_pb2.HealthCheckRequest(), timeout=200):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        yield free
    finally:
        subprocess.run(["pkill", "-TERM", "-s", str(process.pid), "-f", "pyengine.server"], check=False)
        try:
            log, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
    assert process.returncode == 0, log


@pytest.mark.parametrize("index", range(1, len(blocks("sh"))))
def test_shell_example_runs(index: int, ports: Ports) -> None:
    command = ports.put_into(blocks("sh")[index])
    if "--target" not in command:
        command = command.replace("pyengine.client", f"pyengine.client --target 127.0.0.1:{ports.grpc}")
    result = shell(command)
    assert result.returncode == 0, result.stderr
    if "capital of France" in command:
        assert "Paris" in result.stdout


def test_library_example_runs() -> None:
    (example,) = (b for b in blocks("python") if "import LLM" in b)
    result = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    free, total = re.findall(r"(\d+) blocks free of (\d+)", result.stdout)[0]
    assert free == total


@pytest.mark.parametrize("library", ["import grpc", "import OpenAI"])
def test_client_example_runs(library: str, ports: Ports) -> None:
    (example,) = (b for b in blocks("python") if library in b)
    code = ports.put_into(example)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 10


def test_every_example_is_run() -> None:
    assert len(blocks("python")) == 3
    assert len(re.findall(r"^```", README, flags=re.MULTILINE)) == 2 * (len(blocks("sh")) + 3 + len(blocks("text")))


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
