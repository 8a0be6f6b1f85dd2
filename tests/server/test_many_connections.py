"""A thousand connections at once: half are cancelled, some do not read; memory stays bounded, nothing leaks, SIGTERM drains."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import REAL, ServerProcess

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

NUM_HTTP, NUM_GRPC, NUM_SLOW = 800, 200, 60
DRAIN_SECONDS = 60
MAX_GROWTH = 400 * 2**20  # bytes; a thousand requests with all of their output are far less

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Outcomes:
    """What became of the connections."""

    def __init__(self) -> None:
        self.num_whole = 0
        self.num_cancelled = 0
        self.failures: list[str] = []


def memory(pid: int, name: str) -> int:
    """Bytes of a process: VmRSS now, VmHWM at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def figures(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def http_request(max_tokens: int, **body: Any) -> bytes:
    data = json.dumps({"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True} | body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n{data}".encode()


async def over_http(address: tuple[str, int], rng: random.Random, is_slow: bool, outcomes: Outcomes) -> None:
    client = socket.socket()
    client.setblocking(False)
    if is_slow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(client, address)
    reader, writer = await asyncio.open_connection(sock=client, limit=2**12 if is_slow else 2**16)
    try:
        writer.write(http_request(48, logprobs=20) if is_slow else http_request(rng.randrange(4, 48)))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 4)
            outcomes.num_cancelled += 1
            return
        if is_slow:
            await asyncio.sleep(5)
        data = b""
        while b"data: [DONE]" not in data[-200:]:
            piece = await asyncio.wait_for(reader.read(2**16), 300)
            if not piece:
                outcomes.failures.append(f"closed after {data[-100:]!r}")
                return
            data += piece
        outcomes.num_whole += 1
    finally:
        writer.close()


async def over_grpc(target: str, rng: random.Random, outcomes: Outcomes) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        count = rng.randrange(4, 48)
        sampling = pb.SamplingParams(max_tokens=count, ignore_eos=True)
        call = rpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a", sampling=sampling), timeout=300)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 4)
            call.cancel()
            outcomes.num_cancelled += 1
            return
        try:
            received = [token_id async for message in call for token_id in message.token_ids]
        except grpc.aio.AioRpcError as error:
            outcomes.failures.append(f"{error.code()}: {error.details()} {error.debug_error_string()}")
            return
        if len(received) == count:
            outcomes.num_whole += 1
        else:
            outcomes.failures.append(f"{len(received)} of {count} tokens")


async def flood(target: str, url: str) -> Outcomes:
    outcomes, rng = Outcomes(), random.Random(8)
    host, port = url.removeprefix("http://").split(":")
    http = [over_http((host, int(port)), random.Random(i), i < NUM_SLOW, outcomes) for i in range(NUM_HTTP)]
    jobs = [*http, *(over_grpc(target, random.Random(1000 + i), outcomes) for i in range(NUM_GRPC))]
    rng.shuffle(jobs)
    await asyncio.gather(*jobs)
    return outcomes


async def until_idle(url: str) -> dict[str, float]:
    for _ in range(600):
        found = await asyncio.to_thread(figures, url)
        if found["pyengine:requests_in_flight"] == found["pyengine:num_requests"] == 0:
            return found
        await asyncio.sleep(0.2)
    raise AssertionError("requests are left")


async def drain(process: ServerProcess, target: str) -> list[int]:
    """Requests in flight when SIGTERM comes; how many tokens each got."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = rpc.InferenceStub(channel)
        sampling = pb.SamplingParams(max_tokens=100, ignore_eos=True)
        calls = [stub.Generate(pb.GenerateRequest(text="a", sampling=sampling), timeout=300) for _ in range(50)]
        streams = [aiter(call) for call in calls]
        firsts = [len((await anext(stream)).token_ids) for stream in streams]
        process.process.send_signal(signal.SIGTERM)

        async def rest(stream: Any) -> int:
            return sum([len(message.token_ids) async for message in stream])

        return [first + more for first, more in zip(firsts, await asyncio.gather(*map(rest, streams)), strict=True)]


def test_a_thousand_connections(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    flags = ["--device", "cpu", "--num-kv-blocks", "512", "--block-size", "8", "--max-num-seqs", "64"]
    flags += ["--port", "0", "--http-port", "0", "--shutdown-timeout", str(DRAIN_SECONDS), "--log-level", "warning"]
    try:
        with ServerProcess(*REAL, str(tiny_llama), *flags) as process:
            target = process.wait_ready()
            url = process.wait_for(r"^serving http on (\S+)$").group(1)
            asyncio.run(over_grpc(target, random.Random(0), Outcomes()))  # what is allocated once
            before, pid = memory(process.process.pid, "VmRSS"), process.process.pid
            outcomes = asyncio.run(flood(target, url))
            found = asyncio.run(until_idle(url))
            peak, after = memory(pid, "VmHWM"), memory(pid, "VmRSS")
            again = asyncio.run(flood(target, url))
            asyncio.run(until_idle(url))
            later = memory(pid, "VmRSS")
            tokens = asyncio.run(drain(process, target))
            code = process.exit_code()
            log = process.log
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with capsys.disabled():
        mib = [round(value / 2**20) for value in (before, peak, after, later)]
        print(f"\n{outcomes.num_whole} whole, {outcomes.num_cancelled} cancelled; ", end="")
        print(
            len(outcomes.failures),
            len(again.failures),
            f"MiB before {mib[0]}, at most {mib[1]}, after {mib[2]}, after as many again {mib[3]}",
        )
    for one in (outcomes, again):
        assert not one.failures, one.failures[:5]
        assert one.num_whole + one.num_cancelled == NUM_HTTP + NUM_GRPC
        assert one.num_cancelled > 400
    assert found["pyengine:num_free_kv_blocks"] == found["pyengine:num_kv_blocks"]
    assert peak - before < MAX_GROWTH
    assert later - after < MAX_GROWTH / 8, "what the first thousand left would be left again"
    assert (tokens, code) == ([100] * 50, 0)
    assert "Traceback" not in log
