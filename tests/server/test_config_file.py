"""--config: the flags' names, the command line's precedence, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_process import FAKE, ServerProcess

from pyengine.config import EngineArgs
from pyengine.errors import ConfigError
from pyengine.server.flags import ServerArgs, make_parser, parse_flags


def test_a_file_sets_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "# a server\nmodel: some/model\nmax-model-len: 2048\nmax_num_seqs: 8\ngpu_memory_utilization: 1\n"
        "enable-prefix-caching: false\ndtype: float32\nport: 0\nhttp-port:\nhost: 0.0.0.0\n"
    )
    engine, server = parse_flags(["--config", str(path), "--max-num-seqs", "9", "--enable-prefix-caching"])
    assert engine == EngineArgs(
        model="some/model", max_model_len=2048, max_num_seqs=9, gpu_memory_utilization=1.0, dtype="float32"
    )
    assert server == ServerArgs(config=str(path), port=0, host="0.0.0.0")
    assert parse_flags(["other/model", "--config", str(path)])[0].model == "other/model"
    assert parse_flags([f"--config={path}", "--model=third/model"])[0].model == "third/model"
    (tmp_path / "server.json").write_text(json.dumps({"max_num_seqs": 3}))
    assert parse_flags(["--config", str(tmp_path / "server.json")])[0].max_num_seqs == 3
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert parse_flags(["--config", str(tmp_path / "empty.yaml")])[0] == EngineArgs()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq: 3", "'max_num_seq' is not the name of a flag"),
        ("api_key: sk-x", "'api_key' is not the name of a flag"),
        ("config: other.yaml", "'config' is not the name of a flag"),
        ("max-num-seqs: 3\nmax_num_seqs: 4", "max_num_seqs is there twice"),
        ("max_num_seqs: '3'", "max_num_seqs must be an integer, got '3'"),
        ("max_num_seqs: true", "max_num_seqs must be an integer, got True"),
        ("enable_prefix_caching: 1", "enable_prefix_caching must be true or false"),
        ("swap_space: [1]", r"swap_space must be a number, got \[1\]"),
        ("host: 127", "host must be a text"),
        ("device: tpu", "device must be one of auto, cpu"),
        ("- a", "must hold names and their values"),
        ("a: [", "cannot read"),
        ("port: 70000", r"\[0, 65535\]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        parse_flags(["--config", str(path)])
    assert error.value.field == ("--port" if "70000" in content else "--config")


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("max_num_seq: 3\n")
    with ServerProcess(*FAKE, "ok", "--config", str(path)) as process:
        assert process.exit_code() == 1
        assert process.lines == [f"error: --config: {path}: 'max_num_seq' is not the name of a flag"]


def test_help_has_vllms_groups() -> None:
    titles = [group.title for group in make_parser()._action_groups]
    expected = ["Frontend", "ModelConfig", "DeviceConfig", "CacheConfig", "SchedulerConfig", "ObservabilityConfig"]
    assert [title for title in titles if title in expected] == expected
    text = make_parser().format_help()
    assert text.index("ObservabilityConfig:") < text.index("--otlp-endpoint")
