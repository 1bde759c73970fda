"""An OpenTelemetry collector that keeps what it gets: what the tests look at instead of a real one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class SpanSeen:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    duration_s: float
    error: str
    attributes: dict[str, str]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``start`` it, ``stop`` it."""

    spans: list[SpanSeen] = field(default_factory=list)
    url: str = ""

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(1).wait(5)

    def of(self, trace_id: str) -> list[SpanSeen]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SpanSeen(
                            service=service.removeprefix("pdserve-"),
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            start_s=span.start_time_unix_nano / 1e9,
                            duration_s=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            error=span.status.message,
                            attributes={item.key: item.value.string_value for item in span.attributes},
                        )
                    )
        return trace_service_pb2.ExportTraceServiceResponse()
