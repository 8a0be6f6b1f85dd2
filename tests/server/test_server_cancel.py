"""Rule 5: a call that ends for any reason stops its request at once, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fake_engine import FakeRequest, count_up, output
from running_server import RunningServer, wait_until

from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.server.proto import inference_pb2 as pb

REQUEST = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=6))


def start(server: RunningServer, method: str, request: pb.GenerateRequest, timeout: float) -> Any:
    """A call in flight, with `code()` to wait for."""
    return (server.stub.Generate if method == "Generate" else server.stub.Complete.future)(request, timeout=timeout)


@pytest.mark.parametrize("hold", [0, 3], ids=["before the first token", "mid-stream"])
def test_rule_5_client_cancels_a_stream(server: RunningServer, hold: int) -> None:
    server.engine.hold = hold
    call = server.stub.Generate(REQUEST, timeout=60)
    for _ in range(hold):
        next(call)
    wait_until(lambda: len(server.engine.running) == 1)
    call.cancel()
    wait_until(lambda: not server.engine.running)
    assert server.engine.num_aborted == 1
    assert server.works()


def test_rule_5_client_cancels_a_unary_call(server: RunningServer) -> None:
    server.engine.hold = 0
    call = server.stub.Complete.future(REQUEST, timeout=60)
    wait_until(lambda: len(server.engine.running) == 1)
    call.cancel()
    wait_until(lambda: not server.engine.running)
    assert server.engine.num_aborted == 1
    assert server.works()


def test_rule_5_connection_lost(server: RunningServer) -> None:
    server.engine.hold = 2
    with grpc.insecure_channel(server.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream = channel.unary_stream(
            "/pyengine.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        next(stream(REQUEST, timeout=60))
        assert len(server.engine.running) == 1
    wait_until(lambda: not server.engine.running)
    assert server.works()


@pytest.mark.parametrize("method", ["Generate", "Complete"])
def test_rule_5_deadline(server: RunningServer, method: str) -> None:
    server.engine.hold = 0
    assert start(server, method, REQUEST, timeout=0.3).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: not server.engine.running)
    assert server.engine.num_aborted == 1
    assert server.works()


@pytest.mark.parametrize("method", ["Generate", "Complete"])
def test_rule_5_abort(server: RunningServer, method: str) -> None:
    server.engine.hold = 0
    request = pb.GenerateRequest(text="a", request_id="mine")
    other = server.stub.Complete.future(REQUEST, timeout=60)
    call = start(server, method, request, timeout=60)
    wait_until(lambda: len(server.engine.running) == 2)
    assert server.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=60).aborted
    assert call.code() is grpc.StatusCode.CANCELLED
    assert "mine" not in server.engine.running
    assert len(server.engine.running) == 1
    other.cancel()


def test_abort_is_idempotent(shared_server: RunningServer) -> None:
    for _ in range(2):
        assert not shared_server.stub.Abort(pb.AbortRequest(request_id="nobody"), timeout=60).aborted
    with pytest.raises(grpc.RpcError) as error:
        shared_server.stub.Abort(pb.AbortRequest(), timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.value.trailing_metadata())["field"] == "request_id"


def test_rule_5_fifty_cancelled_at_random_points(server: RunningServer) -> None:
    """Some streamed, some unary, each cancelled after a random number of messages, while others run to their end."""
    rng = random.Random(5)
    server.engine.delay = 0.002
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=20))
    whole = [server.stub.Complete.future(request, timeout=60) for _ in range(10)]
    streams = [server.stub.Generate(request, timeout=60) for _ in range(50)]
    unary = [server.stub.Complete.future(request, timeout=60) for _ in range(10)]
    for call in streams:
        for _ in range(rng.randrange(20)):
            next(call)
        call.cancel()
    for call in unary:
        call.cancel()
    assert all(list(call.result().choices[0].token_ids) == list(range(10, 30)) for call in whole)
    wait_until(lambda: not server.engine.running and server.server.frontend.num_active == 0)
    assert server.works()


def test_slow_reader_stops_the_flow_of_outputs(server: RunningServer) -> None:
    """A client that does not read is not read for: its outputs stay in the engine, which merges them."""
    total = 1000

    def script(request: FakeRequest) -> Iterator[RequestOutput]:
        for i in range(total):
            reason = "length" if i == total - 1 else None
            yield output(request, [CompletionOutput(0, "x" * 50_000, [7], finish_reason=reason)], finished=reason is not None)

    server.engine.script = script
    call = server.stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=200)), timeout=120)
    next(call)
    (request,) = server.engine.requests
    # Another client is served as ever while this one's outputs wait; how many were taken by then is bounded by gRPC's buffers.
    for _ in range(20):
        assert list(server.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=60).token_ids) == [0, 97]
    pulled = -1
    while pulled != request.num_pulled:
        pulled = request.num_pulled
        server.run(asyncio.sleep(0.2))
    assert pulled < total / 4
    server.engine.script = count_up
    assert server.works()
    assert sum(len(message.token_ids) for message in call) == total - 1  # and the one read before
