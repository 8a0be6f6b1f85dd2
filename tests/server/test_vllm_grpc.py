"""vllm.grpc.engine.VllmEngine, through the stubs that gateways use."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from fake_engine import MAX_MODEL_LEN, FakeRequest, output
from running_server import RunningServer, wait_until
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2

from pyengine.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, SnapshotChunk
from pyengine.errors import DataLostError, OutOfRangeError
from pyengine.inputs import TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, Logprob, RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.server.auth import load_api_keys
from pyengine.tenants import Tenant, TenantKey

TOKENS = pb.TokenizedInput(original_text="ignored", input_ids=[5, 6, 7])


def stub_of(server: RunningServer) -> Any:
    return rpc.VllmEngineStub(server.channel)


def generate(server: RunningServer, **fields: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(**({"tokenized": TOKENS} | fields))
    return list(stub_of(server).Generate(request, timeout=60))


def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        list(call) if hasattr(call, "__iter__") else call()
    return error.value.code(), error.value.details()


def test_a_stream_has_deltas_and_one_complete_a_choice(server: RunningServer) -> None:
    messages = generate(server, request_id="mine", stream=True, sampling_params=pb.SamplingParams(n=2, max_tokens=4))
    for index in range(2):
        chunks = [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]
        assert [list(chunk.token_ids) for chunk in chunks] == [[10], [11], [12], [13]]
        assert [(c.prompt_tokens, c.completion_tokens, c.cached_tokens) for c in chunks] == [(3, 1, 2)] * 4, "deltas"
        (complete,) = (m.complete for m in messages if m.HasField("complete") and m.complete.index == index)
        assert (list(complete.output_ids), complete.completion_tokens) == ([13], 1), "the last delta again"
        assert (complete.finish_reason, complete.prompt_tokens, complete.cached_tokens) == ("length", 3, 2)
        assert complete.WhichOneof("matched_stop") is None
    assert messages[-1].HasField("complete")
    (request,) = server.engine.requests
    assert (request.request_id, request.prompt) == ("mine", TokensPrompt([5, 6, 7]))


def test_without_streaming_complete_has_everything(server: RunningServer) -> None:
    (message,) = generate(server, sampling_params=pb.SamplingParams(max_tokens=4))
    assert list(message.complete.output_ids) == [10, 11, 12, 13]
    assert (message.complete.completion_tokens, message.complete.finish_reason) == (4, "length")
    generate(server, tokenized=None, text="abc", sampling_params=pb.SamplingParams(max_tokens=1))
    assert server.engine.requests[-1].prompt == TextPrompt("abc")


def test_unset_fields_mean_the_documented_defaults(server: RunningServer) -> None:
    generate(server)
    generate(server, stream=True)
    expected = SamplingParams(
        **{"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "max_tokens": None},
        **dict.fromkeys(("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), False),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert [request.params for request in server.engine.requests] == [
        expected,
        expected.replace(output_kind=RequestOutputKind.DELTA),
    ]


def test_the_servers_limit_of_output_tokens_ends_what_has_no_limit(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_output_tokens=20)
    for room, expected in ((100, 20), (7, 7)):
        long = pb.TokenizedInput(input_ids=[5] * (MAX_MODEL_LEN - room))
        assert generate(server, tokenized=long)[0].complete.completion_tokens == expected
    refused = stub_of(server).Generate(
        pb.GenerateRequest(tokenized=TOKENS, sampling_params=pb.SamplingParams(max_tokens=21)), timeout=60
    )
    assert status_of(refused) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens: is 21; this server generates at most 20",
    )


def test_every_sampling_field_reaches_the_engine(server: RunningServer) -> None:
    values: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125, "frequency_penalty": 0.25, "presence_penalty": -0.5},
        **{"repetition_penalty": 1.5, "max_tokens": 7, "min_tokens": 3, "stop": ("x", "yy"), "stop_token_ids": (5, 6)},
        **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "ignore_eos": True, "n": 2, "logprobs": 2},
        **{"prompt_logprobs": 0, "seed": -7, "include_stop_str_in_output": True, "logit_bias": {3: -100.0, 4: 2.5}},
    }
    generate(server, sampling_params=pb.SamplingParams(**values))
    final = RequestOutputKind.FINAL_ONLY
    assert server.engine.requests[0].params == SamplingParams(**values, detokenize=True, output_kind=final)
    refused = {"truncate_prompt_tokens", *(f.name for f in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields)}
    known = set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - {"grammar_from_first_token"}  # says something of a constraint
    assert known == set(values) | refused


def test_temperature_zero_is_greedy_and_not_unset(server: RunningServer) -> None:
    generate(server, sampling_params=pb.SamplingParams(temperature=0.0))
    assert server.engine.requests[0].params.is_greedy


def test_what_the_protocol_has_no_field_for_is_metadata(server: RunningServer) -> None:
    metadata = (("x-priority", "-3"), ("x-cache-salt", "pepper"), ("x-request-id", "from-header"))
    for request in (pb.GenerateRequest(tokenized=TOKENS), pb.GenerateRequest(tokenized=TOKENS, request_id="field")):
        call = stub_of(server).Generate(request, metadata=metadata, timeout=60)
        assert dict(call.initial_metadata())["x-request-id"] in ("from-header", "field")
        list(call)
    first, second = server.engine.requests
    assert (first.request_id, first.priority, first.cache_salt) == ("from-header", -3, "pepper")
    assert (second.request_id, second.priority) == ("field", -3)
    bad = stub_of(server).Generate(pb.GenerateRequest(tokenized=TOKENS), metadata=(("x-priority", "high"),), timeout=60)
    assert status_of(bad)[0] is grpc.StatusCode.INVALID_ARGUMENT


def _with_logprobs(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    def position(token_id: int) -> dict[int, Logprob]:
        return {token_id: Logprob(-2.0, 5, "t"), 1: Logprob(-0.25, 1, "a"), 2: Logprob(-0.5, 2, "b")}

    prompt: Any = [None, position(6), position(7)]
    for i, token_id in enumerate((40, 41)):
        reason: Any = "stop" if i else None
        choice = CompletionOutput(0, "", [token_id], -2.0, [position(token_id)], reason, stop_reason=41 if i else None)
        yield output(request, [choice], finished=bool(i), prompt_logprobs=prompt)


def test_logprobs_and_the_matched_stop(server: RunningServer) -> None:
    server.engine.script = _with_logprobs
    params = pb.SamplingParams(logprobs=2, prompt_logprobs=1)
    first, second, last = generate(server, stream=True, sampling_params=params)
    logprobs = first.chunk.output_logprobs
    assert (list(logprobs.token_ids), list(logprobs.token_logprobs)) == ([40], [-2.0])
    assert [(list(top.token_ids), list(top.values)) for top in logprobs.top_logprobs] == [([1, 2], [-0.25, -0.5])]
    prompt = first.chunk.input_logprobs
    assert list(prompt.token_ids) == [5, 6, 7]
    assert [p.value if p.HasField("value") else None for p in prompt.token_logprobs] == [None, -2.0, -2.0]
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [1], [1]]
    assert not second.chunk.HasField("input_logprobs"), "with the first chunk only"
    assert (last.complete.finish_reason, last.complete.matched_token_id) == ("stop", 41)
    assert list(last.complete.output_logprobs.token_ids) == [41]


UNSUPPORTED = [
    ("json_schema", {"sampling_params": pb.SamplingParams(json_schema="{}")}),
    ("regex", {"sampling_params": pb.SamplingParams(regex="a")}),
    ("grammar", {"sampling_params": pb.SamplingParams(grammar="root ::= 'a'")}),
    ("structural_tag", {"sampling_params": pb.SamplingParams(structural_tag="{}")}),
    ("json_object", {"sampling_params": pb.SamplingParams(json_object=True)}),
    ("choice", {"sampling_params": pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["a"]))}),
    ("truncate_prompt_tokens", {"sampling_params": pb.SamplingParams(truncate_prompt_tokens=4)}),
    ("mm_inputs", {"mm_inputs": pb.MultimodalInputs()}),
    ("extra_mm_inputs", {"extra_mm_inputs": [pb.MultimodalInputs()]}),
    ("media_refs", {"media_refs": pb.MediaRefs()}),
    ("kv_transfer_params", {"kv_transfer_params": pb.KvTransferParams(remote_host="h", remote_port=1)}),
    ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
]


@pytest.mark.parametrize(("field", "fields"), UNSUPPORTED, ids=[field for field, _ in UNSUPPORTED])
def test_what_this_engine_has_nothing_for_is_unimplemented(
    shared_server: RunningServer, field: str, fields: dict[str, Any]
) -> None:
    call = stub_of(shared_server).Generate(pb.GenerateRequest(tokenized=TOKENS, **fields), timeout=60)
    code, details = status_of(call)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert field in details
    assert shared_server.works()


def test_methods_that_this_engine_has_nothing_for_are_unimplemented(shared_server: RunningServer) -> None:
    stub = stub_of(shared_server)
    for method, request in (
        ("Embed", pb.EmbedRequest(tokenized=TOKENS)),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ):
        code, details = status_of(lambda method=method, request=request: getattr(stub, method)(request, timeout=60))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert method in details


BAD = [
    ("input", pb.GenerateRequest()),
    ("tokenized.input_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput(original_text="a"))),
    ("tokenized.input_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**32 - 1]))),
    ("temperature", pb.GenerateRequest(tokenized=TOKENS, sampling_params=pb.SamplingParams(temperature=float("nan")))),
    ("top_p", pb.GenerateRequest(tokenized=TOKENS, sampling_params=pb.SamplingParams(top_p=-1))),
    ("top_k", pb.GenerateRequest(tokenized=TOKENS, sampling_params=pb.SamplingParams(top_k=2**32 - 1))),
    ("max_tokens", pb.GenerateRequest(tokenized=TOKENS, sampling_params=pb.SamplingParams(max_tokens=0))),
    ("logprobs", pb.GenerateRequest(tokenized=TOKENS, sampling_params=pb.SamplingParams(logprobs=-1))),
    ("data_parallel_rank", pb.GenerateRequest(tokenized=TOKENS, data_parallel_rank=1)),
    ("request_id", pb.GenerateRequest(tokenized=TOKENS, request_id="two words")),
]


@pytest.mark.parametrize(("field", "request_"), BAD)
def test_bad_input_names_its_field(shared_server: RunningServer, field: str, request_: pb.GenerateRequest) -> None:
    code, details = status_of(stub_of(shared_server).Generate(request_, timeout=60))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(field + ":")
    assert shared_server.works()


def test_bytes_that_are_no_message_are_the_clients_mistake(shared_server: RunningServer) -> None:
    call = shared_server.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff", timeout=60)
    assert status_of(call)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_abort_ends_a_stream_with_its_reason_and_is_idempotent(server: RunningServer) -> None:
    server.engine.script = _until_aborted
    server.engine.hold = 1
    stub = stub_of(server)
    call = stub.Generate(pb.GenerateRequest(tokenized=TOKENS, request_id="mine", stream=True), timeout=60)
    assert list(next(call).chunk.token_ids) == [10]
    for ids in (["mine", "unknown"], ["mine"], []):
        assert stub.Abort(pb.AbortRequest(request_ids=ids), timeout=60) == pb.AbortResponse()
    wait_until(lambda: server.engine.num_aborted == 1 or not server.engine.running)
    assert status_of(call)[0] is grpc.StatusCode.CANCELLED


def _until_aborted(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    yield output(request, [CompletionOutput(0, "", [10])], finished=False)
    yield output(request, [CompletionOutput(0, "", [11])], finished=False)


def test_an_aborted_choice_is_told_in_complete(server: RunningServer) -> None:
    def script(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
        yield output(request, [CompletionOutput(0, "", [], finish_reason="abort")], finished=True)

    server.engine.script = script
    (message,) = generate(server, stream=True)
    assert (message.complete.finish_reason, list(message.complete.output_ids)) == ("abort", [])


def test_health_model_server_and_loads(server: RunningServer) -> None:
    stub = stub_of(server)
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=60) == pb.HealthCheckResponse(healthy=True, message="serving")
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert (model.served_model_name, model.model_path, model.model_type) == ("fake", "fake-path", "llama")
    assert (model.is_generation, model.max_context_length, model.vocab_size) == (True, 256, 512)
    assert (list(model.eos_token_ids), model.bos_token_id, list(model.architectures)) == ([1, 3], 0, ["LlamaForCausalLM"])
    server.engine.hold = 0
    call = stub.Generate(pb.GenerateRequest(tokenized=TOKENS, stream=True), timeout=60)
    call.initial_metadata()
    info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
    assert (info.server_type, info.active_requests, info.data_parallel_size, info.block_size) == ("vllm-grpc", 1, 1, 16)
    assert info.last_receive_timestamp > 0
    assert info.max_num_seqs == 256
    wait_until(lambda: len(server.engine.running) == 1)
    loads = stub.GetLoads(pb.GetLoadsRequest(), timeout=60)
    assert (loads.dp_rank_count, loads.version) == (1, "1.2.3")
    (load,) = loads.loads
    assert (load.num_running_reqs, load.num_total_reqs, load.num_used_tokens) == (1, 1, 16)
    assert (load.max_total_num_tokens, load.token_usage) == (128, 0.125)
    assert not stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=60).loads
    call.cancel()


def test_a_worker_that_drains_or_hangs_is_not_healthy(server: RunningServer) -> None:
    stub = stub_of(server)
    server.server.frontend.is_stalled = True
    assert not stub.HealthCheck(pb.HealthCheckRequest(), timeout=60).healthy
    server.server.frontend.is_stalled = False
    server.run(server.server.drain())
    answer = stub.HealthCheck(pb.HealthCheckRequest(), timeout=60)
    assert (answer.healthy, answer.message) == (False, "the server is shutting down")
    call = stub.Generate(pb.GenerateRequest(tokenized=TOKENS), timeout=60)
    assert status_of(call)[0] is grpc.StatusCode.UNAVAILABLE


def test_the_tokenizer_comes_as_a_zip_with_its_digest(shared_server: RunningServer) -> None:
    def fetch() -> bytes:
        chunks = list(stub_of(shared_server).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))
        data = b"".join(chunk.data for chunk in chunks)
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        return data

    data = fetch()
    assert fetch() == data
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert set(archive.namelist()) == {"tokenizer.json", "config.json", "generation_config.json"}
    assert json.loads(archive.read("config.json"))["eos_token_id"] == [1, 3]


def test_flushing_waits_for_idleness_and_says_whether_it_came(server: RunningServer) -> None:
    stub = stub_of(server)
    assert stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=60).success
    server.engine.hold = 0
    call = stub.Generate(pb.GenerateRequest(tokenized=TOKENS, stream=True), timeout=60)
    wait_until(lambda: len(server.engine.running) == 1)
    answer = stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.01), timeout=60)
    assert (answer.success, answer.message) == (False, "not flushed: 1 requests are in flight")
    code, details = status_of(lambda: stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=float("nan")), timeout=60))
    assert (code, details.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout_s")
    call.cancel()


def test_kv_events_keep_their_hashes_parents_tokens_and_salts(server: RunningServer) -> None:
    stored = [BlockStored(-5, None, (1, 2), None), BlockStored(6, -5, (3, 4), None), BlockStored(7, -5, (5, 6), "pepper")]
    server.engine.kv_script = [
        KVEventBatch(0, 1.5, [AllBlocksCleared(), *stored], SnapshotChunk(0, 1, 3)),
        KVEventBatch(0, 2.5, [BlockRemoved(6), BlockRemoved(7), stored[1]]),
        DataLostError("gone"),
    ]
    call = stub_of(server).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=41), timeout=60)
    snapshot, news = next(call), next(call)
    assert (snapshot.sequence_number, snapshot.timestamp, snapshot.dp_rank) == (42, 1.5, 0)
    assert (snapshot.snapshot.index, snapshot.snapshot.count, snapshot.snapshot.blocks) == (0, 1, 3)
    cleared, chain, salted = snapshot.events
    assert cleared.WhichOneof("data") == "cleared"
    assert [(b.block_hash, list(b.token_ids), b.block_size) for b in chain.stored.blocks] == [(-5, [1, 2], 2), (6, [3, 4], 2)]
    assert not chain.stored.HasField("parent_block_hash")
    assert (salted.stored.parent_block_hash, salted.stored.cache_salt, salted.event_id) == (-5, "pepper", 0)
    assert not news.HasField("snapshot")
    assert list(news.events[0].removed.block_hashes) == [6, 7]
    assert news.events[1].stored.parent_block_hash == -5
    assert [event.event_id for event in news.events] == [1, 2]
    assert status_of(call) == (grpc.StatusCode.DATA_LOSS, "gone")


def test_a_refused_subscription_has_no_initial_metadata(server: RunningServer) -> None:
    """Else the gateway takes it for a stream that broke, and asks for the same place for ever."""
    server.engine.kv_refusal = OutOfRangeError("gone")
    call = stub_of(server).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=41), timeout=60)
    assert status_of(call) == (grpc.StatusCode.OUT_OF_RANGE, "gone")
    assert not call.initial_metadata()
    server.engine.kv_refusal = None
    call = stub_of(server).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=41), timeout=60)
    call.initial_metadata()  # at once, though there is no batch
    call.cancel()


def test_what_concerns_every_tenant_needs_a_trusted_key(start_server: Any) -> None:
    def tenant(name: str, *, trusted: bool) -> Tenant:
        key = TenantKey(sha256=hashlib.sha256(name.encode()).digest(), trusted=trusted)
        return Tenant(name=name, api_keys=(key,))

    tenants = (tenant("acme", trusted=False), tenant("gateway", trusted=True), Tenant(name="default"))
    server = start_server(keys=load_api_keys(None, None, tenants), tenants=tenants)
    server.engine.kv_script = [KVEventBatch(0, 1.0, [AllBlocksCleared()])]
    stub = stub_of(server)
    for key in ("acme", "gateway"):
        metadata = [("authorization", f"Bearer {key}")]
        subscription = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=metadata, timeout=60)
        flush = stub.FlushCache.future(common_pb2.FlushCacheRequest(), metadata=metadata, timeout=60)
        if key == "gateway":
            assert next(subscription).events
            assert flush.result().success
            subscription.cancel()
        else:
            assert status_of(subscription)[0] is grpc.StatusCode.UNAUTHENTICATED
            assert flush.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_subscription_ends_with_its_client(server: RunningServer) -> None:
    call = stub_of(server).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=60)
    call.initial_metadata()
    call.cancel()
    assert server.works()


def test_without_the_stubs_the_rest_is_served() -> None:
    """`smg-grpc-proto` is an extra's; a server without it says so in one line."""
    code = (
        "import sys; sys.modules['smg_grpc_proto'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'smg_grpc_proto' else find(name, *rest)\n"
        "import pyengine.server.lifecycle as lifecycle\n"
        "print(lifecycle.SERVICES)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "pyengine.v1.Inference" in result.stdout
    assert "VllmEngine" not in result.stdout


def test_pings_as_often_as_they_come_are_no_strikes(shared_server: RunningServer) -> None:
    """The gateway's keepalive is 30 s; gRPC's own servers hang up on the third ping within 5 minutes. Here in bare HTTP/2."""
    host, port = shared_server.target.rsplit(":", 1)
    settings, ping, ping_ack, goaway = (0x4, 0x0), (0x6, 0x0), (0x6, 0x1), (0x7, 0x0)

    def frame(kind: tuple[int, int], payload: bytes = b"") -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes(kind) + bytes(4) + payload

    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as received:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings))
        for number in range(50):
            connection.sendall(frame(ping, struct.pack(">Q", number)))
            kind = settings
            while kind != ping_ack:
                header = received.read(9)
                assert len(header) == 9, "the server hung up"
                kind = (header[3], header[4])
                assert kind != goaway
                payload = received.read(int.from_bytes(header[:3], "big"))
            assert payload == struct.pack(">Q", number)
