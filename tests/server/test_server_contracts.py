"""The API's file, its generated code, the flags and the server's imports: what must stay true as the code grows."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest
from server_process import ROOT

from pyengine.config import MAX_NUM_THREADS, EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.errors import ConfigError
from pyengine.server.engine_client import EngineClient
from pyengine.server.flags import ServerArgs, flag_name, make_parser, parse_flags
from pyengine.server.proto import inference_pb2 as pb

PROTO = (ROOT / "protos/pyengine/v1/inference.proto").read_text()


def test_generated_code_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/gen_proto.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_sampling_fields_have_presence() -> None:
    """Unset must differ from zero: temperature 0 is greedy, not the default."""
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_every_sampling_default_is_documented_and_true() -> None:
    block = re.search(r"message SamplingParams \{(.*?)\n\}", PROTO, re.DOTALL)
    assert block is not None
    comments = re.findall(r"((?:  //[^\n]*\n)+)  optional \w+ (\w+) = \d+;", block.group(1))
    documented = {name: match.group(1) for text, name in comments if (match := re.search(r"Default ([\w.-]+?)\.?\s", text))}
    from pyengine.sampling_params import SamplingParams

    for name, default in documented.items():
        if name == "best_of":
            continue
        actual = getattr(SamplingParams(), name)
        assert default == (str(actual).lower() if isinstance(actual, bool) else f"{actual:g}"), name
    unset_by_default = {"seed", "logprobs", "prompt_logprobs"}
    optional_scalars = {name for _, name in comments}
    assert optional_scalars - set(documented) == unset_by_default


def test_forks_own_a_range_of_field_numbers() -> None:
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        if name.endswith("Request") and message.fields and name != "AbortRequest":
            assert re.search(rf"message {name} \{{\n  reserved 1000 to 1999;", PROTO), name


def test_every_field_of_engine_and_server_args_is_a_flag() -> None:
    options = make_parser()._option_string_actions
    for owner in (EngineArgs, ServerArgs):
        for field in fields(owner):
            action = options[flag_name(field.name)]
            assert action.default == field.default
            assert action.help, field.name
            if isinstance(field.default, bool):
                assert "--no-" + flag_name(field.name)[2:] in options


def test_flags_become_arguments() -> None:
    engine, server = parse_flags(
        ["some/model", "--gpu-memory-utilization", "0.25", "--no-enable-prefix-caching", "--max-num-seqs", "7", "--port", "0"]
    )
    assert engine == EngineArgs(model="some/model", gpu_memory_utilization=0.25, enable_prefix_caching=False, max_num_seqs=7)
    assert server == ServerArgs(port=0)
    assert parse_flags(["--model", "x"])[0].model == "x"
    assert parse_flags([]) == (EngineArgs(), ServerArgs())


def test_rule_15_default_flags_bind_to_loopback() -> None:
    assert parse_flags([])[1].host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "-1"),
        ("--port", "65536"),
        ("--max-message-bytes", "0"),
        ("--max-concurrent-requests", "0"),
        ("--shutdown-timeout", "-1"),
        ("--shutdown-timeout", "nan"),
        ("--watchdog-timeout", "0"),
        ("--watchdog-timeout", "nan"),
        ("--max-num-seqs", "0"),
        ("--num-threads", str(MAX_NUM_THREADS + 1)),
        ("--gpu-memory-utilization", "nan"),
    ],
)
def test_wrong_values_name_their_flag(flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_flags([flag, value])
    assert error.value.field == flag


def test_only_convert_knows_the_messages() -> None:
    for path in (ROOT / "pyengine/server").glob("*.py"):
        knows = re.search(r"\binference_pb2\b", path.read_text()) is not None
        assert knows == (path.name == "convert.py"), path.name


def test_the_engine_is_an_engine_client() -> None:
    """Every member that the server calls exists in AsyncLLMEngine."""
    members = [name for name in vars(EngineClient) if not name.startswith("_")]
    assert {"generate", "abort", "stats", "config"} <= set(members)
    for name in members:
        assert hasattr(AsyncLLMEngine, name), name
