"""The gateway `smg` from PyPI, unmodified, in front of two workers that serve the default model."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from server_process import REAL, ServerProcess
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

pytest.importorskip("smg", reason="PyPI has no wheel of the gateway smg for this platform")

BLOCK_SIZE = 16
WORKER = [*REAL, "--served-model-name", "smol", "--port", "0", "--http-port", "0", "--num-threads", "1"]
WORKER += ["--num-kv-blocks", "400", "--max-model-len", "1024", "--block-size", str(BLOCK_SIZE)]
GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 12}
READY_SECONDS = 120  # for the gateway to find its workers, on a busy machine


@dataclass
class Worker:
    process: ServerProcess
    address: str
    http: str

    def loads(self) -> Any:
        with grpc.insecure_channel(self.address) as channel:
            return rpc.VllmEngineStub(channel).GetLoads(pb.GetLoadsRequest(), timeout=60).loads[0]

    def num_served(self) -> int:
        """Requests that ended well, by the worker's own count."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{")))


@dataclass
class Fleet:
    workers: list[Worker]
    base_url: str
    log: Path  # of the gateway

    def client(self, base_url: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{base_url or self.base_url}/v1", api_key="any", max_retries=0, timeout=120)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        processes = [stack.enter_context(ServerProcess(*WORKER)) for _ in range(2)]
        workers = []
        for process in processes:
            address = process.wait_ready()
            workers.append(Worker(process, address, process.wait_for(r"^serving http on (\S+)$").group(1)))
        port, log = free_port(), tmp_path_factory.mktemp("gateway") / "log"
        with log.open("w") as sink:
            gateway = subprocess.Popen(
                [
                    *(sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
                    *("--worker-urls", *(f"grpc://{worker.address}" for worker in workers)),
                    *("--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
                    *("--health-check-interval-secs", "1"),
                ],
                stdout=sink,
                stderr=sink,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        stack.callback(gateway.wait)
        stack.callback(gateway.kill)
        running = Fleet(workers, f"http://127.0.0.1:{port}", log)
        _wait_ready(running, gateway)
        yield running


def _wait_ready(fleet: Fleet, gateway: subprocess.Popen[bytes]) -> None:
    """Both workers are found, and so is their tokenizer."""
    log = fleet.log
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and gateway.poll() is None:
        text = log.read_text()
        if "Successfully loaded tokenizer" in text and text.count("continuing with live events") >= 2:
            return
        time.sleep(0.2)
    pytest.fail(f"the gateway is not ready:\n{log.read_text()[-4000:]}")


def chat(content: str) -> Any:
    return [{"role": "user", "content": content}]


def test_chat_through_the_gateway_streams_the_text_of_a_direct_call(fleet: Fleet) -> None:
    params = GREEDY | {"messages": chat("Name three rivers of Europe, and say where they end."), "max_tokens": 48}
    with fleet.client() as through, fleet.client(fleet.workers[0].http) as direct:
        expected = direct.chat.completions.create(**params)
        whole = through.chat.completions.create(**params)
        chunks = list(through.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    text = expected.choices[0].message.content
    assert text
    assert whole.choices[0].message.content == text
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 10, "it came in pieces"
    assert expected.usage is not None
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            expected.usage.prompt_tokens,
            expected.usage.completion_tokens,
        )
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason] == [expected.choices[0].finish_reason]


def test_several_choices_stop_texts_and_logprobs_come_through(fleet: Fleet) -> None:
    with fleet.client() as through:
        sampled = GREEDY | {"temperature": 1, "seed": 5}
        answer = through.chat.completions.create(**sampled, messages=chat("Say something."), n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) > 1
        scored = through.chat.completions.create(**GREEDY, messages=chat("Say something."), logprobs=True, top_logprobs=2)
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content
        assert all(position.logprob <= 0 and len(position.top_logprobs) == 2 for position in logprobs.content)
        text = scored.choices[0].message.content or ""
        stop = text.split()[2]
        stopped = through.chat.completions.create(**GREEDY, messages=chat("Say something."), stop=[stop])
        assert stopped.choices[0].finish_reason == "stop"
        assert text.startswith(stopped.choices[0].message.content or "")
        assert stop not in (stopped.choices[0].message.content or "")


def test_requests_go_where_their_prefix_is_cached(fleet: Fleet, record_property: Any) -> None:
    """Each prefix is computed by one worker behind the gateway's back, so that only its KV events can tell where it is."""
    prefixes = [f"Chapter {i}. " + " ".join(f"{i}{j} sheep and {j}{i} goats," for j in range(12)) for i in range(6)]
    with fleet.client() as through:
        for i, prefix in enumerate(prefixes):
            with fleet.client(fleet.workers[i % 2].http) as direct:
                direct.chat.completions.create(**GREEDY, messages=chat(f"{prefix} How many?"))
        _settle()
        before = [worker.num_served() for worker in fleet.workers]
        cached = total = 0
        for question in ("How many sheep?", "How many goats?", "Why?"):
            for prefix in prefixes:
                answer = through.chat.completions.create(**GREEDY, messages=chat(f"{prefix} {question}"))
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                hit = answer.usage.prompt_tokens_details.cached_tokens or 0
                shared = (
                    (answer.usage.prompt_tokens - 24) // BLOCK_SIZE * BLOCK_SIZE
                )  # all but the question and the template's end
                assert hit >= shared, "the other worker was asked"
                cached, total = cached + hit, total + answer.usage.prompt_tokens
    assert [worker.num_served() - n for worker, n in zip(fleet.workers, before, strict=True)] == [9, 9]
    record_property("prefix_cache_hit_rate", cached / total)
    print(f"prefix cache hit rate through the gateway: {cached / total:.0%}")
    assert cached / total > 0.7


def _settle() -> None:
    """KV events reach the gateway within a step; nothing tells when it has applied them."""
    time.sleep(1.0)


def test_a_killed_workers_traffic_moves_to_the_other(fleet: Fleet) -> None:
    """Only the next test may follow this one: it leaves one worker."""
    lost, left = fleet.workers
    prefix = "Chapter 0. " + " ".join(f"0{j} sheep and {j}0 goats," for j in range(12))  # which the lost one has cached
    params = GREEDY | {"messages": chat(f"{prefix} Who counted?")}
    with fleet.client() as through:
        expected = through.chat.completions.create(**params).choices[0].message.content
        before = left.num_served()
        lost.process.process.kill()
        lost.process.process.wait()
        for _ in range(5):
            assert through.chat.completions.create(**params).choices[0].message.content == expected
        assert left.num_served() - before == 5
        assert (
            "".join(
                choice.delta.content or ""
                for chunk in through.chat.completions.create(**params, stream=True)
                for choice in chunk.choices
            )
            == expected
        )


@pytest.mark.slow
def test_a_worker_that_was_restarted_is_followed_anew(fleet: Fleet) -> None:
    """Its cache is empty and its events are numbered from elsewhere: the gateway must begin with a snapshot."""
    lost = fleet.workers[0]
    lost.process.process.kill()
    lost.process.process.wait()
    port = lost.address.rsplit(":", 1)[1]
    with ServerProcess(*WORKER, "--port", port) as process:
        again = Worker(process, process.wait_ready(), process.wait_for(r"^serving http on (\S+)$").group(1))
        deadline = time.monotonic() + READY_SECONDS
        with fleet.client(again.http) as direct, fleet.client() as through:
            for (
                chapter
            ) in itertools.count():  # until the gateway has found it; a prefix that the other worker has seen tells nothing
                assert time.monotonic() < deadline, fleet.log.read_text()[-4000:]
                prefix = f"New chapter {chapter}. " + " ".join(f"{chapter}{j} ships and {j} boats," for j in range(24))
                direct.chat.completions.create(**GREEDY, messages=chat(f"{prefix} How many?"))
                served = again.num_served()
                _settle()
                answer = through.chat.completions.create(**GREEDY, messages=chat(f"{prefix} How many ships?"))
                if again.num_served() > served:  # preferred for its prefix
                    break
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 100
        assert fleet.log.read_text().count("continuing with live events") >= 3
