"""Where one request was sent and what came of it: for the gateway's record (``pb.Route``) and for the trace.

route                   received ........................................ ended
  choose                   | placed |
  attempt 1 (to P, to D)            | sent ........ failed |
  attempt 2                                                | sent ......... |
"""

from __future__ import annotations

import asyncio

from pdserve.v1 import inference_pb2 as pb
from router.placement import Placement
from telemetry.tracing import Span, Tracer


class Trail:
    """Filled by the request's path."""

    def __init__(self, tracer: Tracer, router_id: str, request: pb.GenerateRequest) -> None:
        self.route = pb.Route(router=router_id)
        self._tracer = tracer
        self._received_s = asyncio.get_running_loop().time()
        self._span = tracer.begin("route", request.traceparent, request_id=request.request_id, router=router_id)
        self._attempt_span: Span | None = None

    def attempt_begins(self, placement: Placement, now_s: float) -> str:
        """The trace context that the attempt's workers get."""
        prefill_worker = placement.prefill.worker_id if placement.prefill is not None else ""
        decode_worker = placement.decode.worker_id
        if not self.route.attempts:
            self._span.child("choose", self._received_s, now_s)
        self.route.attempts.add(
            prefill_worker=prefill_worker, decode_worker=decode_worker, start_s=now_s - self._received_s
        )
        self._attempt_span = self._tracer.begin(
            f"attempt {len(self.route.attempts)}",
            self._span.traceparent,
            now_s,
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            prefill_cached_tokens=placement.prefill_cached_tokens,
            decode_cached_tokens=placement.decode_cached_tokens,
        )
        return self._attempt_span.traceparent

    def attempt_ended(self, error: str) -> None:
        """``error``: why it did not end the request; empty when it did."""
        attempt = self.route.attempts[-1]
        attempt.duration_s = asyncio.get_running_loop().time() - self._received_s - attempt.start_s
        attempt.failure = error
        if self._attempt_span is not None:
            self._attempt_span.end(error)
            self._attempt_span = None

    def end(self, error: str) -> None:
        self._span.end(error)
