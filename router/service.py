"""The router's side of the gateways' sessions: each request is a task that runs a RequestPath.

Owns admission (how many requests are open) and the end of requests whose gateway is gone. What happens to a request is
in request_path.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from pdserve import terminal
from pdserve.session_server import ServerSession
from pdserve.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.placement import Placer
from router.request_path import RequestPath
from router.trail import Trail
from router.workers import Workers
from telemetry.metrics import RouterMetrics
from telemetry.tracing import OFF, Tracer

LEAVING = "this router is leaving: use another one"

RequestKey = tuple[ServerSession, str]

log = structlog.get_logger()


class RouterService:
    """Handler of the SessionServer."""

    def __init__(
        self,
        workers: Workers,
        placer: Placer,
        config: RouterConfig,
        metrics: RouterMetrics,
        why_behind: Callable[[], str | None] = lambda: None,
        tracer: Tracer = OFF,
        router_id: str = "",
    ) -> None:
        """``why_behind``: what the prefix index still lacks, if anything."""
        self._workers = workers
        self._placer = placer
        self._config = config
        self._metrics = metrics
        self._why_behind = why_behind
        self._tracer = tracer
        self._router_id = router_id
        self._running: dict[RequestKey, tuple[asyncio.Task[None], RequestPath]] = {}
        self._was_ready = False
        self.draining = False
        """New requests are handed back, so that gateways send them to another router."""

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        """Start the request's path, or refuse it at once."""
        request_id = request.request_id
        if self.draining:
            self._metrics.requests_finished.labels("FINISH_REASON_ABORT").inc()
            session.send([terminal.aborted(request_id, LEAVING)])
            return
        if len(self._running) >= self._config.max_open_requests:
            message = f"the router has {len(self._running)} open requests"
            refusal = terminal.failed(request_id, pb.ERROR_CODE_OVERLOADED, message, retryable=True, retry_after_s=1.0)
            self._metrics.requests_finished.labels("FINISH_REASON_ERROR").inc()
            self._metrics.failures.labels("ERROR_CODE_OVERLOADED").inc()
            session.send([refusal])
            return
        trail = Trail(self._tracer, self._router_id, request)
        path = RequestPath(
            request, lambda output: session.send([output]), self._placer, self._config, self._metrics, trail
        )
        task = asyncio.create_task(self._run(session, request_id, path), name=f"request {request_id}")
        self._running[session, request_id] = task, path
        # Not in the task itself: one that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self._forget((session, request_id)))
        self._metrics.open_requests.set(len(self._running))

    def abort(self, session: ServerSession, request_id: str, reason: str) -> None:
        """The gateway wants no more of it: end it on the workers."""
        if (session, request_id) in self._running:
            task, path = self._running[session, request_id]
            path.abort_reason = reason
            task.cancel()
            self._metrics.requests_finished.labels("FINISH_REASON_ABORT").inc()

    def session_lost(self, session: ServerSession, request_ids: list[str]) -> None:
        """Nobody reads the answers any more."""
        for request_id in request_ids:
            self.abort(session, request_id, "client")

    def not_ready(self) -> str | None:
        """Why requests should not come here, or None. Once all expected workers were met, one decode worker is enough:
        it can do everything by itself."""
        if self.draining:
            return "draining"
        prefills = sum(worker.usable for worker in self._workers.with_role("prefill"))
        decodes = sum(worker.usable for worker in self._workers.with_role("decode", "aggregated"))
        if not decodes:
            return "no decode or aggregated worker is reachable"
        if self._was_ready:
            return None
        if decodes < self._config.min_decode_workers:
            return f"{decodes} of {self._config.min_decode_workers} decode workers were reached"
        needed_prefills = max(self._config.min_prefill_workers, bool(self._workers.with_role("prefill")))
        if prefills < needed_prefills:
            return f"{prefills} of {needed_prefills} prefill workers were reached"
        if behind := self._why_behind():
            return behind
        self._was_ready = True
        return None

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Hand back what comes, let finish what runs; hand back, too, what has not finished in time, or at once when
        ``hurry`` is set. Gateways go on with it at another router, after the tokens that they have."""
        self.draining = True
        everything = asyncio.gather(*(task for task, _ in self._running.values()), return_exceptions=True)
        hurried = asyncio.ensure_future(hurry.wait())
        waiting: list[asyncio.Future[Any]] = [everything, hurried]
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        late = dict(self._running)
        for task, path in late.values():
            path.abort_reason = "drain"
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for session, request_id in late:
            session.send([terminal.aborted(request_id, LEAVING)])

    async def _run(self, session: ServerSession, request_id: str, path: RequestPath) -> None:
        try:
            await path.run()
        except Exception:
            log.exception("a request's path is broken", request_id=request_id)
            message = "the router failed; its log has the cause"
            session.send([terminal.failed(request_id, pb.ERROR_CODE_INTERNAL, message)])

    def _forget(self, key: RequestKey) -> None:
        del self._running[key]
        self._metrics.open_requests.set(len(self._running))
