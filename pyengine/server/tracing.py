"""OpenTelemetry: one span a request, sent to a collector over OTLP/gRPC."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from pyengine.errors import ConfigError
from pyengine.server.request_record import RequestRecord

#: seconds that spans get to be sent when the server stops
FLUSH_SECONDS = 3


class RequestTracer:
    """Makes spans of requests that are over. Attributes have the names of the OpenTelemetry conventions for generative AI.

    A span continues the trace that the request's `traceparent` header names, and has an event where the request left the queue
    (`queue`), where its prompt was computed (`prefill`) and where its last token came (`decode`), each with its seconds.

    Args:
        provider: an OpenTelemetry SDK `TracerProvider`, this object's own from now on.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pyengine")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def __call__(self, record: RequestRecord) -> None:
        """Make the span of a request that is over."""
        offset = time.time_ns() - int(time.monotonic() * 1e9)  # of the wall clock, as it stands now

        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        call, times = record.call, record.metrics
        ended = record.ended or record.started
        attributes = {
            "gen_ai.request.id": call.request_id,
            "gen_ai.request.n": call.params.n,
            "gen_ai.request.temperature": call.params.temperature,
            "gen_ai.request.top_p": call.params.top_p,
            "gen_ai.request.max_tokens": call.params.max_tokens,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_generated_tokens,
            "gen_ai.response.finish_reasons": [record.finish_reasons[index] for index in sorted(record.finish_reasons)],
            "pyengine.cached_tokens": record.num_cached_tokens,
            "pyengine.outcome": record.outcome,
            "pyengine.tenant": call.tenant,
            "pyengine.priority": call.priority,
            **{f"gen_ai.latency.time_in_{name}": seconds for name, seconds in record.phases().items()},
        }
        if times is not None:
            attributes["pyengine.preemptions"] = times.num_preemptions
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(call.trace_context or {})),
            kind=self._kind,
            start_time=wall(record.started),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        if times is not None:
            marks = {"queue": times.first_scheduled_time, "prefill": times.first_token_time, "decode": times.last_token_time}
            for name, seconds in record.phases().items():
                end = marks[name]
                assert end is not None
                span.add_event(name, {"seconds": seconds}, timestamp=wall(end))
        if record.is_failed:
            span.set_status(self._failed)
        span.end(end_time=wall(ended))

    def shutdown(self) -> None:
        """Send what is left. Blocks for as long as a collector that does not answer is given."""
        self._provider.force_flush(FLUSH_SECONDS * 1000)
        self._provider.shutdown()


def make_tracer(endpoint: str | None, version: str) -> RequestTracer | None:
    """The tracer of a server; None without an endpoint.

    Args:
        endpoint: the collector's, "http://HOST:PORT" or "HOST:PORT"; "https://..." for TLS.
        version: of this program.

    Raises:
        ConfigError: the endpoint has another form, or the libraries are missing.
    """
    if endpoint is None:
        return None
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address:
        raise ConfigError("otlp_endpoint", f"must be http://HOST:PORT or https://HOST:PORT, got {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_endpoint", f"needs OpenTelemetry: pip install 'pyengine[tracing]' ({error})") from None
    resource = Resource.create({"service.name": "pyengine", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    insecure = parts.scheme == "http"
    exporter = OTLPSpanExporter(endpoint=parts.netloc if insecure else endpoint, insecure=insecure, timeout=FLUSH_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider)
