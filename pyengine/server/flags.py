"""The server's command line. Every field of `EngineArgs` and `ServerArgs` is a flag in vLLM's spelling, its help the field's
comment in the source, so that a new field is a new flag with nothing to add here."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, NoReturn

from pyengine.config import EngineArgs
from pyengine.errors import ConfigError
from pyengine.server.config_file import load_config_file
from pyengine.server.hints import not_none

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
LOG_LEVELS: tuple[str, ...] = typing.get_args(LogLevel)


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What a user may set of the server itself."""

    config: str | None = None  # file with values for these flags, by their names; YAML or JSON. The command line wins
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 or :: is every interface
    port: int = 50051  # gRPC port; 0: a free one, which is printed
    http_port: int | None = None  # port of the OpenAI-compatible HTTP API; 0: a free one; off by default
    metrics_port: int | None = None  # port for /metrics, /health and /ready alone; 0: a free one; off by default
    max_message_bytes: int = 4 * 2**20  # largest gRPC message and HTTP body that clients may send
    max_concurrent_requests: int = 4096  # choices and tokenizer calls in flight; more get RESOURCE_EXHAUSTED, or 429
    max_output_tokens: int | None = None  # tokens that a choice may generate; requests for more are refused, others end there
    request_timeout: float | None = None  # seconds that a request may take, a stream's sending included; unlimited by default
    shutdown_timeout: float = 30.0  # seconds that running requests get to finish after SIGTERM
    watchdog_timeout: float = 60.0  # seconds that requests may wait without a step before health turns NOT_SERVING
    api_key_file: str | None = None  # API keys, one a line; PYENGINE_API_KEY holds another; calls need none by default
    ssl_certfile: str | None = None  # TLS: certificate chain, PEM
    ssl_keyfile: str | None = None  # TLS: the certificate's key, PEM
    ssl_ca_certs: str | None = None  # mutual TLS: clients must show a certificate that one of these signed, PEM
    trust_request_chat_template: bool = False  # let clients send chat templates, which are programs
    log_level: LogLevel | None = None  # PYENGINE_LOG_LEVEL or info by default
    log_format: LogFormat = "text"  # json: an object a line
    enable_log_requests: bool = False  # a log line for each request, when it is over
    max_log_len: int = 0  # characters of its prompt in that line; 0: none
    otlp_endpoint: str | None = None  # OpenTelemetry collector for a span a request, http://HOST:PORT; needs pyengine[tracing]

    def __post_init__(self) -> None:
        for name in ("port", "http_port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 2**16:
                raise ConfigError(name, f"must be in [0, 65535], got {port}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError(missing, "a certificate and its key go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs", "needs ssl_certfile and ssl_keyfile")
        if self.request_timeout is not None and not 0 < self.request_timeout < 1e6:
            raise ConfigError("request_timeout", f"must be more than 0 seconds, got {self.request_timeout}")
        if not 1024 <= self.max_message_bytes < 2**31:
            raise ConfigError("max_message_bytes", f"must be in [1024, {2**31 - 1}], got {self.max_message_bytes}")
        if self.max_concurrent_requests < 1:
            raise ConfigError("max_concurrent_requests", f"must be 1 or more, got {self.max_concurrent_requests}")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError("max_output_tokens", f"must be 1 or more, got {self.max_output_tokens}")
        if self.max_log_len < 0:
            raise ConfigError("max_log_len", f"must be 0 or more, got {self.max_log_len}")
        if not 0 <= self.shutdown_timeout < 1e6:
            raise ConfigError("shutdown_timeout", f"must be 0 or more seconds, got {self.shutdown_timeout}")
        if not self.watchdog_timeout > 0:
            raise ConfigError("watchdog_timeout", f"must be more than 0 seconds, got {self.watchdog_timeout}")


#: Help groups, titled as vLLM's, by field. A field that none names is listed under the last one of its owner's.
_FRONTEND, _ENGINE = "Frontend", "EngineConfig"
_GROUPS: dict[str, tuple[str, ...]] = {
    _FRONTEND: (
        *("config", "host", "port", "http_port", "max_message_bytes", "max_concurrent_requests", "max_output_tokens"),
        *("request_timeout", "shutdown_timeout", "watchdog_timeout"),
        *("api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "trust_request_chat_template"),
    ),
    "ModelConfig": (
        *("model", "tokenizer", "revision", "download_dir", "served_model_name", "skip_tokenizer_init", "chat_template"),
        *("dtype", "quantization", "repack", "max_model_len", "seed", "enforce_eager"),
    ),
    "DeviceConfig": ("device", "num_threads", "tensor_parallel_size"),
    "CacheConfig": (
        *("block_size", "num_kv_blocks", "gpu_memory_utilization", "swap_space", "kv_cache_dtype"),
        *("enable_prefix_caching",),
    ),
    "SchedulerConfig": (
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold"),
        *("target_itl_ms", "scheduling_policy", "tenants", "preemption_mode", "static_batching"),
    ),
    "ObservabilityConfig": (
        *("metrics_port", "otlp_endpoint", "log_level", "log_format", "enable_log_requests", "max_log_len"),
        *("disable_log_stats",),
    ),
    _ENGINE: (),
}


_METAVARS = {str: "TEXT", int: "N", float: "X"}


class _BooleanAction(argparse.BooleanOptionalAction):
    """`--flag` and `--no-flag`. Up to Python 3.12 the base class adds the default to the help in its own way."""

    def __init__(self, *, help: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.help = help


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; the usage of this many flags would bury it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_flags(argv: Sequence[str] | None = None) -> tuple[EngineArgs, ServerArgs]:
    """Parse the command line.

    Raises:
        ConfigError: for a value out of range; its `field` is the flag.
    """
    parser = make_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    values = vars(parser.parse_args(arguments))
    if values["config"] is not None:
        # Read as defaults, so that what the command line says wins; and the positional model is one of its words.
        try:
            parser.set_defaults(**load_config_file(values["config"], (EngineArgs, ServerArgs)))
        except ConfigError as error:
            raise in_flag_terms(error) from None
        values = vars(parser.parse_args(arguments))
        if values["model_positional"] is not None and "--model" not in {word.split("=")[0] for word in arguments}:
            values["model"] = None
    positional = values.pop("model_positional")
    if positional is not None:
        if values["model"] is not None:
            parser.error("the model is given twice, as an argument and as --model")
        values["model"] = positional
    try:
        engine = EngineArgs(**{f.name: values[f.name] for f in fields(EngineArgs)})
        server = ServerArgs(**{f.name: values[f.name] for f in fields(ServerArgs)})
    except ConfigError as error:
        raise in_flag_terms(error) from None
    return engine, server


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pyengine.server",
        usage="%(prog)s [flags] [MODEL]",
        description="Serves a model over gRPC (pyengine.v1.Inference, health, reflection) and, if asked to, OpenAI's HTTP API.",
        allow_abbrev=False,
    )
    # Not named "model": argparse would let the positional's default overwrite the flag's value.
    parser.add_argument("model_positional", nargs="?", default=None, metavar="MODEL", help="the same as --model")
    _add_groups(parser, {EngineArgs: _ENGINE, ServerArgs: _FRONTEND})
    return parser


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every `EngineArgs` field, grouped; for other programs that run an engine, benchmarks among them."""
    _add_groups(parser, {EngineArgs: _ENGINE})


def _add_groups(parser: argparse.ArgumentParser, owners: Mapping[type, str]) -> None:
    """Add the fields of dataclasses, each in its group or in the one that is given for its owner."""
    by_name = {field.name: (owner, field) for owner in owners for field in fields(owner)}
    groups = {title: [name for name in names if name in by_name] for title, names in _GROUPS.items()}
    grouped = {name for names in groups.values() for name in names}
    for name, (owner, _) in by_name.items():
        if name not in grouped:
            groups[owners[owner]].append(name)
    for title, names in groups.items():
        if names:
            group = parser.add_argument_group(title)
            for name in names:
                owner, field = by_name[name]
                _add_flags(group, owner, [field])


def in_flag_terms(error: ConfigError) -> ConfigError:
    """The error with its flag for a field, where it is one's."""
    is_flag = error.field in {f.name for owner in (EngineArgs, ServerArgs) for f in fields(owner)}
    return ConfigError(flag_name(error.field), error.message) if is_flag else error


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _add_flags(group: Any, owner: type, chosen: Sequence[Field[Any]]) -> None:
    hints = typing.get_type_hints(owner)
    comments = field_comments(owner)
    for field in chosen:
        if field.default is MISSING:
            raise TypeError(f"{owner.__name__}.{field.name} has no default, so it cannot be a flag")
        options: dict[str, Any] = {"default": field.default, "help": comments[field.name].replace("%", "%%")}
        kind = not_none(hints[field.name])
        if kind is bool:
            options["action"] = _BooleanAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options |= {"type": kind, "metavar": _METAVARS[kind]}
        if field.default is not None:
            options["help"] += f" (default: {_shown(field.default)})"
        group.add_argument(flag_name(field.name), **options)


def _shown(default: Any) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else str(default)


def field_comments(owner: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, from its source.

    Raises:
        TypeError: for a field without one.
    """
    source = inspect.getsource(owner)
    comments = dict(re.findall(r"^    (\w+):[^#\n]*#[ ]*(.+)$", source, flags=re.MULTILINE))
    for field in fields(owner):
        if field.name not in comments:
            raise TypeError(f"{owner.__name__}.{field.name} has no comment to serve as its flag's help")
    return comments
