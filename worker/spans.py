"""A request's spans on its worker, made of the plain durations that the engine reports. Called by the service.

prefill worker   [queue | hand-off wait | prefill] ... KV released
decode worker                     [transfer][decode]     aggregated: [queue | prefill][decode]
"""

from __future__ import annotations

import time

from engine.messages import FinishReason, RequestOutput, Timings
from pdserve.v1 import inference_pb2 as pb
from telemetry.tracing import Tracer


class RequestSpans:
    """One request's."""

    __slots__ = ("_first_output_s", "_prefills_here", "_received_s", "_span")

    def __init__(self, tracer: Tracer, role: str, request: pb.GenerateRequest) -> None:
        self._received_s = time.monotonic()
        self._prefills_here = request.handoff.side != pb.Handoff.SIDE_RECEIVE
        self._first_output_s: float | None = None
        self._span = tracer.begin(
            f"{role} worker",
            request.traceparent,
            self._received_s,
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
        )

    def take(self, output: RequestOutput, now_s: float) -> None:
        """Note what the engine says; the last output ends it all."""
        if output.timings is not None:
            self._add_first(output.timings, output.cached_tokens or 0, now_s)
        if output.token_ids and self._first_output_s is None:
            self._first_output_s = now_s
        if output.finish_reason is not None:
            if self._first_output_s is not None:
                self._span.child("decode", self._first_output_s, now_s)
            is_good = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            self.end("" if is_good else output.error_message or str(output.finish_reason))

    def end(self, error: str) -> None:
        self._span.end(error)

    def _add_first(self, timings: Timings, cached_tokens: int, now_s: float) -> None:
        """What it took to the first token. A decode worker is told of the prefill worker's part, and leaves it out."""
        if self._prefills_here:
            at_s = self._received_s
            for name, duration_s in (
                ("queue", timings.prefill_queue_s),
                ("hand-off wait", timings.handoff_wait_s),
                ("prefill", timings.prefill_s),
            ):
                if duration_s > 0:
                    self._span.child(name, at_s, at_s + duration_s, cached_tokens=cached_tokens)
                at_s += duration_s
        elif (transfer := timings.transfer) is not None:
            self._span.child(
                "transfer",
                now_s - transfer.seconds,
                now_s,
                lane=transfer.lane,
                bytes=transfer.num_bytes,
                cached_tokens=transfer.cached_tokens,
                exposed_s=timings.transfer_s,
            )
