"""`python -m pyengine.server`: see `--help`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from pyengine.config import EngineArgs
from pyengine.errors import ConfigError, PyEngineError
from pyengine.server.auth import KEY_VARIABLE, load_api_keys
from pyengine.server.flags import LOG_LEVELS, in_flag_terms, parse_flags
from pyengine.server.logs import announcement, configure_logging
from pyengine.tenants import load_tenants

if TYPE_CHECKING:
    from pyengine.server.engine_client import EngineClient
    from pyengine.server.lifecycle import InferenceServer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal.

    Returns:
        The exit code: 0 after a signal; 1, and one line on stderr, if the server cannot start; 1 if its engine fails; 130 if
        it is interrupted before it listens.
    """
    try:
        engine_args, server_args = parse_flags(argv)
        tenants = load_tenants(engine_args.tenants)
        keys = load_api_keys(server_args.api_key_file, os.environ.get(KEY_VARIABLE), tenants, os.environ)
        _configure_logging(server_args.log_level or os.environ.get("PYENGINE_LOG_LEVEL") or "info", server_args.log_format)
        # Only now that the flags are known to be right: torch and grpc take seconds to import.
        from pyengine.server.lifecycle import LOADER_THREAD, InferenceServer, run

        async def serve() -> int:
            server = InferenceServer(server_args, _engine_factory(engine_args), _version(), keys, tenants)
            return await run(server, announce=partial(_announce, form=server_args.log_format), stop_now=_stop_now)

        code = asyncio.run(serve())
    except KeyboardInterrupt:  # while libraries were imported; from then on the server has its own handlers
        return 130
    except PyEngineError as error:
        shown = in_flag_terms(error) if isinstance(error, ConfigError) else error
        print(f"error: {shown}", file=sys.stderr)
        return 1
    if any(thread.name == LOADER_THREAD for thread in threading.enumerate()):
        _exit_now(code)  # stopped while it was loading, which a normal exit would have to wait for
    return code


def _engine_factory(args: EngineArgs) -> Callable[[], EngineClient]:
    def make_engine() -> EngineClient:
        from pyengine.engine.async_engine import AsyncLLMEngine
        from pyengine.engine.llm_engine import LLMEngine

        return AsyncLLMEngine(LLMEngine(args, usage_context="server"))

    return make_engine


def _version() -> str:
    try:
        return importlib.metadata.version("pyengine")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a source tree


def _announce(server: InferenceServer, form: str) -> None:
    # Not log lines: whoever asked for port 0 needs them at any log level.
    lines = [f"serving on {server.address}"]
    lines += [f"serving {name} on {http_port.url}" for name, http_port in server.http_ports.items()]
    for line in lines:
        print(announcement("pyengine.server", line, form), file=sys.stderr, flush=True)


def _configure_logging(level: str, form: str) -> None:
    if level.lower() not in LOG_LEVELS:
        raise ConfigError("PYENGINE_LOG_LEVEL", f"must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    configure_logging(level, form)


def _stop_now(number: int) -> None:
    logging.getLogger(__name__).warning("second signal: stopping at once")
    _exit_now(128 + number)


def _exit_now(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
