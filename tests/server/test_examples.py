"""The programs in examples/ run as they are against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeRequest, output
from running_server import RunningServer, wait_until
from server_process import ROOT

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.server.proto import inference_pb2 as pb

EXAMPLES = ROOT / "examples"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(
    NODE is None or not (EXAMPLES / "node/node_modules").is_dir(),
    reason="node is not installed, or its packages are not: apt-get install nodejs npm, then make dev",
)


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    args = EngineArgs(model=str(tiny_llama), served_model_name="tiny", device="cpu", num_kv_blocks=64, block_size=8)
    running = RunningServer(AsyncLLMEngine(LLMEngine(args)), http_port=0)
    yield running
    running.close()


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def expected(real: RunningServer, text: str, max_tokens: int) -> pb.Choice:
    request = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(temperature=0, max_tokens=max_tokens))
    return real.stub.Complete(request, timeout=60).choices[0]


def test_python_grpcio(real: RunningServer) -> None:
    choice = expected(real, "Yesterday", 16)
    reason = pb.FinishReason.Name(choice.finish.reason)
    last = f"\n[{reason}, {choice.finish.usage.completion_tokens} tokens]\n"
    assert run(sys.executable, "examples/grpc_client.py", real.target, "Yesterday") == choice.text + last


def test_openai_package(real: RunningServer) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hello")])
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(temperature=0, max_tokens=32))
    choice = real.stub.Complete(request, timeout=60).choices[0]
    shown = run(sys.executable, "examples/openai_client.py", f"{real.base_url}/v1", "Hello")
    assert shown == f"{choice.text}\n[{choice.finish.usage.completion_tokens} tokens]\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(real: RunningServer) -> None:
    completion, *stream = run("examples/curl.sh", real.base_url).splitlines()
    assert json.loads(completion)["choices"][0]["text"] == expected(real, "The capital of France is", 8).text
    events = [line.removeprefix("data: ") for line in stream if line]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events[:-1])


def node(real: RunningServer, *arguments: str) -> str:
    assert NODE is not None
    return run(NODE, "examples/node/client.js", "--target", real.target, *arguments)


@needs_node
def test_node_streams(real: RunningServer) -> None:
    choice = expected(real, "Yesterday", 16)
    reason = pb.FinishReason.Name(choice.finish.reason)
    last = f"\n[{reason}, {choice.finish.usage.completion_tokens} tokens]\n"
    assert node(real, "--max-tokens", "16", "Yesterday") == choice.text + last


@needs_node
def test_node_takes_an_end_of_sequence_token_without_text(start_server: Callable[..., RunningServer]) -> None:
    def ends(request: FakeRequest) -> Iterator[RequestOutput]:
        yield output(request, [CompletionOutput(0, "one", [9])], finished=False)
        yield output(request, [CompletionOutput(0, "", [2], finish_reason="stop")], finished=True)

    server = start_server()
    server.engine.script = ends
    assert node(server, "--max-tokens", "16", "Yesterday") == "one\n[FINISH_REASON_STOP, 2 tokens]\n"


@pytest.mark.parametrize("name", ["grpc_client", "openai_client"])
def test_python_help(name: str) -> None:
    shown = run(sys.executable, f"examples/{name}.py", "--help")
    assert shown.startswith(f"usage: {name}.py [-h]")
    assert "default: " in shown


@needs_node
def test_nodes_cancel_frees_the_blocks_within_a_step(real: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = real.engine
    steps_at_cancel: list[int] = []
    step, close = engine._engine.step, engine._step_thread.close

    def slow_step() -> Any:
        time.sleep(0.02)  # so that the client's cancel comes long before the last token
        return step()

    def watched_close(stream: Any) -> None:
        if not stream.is_done:
            steps_at_cancel.append(engine._engine.stats()["num_steps"])
        close(stream)

    monkeypatch.setattr(engine._engine, "step", slow_step)
    monkeypatch.setattr(engine._step_thread, "close", watched_close)
    before = engine.stats()["num_steps"]
    shown = node(real, "--max-tokens", "400", "--cancel-after", "5", "Yesterday")
    assert re.search(r"\n\[cancelled after \d+ tokens\]\n$", shown)
    wait_until(lambda: bool(steps_at_cancel) and engine.stats()["num_requests"] == 0)
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_steps"] - steps_at_cancel[0] <= 1
    assert stats["num_steps"] - before < 400, "it was cancelled, and did not run to its end"
