"""What a server bounds of a request: its output, and how many calls of the tokenizer there may be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from fake_engine import MAX_MODEL_LEN
from running_server import RunningServer, post, wait_until

from pyengine.server.proto import inference_pb2 as pb

TEXT_CALLS: dict[str, Any] = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}


def test_a_limit_of_output_tokens_on_both_ports(start_server: Callable[..., RunningServer]) -> None:
    """More is refused; a request without a limit of its own gets this one."""
    server = start_server(http_port=0, max_output_tokens=20)
    status, answer, _ = post(server, {}, max_tokens=21)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert "is 21; this server generates at most 20" in answer["error"]["message"]
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=21)), timeout=60)
    assert (error.value.code(), dict(error.value.trailing_metadata())["field"]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens",
    )
    unlimited = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=-1))
    assert len(server.stub.Complete(unlimited, timeout=60).choices[0].token_ids) == 20
    assert post(server, {}, max_tokens=20)[1]["usage"]["completion_tokens"] == 20


def test_no_limit_of_output_tokens_refuses_a_request_that_sets_none(start_server: Callable[..., RunningServer]) -> None:
    """A long prompt has less room than the server's limit, and is answered all the same."""
    server = start_server(http_port=0, max_output_tokens=20)
    ids = [5] * (MAX_MODEL_LEN - 7)
    unlimited = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(max_tokens=-1))
    assert len(server.stub.Complete(unlimited, timeout=60).choices[0].token_ids) == 7
    chat = {"messages": [{"role": "user", "content": "a" * len(ids)}]}
    assert post(server, {}, "/v1/chat/completions", **chat)[1]["usage"]["completion_tokens"] == 7
    status, answer, _ = post(server, {}, "/v1/chat/completions", **chat, min_tokens=21)
    assert (status, answer["error"]["param"]) == (400, "min_tokens")


def test_a_limit_of_output_tokens_below_the_apis_default(start_server: Callable[..., RunningServer]) -> None:
    """Nobody is refused for the 16 tokens of a completion that does not say how many it wants."""
    server = start_server(http_port=0, max_output_tokens=10)
    assert post(server, {}, max_tokens=None)[1]["usage"]["completion_tokens"] == 10
    assert len(server.stub.Complete(pb.GenerateRequest(text="a"), timeout=60).choices[0].token_ids) == 10
    assert post(server, {}, max_tokens=16)[0] == 400


def test_calls_of_the_tokenizer_are_bounded(start_server: Callable[..., RunningServer]) -> None:
    """They share one thread, so that a flood of them would hold up every request."""
    server = start_server(http_port=0, max_concurrent_requests=2)
    server.engine.tokenizer_is_free.clear()
    calls = [
        server.stub.Tokenize.future(pb.TokenizeRequest(text="a"), timeout=60),
        server.stub.Detokenize.future(pb.DetokenizeRequest(token_ids=[5]), timeout=60),
    ]
    wait_until(lambda: server.engine.num_tokenizer_calls == 2)
    for path, body in (*TEXT_CALLS.items(), ("/v1/completions", {})):
        status, answer, headers = post(server, {}, path, **body)
        assert (status, headers["retry-after"]) == (429, "1"), path
        assert "2 choices are in flight, and 1 more came; this server takes 2" in answer["error"]["message"]
    for call in calls:
        call.cancel()
    wait_until(lambda: server.server.frontend.num_choices == 0)
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(post, server, {}, path, **body) for path, body in TEXT_CALLS.items()]
        wait_until(lambda: server.engine.num_tokenizer_calls == 2)
        for refused in (
            lambda: server.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=60),
            lambda: server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), timeout=60),
        ):
            with pytest.raises(grpc.RpcError) as error:
                refused()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        server.loop.call_soon_threadsafe(server.engine.tokenizer_is_free.set)
        assert [future.result()[0] for future in sent] == [200, 200]
    assert server.server.frontend.num_choices == 0
