"""The gateway's sessions to the routers, and one generation's way over them.

Owns which router is used (the first alive one that has workers) and the resume: when a session is lost, or a worker in
the middle of an output, the same request is opened again with the tokens so far and the same pinned seed, so the client
sees one unbroken output. A router that leaves hands its requests back, which is the same. A failure that the router
reports before it sent a token is final: the router has retried it already.

    acquire -> open -> outputs -> finish
       ^                  | lost, resumes left
       +------------------+
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence

from gateway.errors import GatewayError, deadline_exceeded, from_failure, router_unavailable
from pdserve.identity import new_identity
from pdserve.session import Handle, Session
from pdserve.tls import Tls
from pdserve.v1 import inference_pb2 as pb

MAX_GIVEN_BACK = 16
"""So often routers that leave may hand a request back; after that it counts as a failure."""

OnOutput = Callable[[pb.Output], Awaitable[bool]]
"""Takes an output, may wait; False when no more are wanted."""


class RouterPool:
    """One session per router; each reconnects by itself."""

    def __init__(self, addresses: Sequence[str], wait_s: float, tls: Tls | None = None) -> None:
        self._addresses = addresses
        self._wait_s = wait_s
        self._tls = tls
        self._sessions: list[Session] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        identity = new_identity("gateway", f"gateway-{uuid.uuid4().hex[:12]}")
        self._sessions = [
            Session.start(address, identity, self._on_change, tls=self._tls) for address in self._addresses
        ]

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))

    @property
    def usable(self) -> list[Session]:
        """Sessions that can take requests, best first: a router that has just started may not have met the workers that
        the next one knows. A router that leaves would hand them back."""
        usable = [session for session in self._sessions if session.alive and not session.draining]
        return sorted(usable, key=lambda session: not session.load.total_blocks)

    @property
    def pool_tokens(self) -> int:
        """What the largest worker's KV pool holds; 0 while unknown."""
        return max((session.load.pool_tokens for session in self.usable), default=0)

    @property
    def load(self) -> pb.Load:
        """Of the fleet: routers know the same workers, so the first one's word is enough. All 0 without one."""
        usable = self.usable
        return usable[0].load if usable else pb.Load()

    @property
    def not_ready_reason(self) -> str | None:
        """Why no request could be served now; None when one could."""
        usable = self.usable
        if not usable:
            return f"no router answers at {', '.join(self._addresses)}"
        if not any(session.load.total_blocks for session in usable):
            return "the router has no workers yet"
        return None

    async def acquire(self) -> Session:
        """The session to use now; waits a bounded time for one to come back. Raises GatewayError."""
        if usable := self.usable:
            return usable[0]
        try:
            async with asyncio.timeout(self._wait_s):
                while not (usable := self.usable):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise router_unavailable(f"no router answers at {', '.join(self._addresses)}") from None
        return usable[0]

    def _on_change(self, session: Session) -> None:
        self._changed.set()


class Generation:
    """One choice, opened on a router until it ends. ``request`` is the template of every attempt."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        deadline_s: float,
        timeout_s: float,
        max_resumes: int,
        on_abort: Callable[[str], None],
    ) -> None:
        self.resumes = 0
        self._given_back = 0
        self.traceparent = ""
        """The span that it is a part of."""
        self._request = request
        self._deadline_s = deadline_s  # on the event loop's clock
        self._timeout_s = timeout_s
        self._max_resumes = max_resumes
        self._on_abort = on_abort
        self._output_so_far: list[int] = []

    @property
    def model_fingerprint(self) -> str:
        """Of the model that answers; empty before its first token."""
        return self._request.model_fingerprint

    def go_on_after(self, token_ids: Sequence[int], model_fingerprint: str) -> None:
        """The client has these tokens of this model already, from a stream of another gateway."""
        self._output_so_far.extend(token_ids)
        self._request.model_fingerprint = model_fingerprint

    async def run(self, routers: RouterPool, on_output: OnOutput) -> None:
        """Hand every output to ``on_output`` until the last one, or until it answers False: then the request is
        aborted ("stop"). The caller bounds the time. Raises GatewayError; cancelled, it aborts the request."""
        while len(self._output_so_far) < self._request.sampling.max_tokens:
            session = await routers.acquire()
            connects, had_tokens = session.connects_total, len(self._output_so_far)
            failure = await self._attempt(session, on_output)
            if failure is None:
                return
            if failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED:
                raise deadline_exceeded(self._timeout_s)
            session_lost = not session.alive or session.connects_total != connects
            made_progress = len(self._output_so_far) > had_tokens
            is_lost = failure.code in (pb.ERROR_CODE_WORKER_LOST, pb.ERROR_CODE_HANDOFF_FAILED) and failure.retryable
            if failure.code == pb.ERROR_CODE_ABORTED and self._given_back < MAX_GIVEN_BACK:  # that router leaves
                self._given_back += 1
            elif (
                not is_lost
                or not (session_lost or made_progress)
                or self.resumes - self._given_back >= self._max_resumes
            ):
                raise from_failure(failure)
            self.resumes += 1
        # Only the finish was lost, or only the prompt was asked for.
        await on_output(pb.Output(finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH)))

    async def _attempt(self, session: Session, on_output: OnOutput) -> pb.Failure | None:
        """One try on one session: None when the choice ended, else why not."""
        handle = session.open(self._next_request())
        reason = "client"
        try:
            async for output in handle:
                if output.HasField("finish") and (failure := _failure(output.finish)) is not None:
                    if failure.code == pb.ERROR_CODE_SLOW_CONSUMER:  # the session has aborted it
                        self._on_abort("slow_consumer")
                    return failure
                self._output_so_far.extend(output.token_ids)
                if output.model_fingerprint:
                    self._request.model_fingerprint = output.model_fingerprint
                if not await on_output(output) and not output.HasField("finish"):
                    reason = "stop"
                    return None
            return None
        except GatewayError as error:
            reason = error.code or reason
            raise
        finally:
            self._abort_open(handle, reason)

    def _next_request(self) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        if self.resumes:
            request.request_id = f"{request.request_id}+{self.resumes}"
        request.traceparent = self.traceparent
        request.output_so_far.extend(self._output_so_far)
        request.timeout_s = max(self._deadline_s - asyncio.get_running_loop().time(), 0.001)
        return request

    def _abort_open(self, handle: Handle, reason: str) -> None:
        if handle.finish is None:
            if reason == "client" and asyncio.get_running_loop().time() >= self._deadline_s:
                reason = "deadline"
            handle.abort(reason)
            self._on_abort(reason)


def _failure(finish: pb.Finish) -> pb.Failure | None:
    """Why the request did not end by itself; None when it did."""
    if finish.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
        return None
    if finish.reason == pb.FINISH_REASON_TIMEOUT:
        return pb.Failure(code=pb.ERROR_CODE_DEADLINE_EXCEEDED)
    if finish.reason == pb.FINISH_REASON_ABORT:
        return pb.Failure(code=pb.ERROR_CODE_ABORTED, message=finish.failure.message or "the request was aborted")
    return finish.failure
