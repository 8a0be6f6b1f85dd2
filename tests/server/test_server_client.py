"""`python -m pyengine.client` against a server: what it prints, what it sends, how it fails."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeRequest, output
from running_server import RunningServer
from server_process import ROOT

from pyengine import client
from pyengine.inputs import ChatPrompt, TextPrompt
from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams


def run(server: RunningServer, *arguments: str) -> int:
    return client.main(["--target", server.target, *arguments])


def test_streams_text(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--max-tokens", "3", "hello") == 0
    assert capsys.readouterr().out == "t10 t11 t12 \n"
    (request,) = server.engine.requests
    assert request.prompt == TextPrompt("hello")
    assert request.params.output_kind is RequestOutputKind.DELTA


def test_json_object(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--json", "--max-tokens", "2", "hello") == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "t10 t11 ",
        "token_ids": [10, 11],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 6, "completion_tokens": 2, "cached_tokens": 2},
    }


def test_json_with_choices_logprobs_and_stop_reason(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--json", "--n", "2", "--logprobs", "1", "--max-tokens", "1", "a") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[10], [10]]
    assert answer["logprobs"] == [{"token_id": 10, "logprob": -1.5, "top": {"0": -0.25}}]

    def stops(request: FakeRequest) -> Iterator[RequestOutput]:
        yield output(request, [CompletionOutput(0, "x", [9], finish_reason="stop", stop_reason="END")], finished=True)

    server.engine.script = stops
    assert run(server, "--json", "--max-tokens", "1", "a") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "END")


def test_several_choices_are_printed_one_after_the_other(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--n", "2", "--max-tokens", "2", "a") == 0
    assert capsys.readouterr().out == "[0] t10 t11 \n[1] t10 t11 \n"


def test_terminal_defaults(server: RunningServer) -> None:
    """Greedy and longer than the API's 16 tokens; with several choices the server's own temperature."""
    server.engine.script = lambda request: iter(
        [output(request, [CompletionOutput(0, "", [], finish_reason="stop")], finished=True)]
    )
    server.engine._check = lambda prompt, params: [1]  # type: ignore[method-assign]
    assert run(server, "a") == 0
    assert run(server, "--n", "2", "--max-tokens", "-1", "a") == 0
    single, several = (request.params for request in server.engine.requests)
    assert (single.max_tokens, single.temperature) == (256, 0.0)
    assert (several.max_tokens, several.temperature) == (None, 1.0)


def test_every_flag_reaches_the_engine(server: RunningServer) -> None:
    values = {
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": -9,
        "min_tokens": 2,
        "logprobs": 3,
    }
    flags = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--ignore-eos", "--include-stop-str-in-output", "--stop", "x", "--stop", "y", "--stop-token-ids", "4", "5"]
    flags += ["--priority", "-2", "--request-id", "mine", "--model", "fake"]
    assert run(server, "--json", *flags, "a") == 0
    (request,) = server.engine.requests
    assert request.params == SamplingParams(
        **values,
        ignore_eos=True,
        include_stop_str_in_output=True,
        stop=["x", "y"],
        stop_token_ids=[4, 5],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert (request.priority, request.request_id) == (-2, "mine")
    assert set(values) == set(client._SAMPLING_FLAGS)


def test_chat(server: RunningServer) -> None:
    assert run(server, "--chat", "--system", "be brief", "--max-tokens", "1", "hi") == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert server.engine.requests[0].prompt == ChatPrompt(messages)


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_prompt_from_standard_input(server: RunningServer, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run(server, "--max-tokens", "1", *arguments) == 0
    assert server.engine.requests[0].prompt == TextPrompt("from a pipe")


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{free.getsockname()[1]}"
        assert client.main(["--target", target, "hello"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: no server answers at {target}; start one with: python -m pyengine.server\n"


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_refused_request_is_one_line(server: RunningServer, capsys: pytest.CaptureFixture[str], extra: list[str]) -> None:
    assert run(server, "--temperature", "3", *extra, "a") == 1
    assert re.fullmatch(r"error: INVALID_ARGUMENT: temperature: must be in \[0, 2\], got 3\.0\n", capsys.readouterr().err)


def test_timeout(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.hold = 1
    assert run(server, "--timeout", "0.3", "--max-tokens", "2", "a") == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("t10 ")
    assert captured.err.startswith("error: DEADLINE_EXCEEDED: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seed", str(2**63), "a"], "9223372036854775808"),
        (["--system", "x", "a"], "--system"),
        (["--top-k", "x", "a"], "--top-k"),
        (["--logprobs", "1", "a"], "--logprobs"),
        (["--max-tokens", "-2", "a"], "--max-tokens must be 1 or more, or -1"),
        (["--max-tokens", "0", "a"], "--max-tokens must be 1 or more, or -1"),
        *((["--target", target, "a"], "--target") for target in ("foo", "host:0", "host:99999", "http://host:1", "a b:1", "")),
    ],
)
def test_wrong_flags_are_one_line(
    server: RunningServer, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as error:
        run(server, *arguments)
    assert error.value.code == 2
    shown = capsys.readouterr().err
    assert named in shown
    assert shown.count("\n") == 1
    assert not server.engine.requests


def test_an_unknown_host_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--target", "nowhere.invalid:50051", "a"]) == 1
    assert capsys.readouterr().err == "error: no host of the name in nowhere.invalid:50051 is known\n"


def test_a_prompt_that_is_not_utf8_is_one_line(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = b"caf\xe9"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(broken), encoding="utf-8"))
    for prompt in ("-", os.fsdecode(broken)):
        assert run(server, prompt) == 1
        assert capsys.readouterr().err == "error: the prompt is not UTF-8\n"
    assert not server.engine.requests


@pytest.mark.parametrize(("module", "code"), [("pyengine.client", -signal.SIGINT), ("pyengine.server", 130)])
def test_ctrl_c_while_libraries_load_shows_no_traceback(tmp_path: Path, module: str, code: int) -> None:
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "grpc.py").write_text(slow)
    done = subprocess.run(
        [sys.executable, "-m", module, "a"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_as_a_program_without_torch(server: RunningServer) -> None:
    """The documented command line; the client must start fast, and on machines that have no engine."""
    code = "import sys; sys.modules['torch'] = None; from pyengine.client import main; sys.exit(main())"
    for command in (["-m", "pyengine.client"], ["-c", code]):
        done = subprocess.run(
            [sys.executable, *command, "--target", server.target, "--max-tokens", "2", "hello"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
        )
        assert (done.returncode, done.stdout) == (0, "t10 t11 \n"), done.stderr


def test_reader_of_the_output_goes_away(server: RunningServer) -> None:
    server.engine.delay = 0.01
    command = [sys.executable, "-m", "pyengine.client", "--target", server.target, "--max-tokens", "200", "a"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT))
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"t10"
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == b""
