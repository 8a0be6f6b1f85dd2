"""Log lines: their form, and the request that each belongs to. They hold no prompts unless `--max-log-len` asks for them."""

from __future__ import annotations

import logging
from contextvars import ContextVar

#: The request that the running task works for; set once it is admitted, and so in every log line that follows from it.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(suffix)s"


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Note the request's id, where there is one and the line does not say it itself."""
        if "request_id" not in vars(record):
            vars(record)["request_id"] = REQUEST_ID.get()
        request_id = vars(record)["request_id"]
        vars(record)["suffix"] = "" if request_id is None or request_id in record.getMessage() else f" [{request_id}]"
        return True


def configure_logging(level: str, form: str) -> None:
    """Set up the root logger, on standard error.

    Args:
        level: a name of `logging`'s, in any case.
        form: "text", or "json" for an object a line with at least timestamp, level, logger and message.
    """
    handler = logging.StreamHandler()
    handler.addFilter(_WithRequestId())
    handler.setFormatter(_json_formatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter

    formatter: logging.Formatter = JsonFormatter(
        "{asctime}{levelname}{name}{message}",
        style="{",
        rename_fields={"asctime": "timestamp", "levelname": "level", "name": "logger"},
        reserved_attrs=[*_standard_attributes(), "suffix"],
    )
    formatter.default_msec_format = "%s.%03d"
    return formatter


def _standard_attributes() -> list[str]:
    return [*vars(logging.LogRecord("", 0, "", 0, "", None, None)), "message", "asctime"]


def announcement(logger: str, message: str, form: str) -> str:
    """A line that is printed at any log level: a JSON object as every other of `logger`'s, or the message alone."""
    if form != "json":
        return message
    record = logging.LogRecord(logger, logging.INFO, "", 0, message, None, None)
    _WithRequestId().filter(record)
    return _json_formatter().format(record)
