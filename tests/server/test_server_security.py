"""API keys, TLS and mutual TLS on both ports: what must be refused is, and keys appear nowhere."""

from __future__ import annotations

import json
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import trustme
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from running_server import RunningServer

from pyengine import client
from pyengine.errors import ConfigError
from pyengine.server.auth import KEY_VARIABLE, ApiKeys, load_api_keys
from pyengine.server.flags import ServerArgs
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc
from pyengine.server.tls import TlsFiles

KEYS = ("sk-first-of-two", "sk-second-of-two")
REQUEST = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2))


def status(url: str, context: ssl.SSLContext | None = None, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60, context=context) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def health(channel: grpc.Channel) -> int:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status


# Keys


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    running = RunningServer(FakeEngine(), ApiKeys(KEYS), http_port=0)
    yield running
    running.close()


@pytest.mark.parametrize(
    "metadata", [(), ("Bearer",), ("Bearer ",), ("Bearer sk-first",), ("Bearer sk-first-of-two-",), ("sk-first-of-two",)]
)
def test_grpc_without_a_right_key(guarded: RunningServer, metadata: tuple[str, ...]) -> None:
    sent = [("authorization", value) for value in metadata]
    for call in (
        lambda: guarded.stub.Complete(REQUEST, metadata=sent, timeout=60),
        lambda: list(guarded.stub.Generate(REQUEST, metadata=sent, timeout=60)),
        lambda: guarded.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=sent, timeout=60),
    ):
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "sk-" not in error.value.details()
    assert not guarded.engine.running


def test_grpc_with_a_key(guarded: RunningServer) -> None:
    for key in KEYS:
        sent = [("authorization", f"Bearer {key}")]
        assert len(list(guarded.stub.Generate(REQUEST, metadata=sent, timeout=60))) == 2
    assert health(guarded.channel) == health_pb2.HealthCheckResponse.SERVING  # probes have none
    with pytest.raises(grpc.RpcError):
        list(ProtoReflectionDescriptorDatabase(guarded.channel).get_services())


def test_http_keys(guarded: RunningServer) -> None:
    for key in KEYS:
        with openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key=key, max_retries=0) as right:
            assert right.completions.create(model="fake", prompt="a", max_tokens=2).choices[0].text == "t10 t11 "
    with openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="sk-wrong", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError) as error:
            wrong.completions.create(model="fake", prompt="a")
        assert error.value.code == "invalid_api_key"
    for path in ("/v1/models", "/version", "/openapi.json", "/nothing"):
        assert status(guarded.base_url + path) == 401
        assert status(guarded.base_url + path, authorization=f"bearer {KEYS[0]}") == (404 if path == "/nothing" else 200)
    for path in ("/health", "/ready", "/metrics"):
        assert status(guarded.base_url + path) == 200


def test_rule_keys_appear_nowhere(start_server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(KEYS)
    assert "sk-" not in repr(vars(keys))
    with caplog.at_level(logging.DEBUG):
        server = start_server(FakeEngine(), keys=keys, http_port=0)
        for key in (*KEYS, "sk-wrong"):
            status(f"{server.base_url}/v1/models", authorization=f"Bearer {key}")
            list(server.stub.Generate(REQUEST, metadata=[("authorization", f"Bearer {KEYS[0]}")], timeout=60))
        with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=60) as response:
            assert b"sk-" not in response.read()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("pyengine", "uvicorn"))]
    assert ours
    assert not any("sk-" in message for message in ours)


def test_the_command_line_client_takes_its_key_from_the_environment(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.main(["--target", guarded.target, "a"]) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, KEYS[1])
    assert client.main(["--target", guarded.target, "--max-tokens", "2", "a"]) == 0
    assert capsys.readouterr().out == "t10 t11 \n"


def test_loading_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# two keys\nsk-a\n\n  sk-b  \n")
    keys = load_api_keys(str(path), "sk-c")
    for key in ("sk-a", "sk-b", "sk-c"):
        keys.check(f"Bearer {key}")
    assert not load_api_keys(None, None).are_needed
    path.write_text("# none\n")
    for name, variable, field in (
        (str(path), None, "api_key_file"),
        (str(tmp_path / "absent"), None, "api_key_file"),
        (None, "", KEY_VARIABLE),
        (None, "two words", KEY_VARIABLE),
    ):
        with pytest.raises(ConfigError) as error:
            load_api_keys(name, variable)
        assert error.value.field == field


# TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PEM files: a CA, a server's and a client's certificate of it, and a stranger's."""
    folder, ca, other = tmp_path_factory.mktemp("pki"), trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    issued = {"server": ca.issue_cert("127.0.0.1"), "client": ca.issue_cert("c@x.org"), "stranger": other.issue_cert("s@x.org")}
    for name, cert in issued.items():
        cert.private_key_pem.write_to_path(folder / f"{name}.key")
        for i, pem in enumerate(cert.cert_chain_pems):
            pem.write_to_path(folder / f"{name}.pem", append=i > 0)
    return {path.name: str(path) for path in folder.iterdir()}


def secure_channel(server: RunningServer, pki: dict[str, str], name: str | None) -> grpc.Channel:
    files = [pki["ca.pem"], *((pki[f"{name}.key"], pki[f"{name}.pem"]) if name else ())]
    credentials = grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in files))
    return grpc.secure_channel(server.target, credentials)


def client_context(pki: dict[str, str], name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki["ca.pem"])
    if name is not None:
        context.load_cert_chain(pki[f"{name}.pem"], pki[f"{name}.key"])
    return context


def tls_flags(pki: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"ssl_certfile": pki["server.pem"], "ssl_keyfile": pki["server.key"], "http_port": 0, "metrics_port": 0} | more


def test_tls_on_every_port(
    start_server: Callable[..., RunningServer], pki: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(**tls_flags(pki))
    with secure_channel(server, pki, None) as channel:
        assert rpc.InferenceStub(channel).Complete(REQUEST, timeout=60).choices[0].text == "t10 t11 "
    assert server.base_url.startswith("https://")
    for name, path in (("http", "/v1/models"), ("metrics", "/metrics")):
        url = server.server.http_ports[name].url + path
        assert status(url, client_context(pki, None)) == 200
        with pytest.raises(urllib.error.URLError):  # nobody vouches for the certificate
            status(url, ssl.create_default_context())
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            status(url.replace("https", "http"))
    with pytest.raises(grpc.RpcError):
        server.stub.Complete(REQUEST, timeout=60)
    assert client.main(["--target", server.target, "--tls-ca", pki["ca.pem"], "--max-tokens", "2", "a"]) == 0
    assert capsys.readouterr().out == "t10 t11 \n"


def test_the_command_line_client_says_where_tls_is_missing(
    start_server: Callable[..., RunningServer], pki: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    secured, plain = start_server(**tls_flags(pki)), start_server()
    for server, flags, hint in (
        (secured, [], "if the server uses TLS, give --tls-ca"),
        (plain, ["--tls-ca", pki["ca.pem"]], "--tls-ca must be of a TLS server's signer"),
    ):
        assert client.main(["--target", server.target, *flags, "a"]) == 1
        (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
        assert line.startswith(f"error: cannot connect to {server.target}: ")
        assert line.endswith(f"; {hint}")


def test_mutual_tls(start_server: Callable[..., RunningServer], pki: dict[str, str]) -> None:
    """A certificate of the right signer is let in; none, and a stranger's, are not. Probes on the metrics port need none."""
    server = start_server(**tls_flags(pki, ssl_ca_certs=pki["ca.pem"]))
    with secure_channel(server, pki, "client") as channel:
        assert rpc.InferenceStub(channel).Complete(REQUEST, timeout=60).choices[0].text == "t10 t11 "
    assert status(f"{server.base_url}/v1/models", client_context(pki, "client")) == 200
    for name in (None, "stranger"):
        with secure_channel(server, pki, name) as channel, pytest.raises(grpc.RpcError) as error:
            rpc.InferenceStub(channel).Complete(REQUEST, timeout=60)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            status(f"{server.base_url}/v1/models", client_context(pki, name))
    assert status(f"{server.server.http_ports['metrics'].url}/ready", client_context(pki, None)) == 200
    assert len(server.engine.requests) == 1


def test_tls_files_that_cannot_be_used(tmp_path: Path, pki: dict[str, str]) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text(json.dumps("no certificate"))
    good = {"certificate": pki["server.pem"], "key": pki["server.key"]}
    for change, flag in (
        ({"certificate": str(tmp_path / "absent")}, "ssl_certfile"),
        ({"key": str(tmp_path / "absent")}, "ssl_keyfile"),
        ({"certificate": str(garbage)}, "ssl_certfile"),
        ({"key": pki["client.key"]}, "ssl_certfile"),
        ({"client_ca": str(garbage)}, "ssl_ca_certs"),
    ):
        with pytest.raises(ConfigError) as error:
            TlsFiles(**(good | change))
        assert error.value.field == flag
    for flags, field in (
        ({"ssl_certfile": "a"}, "ssl_keyfile"),
        ({"ssl_keyfile": "a"}, "ssl_certfile"),
        ({"ssl_ca_certs": "a"}, "ssl_ca_certs"),
    ):
        with pytest.raises(ConfigError) as error:
            ServerArgs(**flags)  # type: ignore[arg-type]
        assert error.value.field == field
