"""What is known of a request once it is over: for its log line and its span."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from pyengine.errors import PyEngineError, RequestCancelledError
from pyengine.inputs import ChatPrompt, TextPrompt
from pyengine.outputs import RequestMetrics, RequestOutput
from pyengine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from pyengine.server.frontend import GenerationCall

logger = logging.getLogger(__name__)


class RequestRecord:
    """One request's course. Times are seconds of `time.monotonic`."""

    def __init__(self, call: GenerationCall) -> None:
        self.call = call
        self.started = time.monotonic()
        self.ended: float | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.finish_reasons: dict[int, str] = {}  # by choice
        self.metrics: RequestMetrics | None = None
        self.error: BaseException | None = None

    def observe(self, output: RequestOutput) -> None:
        """Take note of an output of the engine."""
        generated = sum(len(choice.token_ids) for choice in output.outputs)
        is_delta = self.call.params.output_kind is RequestOutputKind.DELTA
        self.num_generated_tokens = self.num_generated_tokens * is_delta + generated
        self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        self.finish_reasons |= {c.index: c.finish_reason for c in output.outputs if c.finish_reason is not None}
        self.metrics = output.metrics or self.metrics

    @property
    def outcome(self) -> str:
        """How it ended: the reason of its choices, "cancelled", or the error's class."""
        if self.error is None:
            return ",".join(self.finish_reasons[index] for index in sorted(self.finish_reasons))
        if isinstance(self.error, GeneratorExit | asyncio.CancelledError | RequestCancelledError):
            return "cancelled"
        return type(self.error).__name__

    @property
    def is_failed(self) -> bool:
        """Whether it ended with an error that is not its client's going away."""
        return self.error is not None and self.outcome != "cancelled"

    def phases(self) -> dict[str, float]:
        """Seconds in each phase that it came through."""
        times = self.metrics
        if times is None:
            return {}
        marks = {
            "queue": (times.arrival_time, times.first_scheduled_time),
            "prefill": (times.first_scheduled_time, times.first_token_time),
            "decode": (times.first_token_time, times.last_token_time),
        }
        return {name: end - start for name, (start, end) in marks.items() if start is not None and end is not None}


class RequestLog:
    """A log line for each request, when it is over.

    Args:
        max_prompt_chars: of the prompt's text, to be logged with it; 0: nothing of any prompt.
    """

    def __init__(self, max_prompt_chars: int) -> None:
        self._max_prompt_chars = max_prompt_chars

    def __call__(self, record: RequestRecord) -> None:
        """Write the line of a request that is over."""
        fields: dict[str, Any] = {
            "request_id": record.call.request_id,
            "tenant": record.call.tenant,
            "outcome": record.outcome,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "generation_tokens": record.num_generated_tokens,
            **{f"{name}_seconds": round(seconds, 6) for name, seconds in record.phases().items()},
            "seconds": round((record.ended or record.started) - record.started, 6),
        }
        if record.is_failed and isinstance(record.error, PyEngineError):
            fields["error"] = str(record.error)
        if self._max_prompt_chars:
            fields["prompt"] = _text_of(record.call)[: self._max_prompt_chars]
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None and name != "request_id")
        logger.info("request %s is over: %s", record.call.request_id, shown, extra=fields)


def _text_of(call: GenerationCall) -> str:
    prompt = call.prompt
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return repr(prompt.messages if isinstance(prompt, ChatPrompt) else list(prompt.token_ids))
