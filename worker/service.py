"""A worker's requests: between the sessions of routers and the engine. Used by both services.

Owns which request of which session is which request of the engine. Every request that was opened here ends exactly
once: with the engine's terminal output, or with one made here when the engine is lost.

    SessionServer --open, abort, session_lost--> WorkerService --AddRequest, AbortRequests--> engine
    SessionServer <------------send------------- WorkerService <---------StepOutputs--------- engine
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.messages import AbortRequests, AddRequest, EngineStats, StepOutputs
from pdserve import terminal
from pdserve.session_server import ServerSession
from pdserve.v1 import inference_pb2 as pb
from telemetry.metrics import WorkerMetrics
from telemetry.tracing import OFF, Tracer
from worker.spans import RequestSpans
from worker.translate import InvalidRequest, failure_output, output_to_pb, to_add_request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenRequest:
    session: ServerSession
    request_id: str
    """As the session knows it; the engine's id also names the peer, since ids are unique on a session only."""
    received_s: float
    spans: RequestSpans
    has_emitted: bool = False


class WorkerService:
    """The handler of the SessionServer."""

    def __init__(
        self,
        to_engine: Callable[[AddRequest | AbortRequests], bool],
        metrics: WorkerMetrics,
        tracer: Tracer = OFF,
        role: str = "",
    ) -> None:
        """``to_engine`` returns False when there is no engine that takes the message."""
        self._to_engine = to_engine
        self._metrics = metrics
        self._tracer = tracer
        self._role = role
        self._open: dict[str, _OpenRequest] = {}
        self._stats = EngineStats()
        self.draining = False
        """What comes is handed back at once."""
        self.model_fingerprint = ""
        """Of the engine's model."""

    # ---- from sessions

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        if why := self._why_not_here(request):
            self._metrics.requests_finished.labels("abort").inc()
            session.send([terminal.aborted(request.request_id, why)])
            return
        engine_id = f"{session.peer.worker_id}/{session.peer.incarnation}/{request.request_id}"
        try:
            message = to_add_request(request, engine_id)
        except InvalidRequest as error:
            self._refuse(session, request.request_id, pb.ERROR_CODE_INVALID_REQUEST, str(error), retryable=False)
            return
        if not self._to_engine(message):
            text = "the engine of this worker is starting: use another one, or try again"
            self._refuse(session, request.request_id, pb.ERROR_CODE_WORKER_LOST, text, retryable=True)
            return
        spans = RequestSpans(self._tracer, self._role, request)
        self._open[engine_id] = _OpenRequest(session, request.request_id, time.monotonic(), spans)
        self._metrics.open_requests.set(len(self._open))

    def abort(self, session: ServerSession, request_id: str, reason: str) -> None:
        self._abort(session, [request_id], reason)

    def session_lost(self, session: ServerSession, request_ids: list[str]) -> None:
        if request_ids:
            self._abort(session, request_ids, "session lost")

    # ---- from the engine

    def take(self, message: StepOutputs) -> None:
        """Give one step's news to the sessions, in one frame each."""
        if message.stats is not None:
            self._stats = message.stats
        by_session: dict[ServerSession, list[pb.Output]] = {}
        now_s = time.monotonic()
        for output in message.outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue  # aborted meanwhile: nobody wants an answer
            news = output_to_pb(output, request.request_id)
            if output.token_ids and not request.has_emitted:
                request.has_emitted = True
                news.phases.worker_s = now_s - request.received_s
                if news.HasField("transfer"):
                    transfer = news.transfer
                    self._metrics.observe_transfer(transfer.lane, transfer.seconds, transfer.bytes)
            request.spans.take(output, now_s)
            if output.finish_reason is not None:
                del self._open[output.request_id]
                self._count(news.finish)
            by_session.setdefault(request.session, []).append(news)
        for session, outputs in by_session.items():
            session.send(outputs)
        self._metrics.open_requests.set(len(self._open))

    def engine_lost(self, reason: str) -> None:
        """End everything: its tokens and KV are gone with the engine."""
        lost, self._open = self._open, {}
        self._stats = EngineStats()
        for request in lost.values():
            text = f"the engine of this worker was lost: {reason}"
            request.spans.end(text)
            self._refuse(request.session, request.request_id, pb.ERROR_CODE_WORKER_LOST, text, retryable=True)
        self._metrics.open_requests.set(0)

    def give_back_all(self, reason: str) -> None:
        """Let the engine end everything as aborted, and say so: whoever sent it may resume it elsewhere."""
        if self._open and not self._to_engine(AbortRequests(list(self._open), reason)):
            log.warning("%d requests could not be given back: the engine takes no message", len(self._open))

    def load(self) -> pb.Load:
        """For the heartbeats of sessions."""
        stats = self._stats
        return pb.Load(
            running=stats.running,
            waiting=stats.waiting + stats.waiting_for_kv,
            queued_tokens=stats.queued_tokens,
            free_blocks=stats.free_blocks + stats.cached_blocks,
            total_blocks=stats.total_blocks,
            shares_prefill=stats.shares_prefill and not self.draining,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
        )

    @property
    def num_open(self) -> int:
        return len(self._open)

    # ---- inside

    def _why_not_here(self, request: pb.GenerateRequest) -> str:
        """Why it is handed back at once; empty when it is not."""
        if self.draining:
            return "this worker is draining: use another one"
        if request.model_fingerprint not in ("", self.model_fingerprint):  # its router knows an older incarnation
            return "this worker has another model: use another one"
        return ""

    def _abort(self, session: ServerSession, request_ids: list[str], reason: str) -> None:
        prefix = f"{session.peer.worker_id}/{session.peer.incarnation}/"
        known = [prefix + request_id for request_id in request_ids if prefix + request_id in self._open]
        for engine_id in known:
            self._open.pop(engine_id).spans.end(f"aborted: {reason}")
            self._metrics.requests_finished.labels("abort").inc()
        if known and not self._to_engine(AbortRequests(known, reason, is_retry=reason == "retry")):
            log.warning("abort of %d requests did not reach the engine", len(known))
        self._metrics.open_requests.set(len(self._open))

    def _refuse(
        self, session: ServerSession, request_id: str, code: pb.ErrorCode.ValueType, message: str, retryable: bool
    ) -> None:
        output = failure_output(request_id, code, message, retryable)
        self._count(output.finish)
        session.send([output])

    def _count(self, finish: pb.Finish) -> None:
        reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        self._metrics.requests_finished.labels(reason).inc()
        if finish.HasField("failure"):
            code = pb.ErrorCode.Name(finish.failure.code).removeprefix("ERROR_CODE_").lower()
            self._metrics.failures.labels(code).inc()
