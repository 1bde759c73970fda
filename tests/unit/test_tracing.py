"""Spans and their context; and that tracing which is off is not there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from telemetry.tracing import EXPORT_TIMEOUT_S, MAX_QUEUED_SPANS, OFF, SdkTracer, start_tracer, valid_traceparent
from tests.ports import free_port

CLIENT = f"00-{'4b' * 16}-{'0f' * 8}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> SdkTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return SdkTracer(provider)


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        (CLIENT, True),
        (None, False),
        ("", False),
        ("rubbish", False),
        (CLIENT.upper(), False),
        (f"00-{'0' * 32}-{'0f' * 8}-01", False),
        (f"00-{'4b' * 16}-{'0' * 16}-01", False),
        (CLIENT + "\n", False),
        (CLIENT + "-more", False),
    ],
)
def test_what_a_client_may_send(value: str | None, is_valid: bool) -> None:
    assert valid_traceparent(value) == (value if is_valid else "")


def test_off_hands_the_context_on_and_imports_nothing() -> None:
    span = OFF.begin("request", CLIENT)
    span.child("part", 0.0, 1.0)
    span.end("an error")
    assert span.traceparent == CLIENT
    assert OFF.begin("request").traceparent == ""
    code = (
        "import sys; from telemetry.tracing import OFF, start_tracer; assert start_tracer('a', 'b', '') is OFF; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", ""])
def test_a_wrong_ratio_names_the_remedy(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--trace-sample-ratio"):
        start_tracer("gateway", "g", endpoint, 1.5)


def test_parents_times_and_errors(tracer: SdkTracer, exporter: InMemorySpanExporter) -> None:
    now_s = time.monotonic()
    outer = tracer.begin("outer", CLIENT, now_s - 3.0, worker="p0")
    inner = tracer.begin("inner", outer.traceparent)
    outer.child("part", now_s - 3.0, now_s - 2.0, tokens=7)
    inner.end("lost")
    outer.end(done=1)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"4b" * 16}
    parents = {name: span.parent and f"{span.parent.span_id:016x}" for name, span in spans.items()}
    outer_id = f"{spans['outer'].context.span_id:016x}"
    assert parents == {"outer": "0f" * 8, "inner": outer_id, "part": outer_id}
    part = spans["part"]
    assert part.start_time is not None
    assert part.end_time is not None
    assert (part.end_time - part.start_time) / 1e9 == pytest.approx(1.0, abs=0.01)
    assert part.attributes == {"tokens": 7}
    assert spans["inner"].status.status_code is StatusCode.ERROR
    assert spans["inner"].status.description == "lost"
    assert spans["outer"].attributes == {"worker": "p0", "done": 1}


def test_a_trace_that_is_not_kept_stays_so(tracer: SdkTracer, exporter: InMemorySpanExporter) -> None:
    span = tracer.begin("request", CLIENT[:-2] + "00")
    span.child("part", 0.0, 1.0)
    tracer.begin("inner", span.traceparent).end()
    span.end()
    assert span.traceparent.endswith("-00")
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("accepts", [False, True])
def test_a_collector_that_is_gone_or_mute_costs_spans_and_a_bounded_time(accepts: bool) -> None:
    """However many are left for it at the end: a process must be through with its drain in its grace period."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if accepts else free_port()
        tracer = start_tracer("gateway", "g", f"http://127.0.0.1:{port}")
        begin_s = time.monotonic()
        for _ in range(2 * MAX_QUEUED_SPANS):
            tracer.begin("request").end()
        tracer.close()
        assert time.monotonic() - begin_s < EXPORT_TIMEOUT_S + 10
