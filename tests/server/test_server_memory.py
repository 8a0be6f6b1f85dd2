"""What a served model takes of the machine's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from server_process import REAL, ServerProcess

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

CONTEXT = 512
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from Linux's /proc")


def peak_megabytes(status: str) -> int:
    """Of resident memory, from the text of /proc/PID/status."""
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


def peak_of_imports() -> int:
    code = "import torch, transformers, grpc; print(open('/proc/self/status').read())"
    return peak_megabytes(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_peak_memory_of_the_default_model() -> None:
    """Serving a context of 512 tokens takes less than 400 MB beyond what the libraries take, weights included (98 MB)."""
    with ServerProcess(*REAL, "--port", "0", "--max-model-len", str(CONTEXT)) as server:
        with grpc.insecure_channel(server.wait_ready()) as channel:
            sampling = pb.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100, 100 + CONTEXT - 64)), sampling=sampling)
            answer = rpc.InferenceStub(channel).Complete(request, timeout=200)
        assert answer.usage.completion_tokens == 64
        peak = peak_megabytes(Path(f"/proc/{server.process.pid}/status").read_text())
    extra = peak - peak_of_imports()
    assert extra < 400


def test_starting_does_not_import_a_compiler() -> None:
    """torch's own, which an operator called the wrong way would bring in, with 60 MB and a second of time."""
    code = (
        "import sys; from pyengine import LLM, SamplingParams\n"
        "with LLM(max_model_len=64) as llm: llm.generate('One', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
