"""Tenants on the ports: whose key it is, whose claims are believed, and what each may have in flight."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from running_server import RunningServer, post, wait_until

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.errors import ConfigError, OverloadedError
from pyengine.inputs import TextPrompt
from pyengine.sampling_params import SamplingParams
from pyengine.server.auth import load_api_keys
from pyengine.server.frontend import GenerationCall
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.tenancy import Size, Tenancy
from pyengine.tenants import Tenant, TenantKey, load_tenants

KEYS = {"acme": "sk-acme", "beta": "sk-beta", "gateway": "sk-gateway"}
REQUEST = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2))


def tenant(name: str, **terms: Any) -> Tenant:
    key = TenantKey(sha256=hashlib.sha256(KEYS[name].encode()).digest(), trusted=name == "gateway")
    return Tenant(name=name, api_keys=(key,), **terms)


def bearer(name: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"} | {key.replace("_", "-"): value for key, value in headers.items()}


@pytest.fixture
def start(start_server: Callable[..., RunningServer]) -> Callable[..., RunningServer]:
    def run(**terms: dict[str, Any]) -> RunningServer:
        own = tuple(tenant(name, **terms.get(name, {})) for name in KEYS)
        tenants = (*own, Tenant(name="default", **terms.get("default", {})))
        return start_server(keys=load_api_keys(None, None, tenants), tenants=tenants, http_port=0, metrics_port=0)

    return run


def test_a_key_says_whose_request_it_is_and_claims_need_a_trusted_one(start: Callable[..., RunningServer]) -> None:
    server = start(acme={"priority_cap": -5})
    for headers, expected in (
        (bearer("acme"), ("acme", 0)),
        (bearer("acme", x_tenant="beta", x_priority="-9"), ("acme", -5)),
        (bearer("beta", x_priority="-9"), ("beta", 0)),
        (bearer("beta", x_priority="7"), ("beta", 7)),
        (bearer("gateway"), ("gateway", 0)),
        (bearer("gateway", x_tenant="acme", x_priority="-2"), ("acme", -2)),
    ):
        assert post(server, headers)[0] == 200
        server.stub.Complete(REQUEST, metadata=list(headers.items()), timeout=60)
        list(server.stub.Generate(REQUEST, metadata=list(headers.items()), timeout=60))
        post(server, headers, prompt=["a", "b"], stream=False)
        seen = {(request.tenant, request.priority) for request in server.engine.requests}
        assert seen == {expected}, headers
        server.engine.requests.clear()
    status, answer, _ = post(server, bearer("gateway", x_tenant="nobody"))
    assert (status, answer["error"]["param"]) == (400, "x-tenant")
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(REQUEST, metadata=list(bearer("gateway", x_tenant="nobody").items()), timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert post(server, {"authorization": "Bearer sk-none"})[0] == 401


def test_vllms_service_knows_tenants_too(start: Callable[..., RunningServer]) -> None:
    engine_pb = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")
    rpc = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
    server = start()
    request = engine_pb.GenerateRequest(
        request_id="r",
        tokenized=engine_pb.TokenizedInput(input_ids=[5, 6]),
        sampling_params=engine_pb.SamplingParams(max_tokens=2),
    )
    metadata = list(bearer("gateway", x_tenant="beta").items())
    list(rpc.VllmEngineStub(server.channel).Generate(request, metadata=metadata, timeout=60))
    assert [request.tenant for request in server.engine.requests] == ["beta"]


def test_a_tenants_full_queue_is_its_own(start: Callable[..., RunningServer]) -> None:
    server = start(acme={"max_concurrent": 1, "max_queued": 1})
    server.engine.hold = 0
    sent = [server.stub.Generate(REQUEST, metadata=list(bearer("acme").items()), timeout=60) for _ in range(2)]
    wait_until(lambda: len(server.engine.running) == 2)
    status, answer, headers = post(server, bearer("acme"))
    assert (status, headers["retry-after"]) == (429, "1")
    assert "tenant acme has 2 choices in flight, and 1 more came; it may have 2" in answer["error"]["message"]
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(REQUEST, metadata=list(bearer("acme").items()), timeout=60)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    other = server.stub.Generate(REQUEST, metadata=list(bearer("beta").items()), timeout=60)
    wait_until(lambda: len(server.engine.running) == 3)
    figures = tenant_figures(server)
    assert figures["pyengine:tenant_requests_refused_total|acme|queue_full"] == 2
    assert figures["pyengine:tenant_requests_in_flight|acme"] == 2
    assert figures["pyengine:tenant_requests_in_flight|beta"] == 1
    server.loop.call_soon_threadsafe(server.engine.release)
    for call in (*sent, other):
        assert len(list(call)) == 2
    assert post(server, bearer("acme"))[0] == 200
    assert tenant_figures(server)["pyengine:tenant_requests_in_flight|acme"] == 0


def test_a_tenants_queue_holds_choices(start: Callable[..., RunningServer]) -> None:
    server = start(acme={"max_concurrent": 2, "max_queued": 3})
    server.engine.hold = 0
    call = server.stub.Generate(
        pb.GenerateRequest(text="a", sampling=pb.SamplingParams(n=3, max_tokens=2)),
        metadata=list(bearer("acme").items()),
        timeout=60,
    )
    wait_until(lambda: len(server.engine.running) == 1)
    figures = tenant_figures(server)
    assert figures["pyengine:tenant_requests_in_flight|acme"] == 1
    assert figures["pyengine:tenant_choices_in_flight|acme"] == 3
    status, answer, _ = post(server, bearer("acme"), n=3)
    assert status == 429
    assert "tenant acme has 3 choices in flight, and 3 more came; it may have 5" in answer["error"]["message"]
    for body, field in (({"n": 6}, "n"), ({"prompt": ["a", "b"], "n": 3}, "n"), ({"prompt": ["a"] * 6}, "prompt")):
        status, answer, _ = post(server, bearer("acme"), **body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert "asks for 6 choices in all; tenant acme may have 5 in flight" in answer["error"]["message"]
    assert tenant_figures(server)["pyengine:tenant_requests_refused_total|acme|queue_full"] == 1
    server.loop.call_soon_threadsafe(server.engine.release)
    list(call)
    assert post(server, bearer("acme"), n=5)[0] == 200
    assert tenant_figures(server)["pyengine:tenant_choices_in_flight|acme"] == 0


def test_calls_of_the_tokenizer_are_their_tenants(start: Callable[..., RunningServer]) -> None:
    server = start(acme={"rate": 0.001, "burst": 1}, beta={"rate": 0.001, "burst": 4})
    assert post(server, bearer("acme"), "/tokenize", prompt="a")[0] == 200
    status, answer, _ = post(server, bearer("gateway", x_tenant="acme"), "/detokenize", tokens=[5])
    assert (status, answer["error"]["message"]) == (429, "tenant acme may send 0.001 requests a second")
    metadata = list(bearer("gateway", x_tenant="beta").items())
    for _ in range(2):
        server.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=metadata, timeout=60)
        server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=metadata, timeout=60)
    assert post(server, bearer("beta"))[0] == 429
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=list(bearer("beta").items()), timeout=60)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_requests_are_stopped_by_their_own_tenant_or_a_trusted_key(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.engine.hold = 0
    calls = [
        server.stub.Generate(pb.GenerateRequest(text="a", request_id=name), metadata=list(bearer("acme").items()), timeout=60)
        for name in ("r1", "r2")
    ]
    wait_until(lambda: len(server.engine.running) == 2)

    def abort(request_id: str, name: str) -> bool:
        request = pb.AbortRequest(request_id=request_id)
        return bool(server.stub.Abort(request, metadata=list(bearer(name).items()), timeout=60).aborted)

    assert [abort("r1", "beta"), abort("r1", "acme"), abort("r2", "gateway")] == [False, True, True]
    for call in calls:
        with pytest.raises(grpc.RpcError):
            list(call)


def tenant_figures(server: RunningServer) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    url = server.server.http_ports["metrics"].url + "/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    assert "sk-" not in text
    return {
        "|".join((sample.name, sample.labels["tenant"], *filter(None, [sample.labels.get("reason")]))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.labels
    }


def call_of(name: str | None = None) -> GenerationCall:
    return GenerationCall(
        request_id="r", prompt=TextPrompt("a"), params=SamplingParams(), priority=0, cache_salt=None, tenant=name, echo=False
    )


def test_rates() -> None:
    """On average and at once, by a clock of the test's own."""
    now = 0.0
    tenancy = Tenancy([Tenant(name="default", rate=2.0, burst=4.0)], clock=lambda: now)

    def send(count: int = 1, n: int = 1) -> float:
        try:
            with tenancy.admitted(None, Size(count, count * n), 8):
                return 0.0
        except OverloadedError as error:
            return error.retry_after

    assert [send() for _ in range(5)] == [0, 0, 0, 0, pytest.approx(0.5)]
    now = 0.25
    assert send() == pytest.approx(0.25)
    now = 0.5
    assert [send(), send()] == [0, pytest.approx(0.5)]
    now = 100.0
    assert [send(4, n=7), send()] == [0, pytest.approx(0.5)], "a prompt is one request, whatever its n"
    now = 200.0
    assert send(9) == 0, "a body with more prompts than the burst is not refused for ever"
    assert tenancy.refused["default", "rate"] == 4
    assert tenancy.requests_in_flight["default"] == tenancy.choices_in_flight["default"] == 0


def test_without_tenants_nothing_is_believed_or_capped() -> None:
    tenancy = Tenancy(())
    call = call_of("acme")
    assert tenancy.account(call).tenant is None
    with tenancy.admitted(call.tenant, Size(9, 9), 1):
        pass


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    args = {"model": str(tiny_llama), "device": "cpu", "num_kv_blocks": 32, "block_size": 8}
    path = tiny_llama.parent / "tenants.yaml"
    path.write_text("tenants:\n- name: acme\n  kv_quota: 0.5\n- name: beta\n  rate: 1000\n")
    engine_args = EngineArgs(**args, tenants=str(path))
    tenants = (tenant("acme", kv_quota=0.5), tenant("beta"), Tenant(name="default"))
    running = RunningServer(
        AsyncLLMEngine(LLMEngine(engine_args)),
        load_api_keys(None, None, tenants),
        tenants,
        http_port=0,
        metrics_port=0,
    )
    yield running
    running.close()


def test_usage_by_tenant(real: RunningServer) -> None:
    """Zero at first, and what clients saw afterwards; the warm-up counts nowhere."""
    before = tenant_figures(real)
    assert before["pyengine:tenant_kv_quota_blocks|acme"] == 16
    assert {value for key, value in before.items() if "quota" not in key} == {0}
    usage = post(real, bearer("acme"), prompt=[5] * 20, max_tokens=6, ignore_eos=True)[1]["usage"]
    usage = post(real, bearer("acme"), prompt=[5] * 20, max_tokens=6, ignore_eos=True)[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    cold = post(real, bearer("beta"), prompt=[5] * 20, max_tokens=6, ignore_eos=True)[1]["usage"]
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0, "acme's prefix is acme's"
    after = tenant_figures(real)
    assert after["pyengine:tenant_generation_tokens_total|acme"] == 12
    assert after["pyengine:tenant_computed_tokens_total|acme"] == 20 + 4 + 2 * 5
    assert after["pyengine:tenant_computed_tokens_total|beta"] == 20 + 5
    assert after["pyengine:tenant_kv_blocks|acme"] == after["pyengine:tenant_requests_running|acme"] == 0
    status, answer, _ = post(real, bearer("acme"), prompt=[5] * 120, max_tokens=9)
    assert status == 400
    assert "make 129, and the KV quota of tenant acme holds 128" in answer["error"]["message"]


# The file


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_the_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-a").hexdigest()
    path = tmp_path / "tenants.yaml"
    path.write_text(f"""
tenants:
- name: a
  weight: 2
  kv_quota: 0.5
  max_concurrent: 3
  max_queued: 0
  rate: 2.5
  burst: 5
  priority_cap: -3
  cache_group: shared
  api_keys:
  - sha256: {digest}
  - env: KEY_OF_A
    trusted: true
- name: b
""")
    a, b, default = load_tenants(str(path))
    assert (a.weight, a.kv_quota, a.max_concurrent, a.max_queued, a.rate, a.burst, a.priority_cap) == (2, 0.5, 3, 0, 2.5, 5, -3)
    assert (b, default) == (Tenant(name="b"), Tenant(name="default"))
    keys = load_api_keys(None, None, (a, b, default), {"KEY_OF_A": "sk-env"})
    assert [(keys.check(f"Bearer {key}").tenant, keys.check(f"Bearer {key}").trusted) for key in ("sk-a", "sk-env")] == [
        ("a", False),
        ("a", True),
    ]
    assert load_tenants(None) == ()
    assert load_tenants(write(tmp_path / "t.json", {"tenants": [{"name": "x", "weight": 1.5}]}))[0].weight == 1.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "list named tenants"),
        ({"tenants": {}}, "list named tenants"),
        ({"tenants": [], "more": 1}, "nothing else"),
        ({"tenants": [1]}, r"tenants\[0\] must be a mapping"),
        ({"tenants": [{}]}, "name must be"),
        ({"tenants": [{"name": "a b"}]}, "name must be"),
        ({"tenants": [{"name": "a"}, {"name": "a"}]}, "tenant a is there twice"),
        ({"tenants": [{"name": "a", "wieght": 1}]}, "tenant a: unknown field 'wieght'"),
        *[({"tenants": [{"name": "a", "weight": value}]}, "tenant a: weight must be") for value in (0, -1, "1", True, 1e9)],
        *[({"tenants": [{"name": "a", "kv_quota": value}]}, "tenant a: kv_quota must be") for value in (0, 1.1, [])],
        *[({"tenants": [{"name": "a", "max_concurrent": value}]}, "max_concurrent must be") for value in (0, 1.5, "2")],
        ({"tenants": [{"name": "a", "max_queued": -1}]}, "max_queued must be"),
        ({"tenants": [{"name": "a", "rate": 0}]}, "rate must be"),
        ({"tenants": [{"name": "a", "burst": 2}]}, "burst needs rate"),
        ({"tenants": [{"name": "a", "priority_cap": 0.5}]}, "priority_cap must be"),
        ({"tenants": [{"name": "a", "cache_group": "x y"}]}, "cache_group must be"),
        ({"tenants": [{"name": "a", "api_keys": {}}]}, "api_keys must be a list"),
        ({"tenants": [{"name": "a", "api_keys": "sk-secret"}]}, "api_keys must be a list"),
        ({"tenants": [{"name": "a", "api_keys": ["sk-secret"]}]}, r"api_keys\[0\] must hold"),
        ({"tenants": [{"name": "a", "api_keys": [{"sha256": "sk-secret"}]}]}, "sha256 must be 64 hexadecimal"),
        ({"tenants": [{"name": "a", "api_keys": [{"sha256": "0" * 64, "env": "X"}]}]}, "one of sha256 and env"),
        ({"tenants": [{"name": "a", "api_keys": [{"env": "sk-secret"}]}]}, "env must be the name"),
        ({"tenants": [{"name": "a", "api_keys": [{"env": "X", "trusted": "yes"}]}]}, "trusted must be"),
        ({"tenants": [{"name": name, "api_keys": [{"env": "X"}]} for name in "ab"]}, "two entries are the same key"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "tenants.json", content)
    with pytest.raises(ConfigError, match=message) as error:
        load_tenants(path)
    assert error.value.field == "tenants"
    assert "sk-secret" not in str(error.value), "what is in the place of a key may be one"


def test_files_that_cannot_be_read_and_keys_that_cannot_be_had(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for content in ("tenants: [", "tenants: !!python/object:os.system {}", "\x00"):
        broken.write_text(content)
        with pytest.raises(ConfigError, match="cannot read"):
            load_tenants(str(broken))
    with pytest.raises(ConfigError, match="cannot read"):
        load_tenants(str(tmp_path / "absent.yaml"))
    acme = tenant("acme")
    env = Tenant(name="e", api_keys=(TenantKey(env="KEY_OF_E"),))
    for tenants, variable, environment, message in (
        ([env], None, {}, "the environment has no KEY_OF_E"),
        ([env], None, {"KEY_OF_E": "two words"}, "tenant e: KEY_OF_E: keys must be"),
        ([acme, env], None, {"KEY_OF_E": KEYS["acme"]}, "a key is acme's already"),
        ([acme], KEYS["acme"], {}, "a key is one of the server's own too"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_api_keys(None, variable, tenants, environment)
        assert "sk-" not in str(error.value)
