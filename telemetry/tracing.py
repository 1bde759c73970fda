"""One trace per request over all processes: spans sent to an OpenTelemetry collector, or nothing at all.

Owns how a span is made, which context it passes on, and the exporter. Which spans there are is said where they are
made:

    gateway   request [tokenize]                                  the root, or a child of the client's own span
    router      route [choose, attempt 1, attempt 2, ...]
    prefill         prefill worker [queue, hand-off wait, prefill]
    decode          decode worker [transfer, decode]              aggregated: [queue, prefill, decode]

The context travels as a W3C ``traceparent`` in GenerateRequest. Whether a trace is kept is decided once, where it
begins (by the client, or by the gateway's ratio); everybody after that follows. Times are given on the monotonic clock,
because durations are what the engine reports; the wall clock is added here. Without an endpoint the tracer is ``OFF``,
and OpenTelemetry is not even imported.
"""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 3
MAX_QUEUED_SPANS = 8192
"""More are dropped: a collector that is slow or gone costs spans, never requests."""

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span(Protocol):
    """Something that takes time. ``traceparent`` is what its parts in other processes are given."""

    traceparent: str

    def child(self, name: str, start_s: float, end_s: float, **attributes: str | float) -> None:
        """A part of it that is over. Seconds on ``time.monotonic()``'s clock."""

    def end(self, error: str = "", **attributes: str | float) -> None:
        """It is over now; ``error``: and went wrong. Call it once."""


class Tracer(Protocol):
    """Makes spans."""

    def begin(
        self, name: str, traceparent: str = "", start_s: float | None = None, **attributes: str | float
    ) -> Span: ...

    def close(self) -> None:
        """Send what is left; takes ``EXPORT_TIMEOUT_S`` at most."""


def valid_traceparent(value: str | None) -> str:
    """A client's header, or an empty string when it is missing or no trace context (then a new trace begins)."""
    return value if value is not None and _TRACEPARENT.fullmatch(value) else ""


def start_tracer(service: str, instance: str, endpoint: str, sample_ratio: float = 1.0) -> Tracer:
    """``endpoint``: of an OTLP collector (gRPC); empty: ``OFF``. ``sample_ratio``: how many of the traces that begin
    here are kept. Raises ValueError when that cannot be."""
    if not 0.0 <= sample_ratio <= 1.0:
        raise ValueError(f"trace sample ratio {sample_ratio} is not between 0 and 1: use --trace-sample-ratio 0.1")
    if not endpoint:
        return OFF
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs OpenTelemetry ({error}): pip install 'pdserve[otel]'") from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create({"service.name": f"pdserve-{service}", "service.instance.id": instance}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))
    return SdkTracer(provider)


class _NoSpan:
    """Hands the context on, for processes that do trace."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def child(self, name: str, start_s: float, end_s: float, **attributes: str | float) -> None:
        return

    def end(self, error: str = "", **attributes: str | float) -> None:
        return


class _Off:
    def begin(self, name: str, traceparent: str = "", start_s: float | None = None, **attributes: str | float) -> Span:
        return _NoSpan(traceparent) if traceparent else _UNTRACED

    def close(self) -> None:
        return


_UNTRACED = _NoSpan("")
OFF: Tracer = _Off()


class SdkTracer:
    """Spans of an OpenTelemetry provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pdserve")

    def begin(self, name: str, traceparent: str = "", start_s: float | None = None, **attributes: str | float) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
        start_ns = _wall_ns(time.monotonic() if start_s is None else start_s)
        return _SdkSpan(self._tracer, self._tracer.start_span(name, parent, start_time=start_ns, attributes=attributes))

    def close(self) -> None:
        # The provider's own patience is 30 s when a queue is full and its collector does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="tracer-close", daemon=True)
        closing.start()
        closing.join(EXPORT_TIMEOUT_S)


class _SdkSpan:
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        context = span.get_span_context()
        self._tracer = tracer
        self._span = span
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str, start_s: float, end_s: float, **attributes: str | float) -> None:
        if not self._span.is_recording():
            return
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._span)
        child = self._tracer.start_span(name, parent, start_time=_wall_ns(start_s), attributes=attributes)
        child.end(_wall_ns(end_s))

    def end(self, error: str = "", **attributes: str | float) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def _wall_ns(monotonic_s: float) -> int:
    return time.time_ns() + int((monotonic_s - time.monotonic()) * 1e9)
