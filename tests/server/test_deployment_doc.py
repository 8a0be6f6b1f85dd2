"""docs/deployment.md: its flags exist, its files parse, and what it says of ports and probes is what a server does."""

from __future__ import annotations

import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import yaml
from running_server import RunningServer, post, wait_until
from server_process import ROOT

from pyengine.server.auth import ApiKeys
from pyengine.server.flags import make_parser, parse_flags
from pyengine.server.proto import inference_pb2 as pb

TEXT = (ROOT / "docs/deployment.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Arguments of every line that runs a program, in the page's shell blocks and units."""
    lines = [line for kind, block in BLOCKS if kind in ("sh", "ini") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line.removeprefix("ExecStart=").removesuffix("&"), comments=True) for line in lines]
    return [line[line.index(program) + 1 :] for line in words if program in line]


def test_servers_of_the_page_have_valid_flags() -> None:
    servers = commands("pyengine.server")
    container = next(yaml.safe_load(block)["containers"][0] for kind, block in BLOCKS if "containers:" in block)
    servers.append(container["args"][3:])
    assert len(servers) == 5
    for arguments in servers:
        parse_flags(arguments)


def test_flags_that_the_text_names_exist() -> None:
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)", prose))
    assert len(named) > 10
    assert named <= set(make_parser()._option_string_actions)


def test_blocks_parse_and_probes_ask_what_is_there(start_server: object) -> None:
    (pod,) = (yaml.safe_load(block) for kind, block in BLOCKS if kind == "yaml" and "containers:" in block)
    container = pod["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    arguments = container["args"]
    assert ports["metrics"] == int(arguments[arguments.index("--metrics-port") + 1])
    assert ports["http"] == int(arguments[arguments.index("--http-port") + 1])
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["port"] for probe in probes} == {"metrics"}
    server: RunningServer = start_server(metrics_port=0)  # type: ignore[operator]
    url = server.server.http_ports["metrics"].url
    for probe in probes:
        assert urllib.request.urlopen(url + probe["path"], timeout=60).status == 200
    (scrape,) = (yaml.safe_load(block) for kind, block in BLOCKS if kind == "yaml" and "scrape_configs:" in block)
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9100"]}]
    server.run(server.server.drain())
    assert urllib.request.urlopen(url + "/health", timeout=60).status == 200
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(url + "/ready", timeout=60)
    assert error.value.code == 503


def rows(first: str) -> list[list[str]]:
    """Cells of the page's table whose first heading is `first`."""
    table = TEXT[TEXT.index(f"\n| {first} |") + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def get_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_what_needs_a_key_on_the_http_port(start_server: Callable[..., RunningServer]) -> None:
    (serves, needs_key) = next(row[2:] for row in rows("port") if "--http-port" in row[1])
    server = start_server(keys=ApiKeys(["secret"]), http_port=0)
    asked = {*re.findall(r"`(/[a-z]*)`", serves), "/v1/models", "/metrics", "/health", "/ready"}
    without = {path for path in asked if get_status(server.base_url + path) != 401}
    assert without == {*re.findall(r"`(/[a-z]*)`", needs_key), "/"}
    assert needs_key.startswith("all but")
    assert "the page" in needs_key


@pytest.mark.parametrize(
    ("flag", "value", "body"),
    [
        ("--max-concurrent-requests", 1, {}),
        ("--max-output-tokens", 5, {"max_tokens": 6}),
        ("--max-message-bytes", 1024, {"prompt": "a" * 2000}),
        ("--request-timeout", 0.05, {}),
    ],
)
def test_limits_refuse_as_the_page_says(
    start_server: Callable[..., RunningServer], flag: str, value: float, body: dict[str, Any]
) -> None:
    (_, _, grpc_cell, http_cell) = next(row for row in rows("flag") if flag in row[0])
    server = start_server(http_port=0, **{flag[2:].replace("-", "_"): value})
    server.engine.hold = 0
    held = server.stub.Generate(pb.GenerateRequest(text="a"), timeout=60) if flag == "--max-concurrent-requests" else None
    wait_until(lambda: held is None or bool(server.engine.running))
    status, _, headers = post(server, {}, **body)
    assert re.findall("^[0-9]+", http_cell) == [str(status)]
    assert ("retry-after" in headers) == ("with `Retry-After`" in http_cell)
    fields = {"text": body.get("prompt", "a"), "sampling": pb.SamplingParams(max_tokens=body.get("max_tokens", 2))}
    with pytest.raises(grpc.RpcError) as error:
        server.stub.Complete(pb.GenerateRequest(**fields), timeout=60)
    assert re.findall("^[A-Z_]+", grpc_cell) == [error.value.code().name]
    has_pushback = "grpc-retry-pushback-ms" in dict(error.value.trailing_metadata() or ())
    assert has_pushback == ("with `grpc-retry-pushback-ms`" in grpc_cell)
    if held is not None:
        held.cancel()


def test_gateways_flags_exist() -> None:
    router_args = pytest.importorskip("smg.router_args", reason="PyPI has no wheel of the gateway smg for this platform")
    import argparse

    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser)
    (arguments,) = commands("smg")
    assert arguments[0] == "launch"
    flags = parser.parse_args(arguments[1:])
    assert flags.worker_urls == ["grpc://127.0.0.1:50051", "grpc://127.0.0.1:50052"]
