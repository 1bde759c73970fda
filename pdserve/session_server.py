"""Server side of sessions: gives each peer's requests to a handler, and carries the handler's outputs back.

The router serves gateways with it, workers serve routers. One stream per peer process; a newer session of a peer (it
reconnected, or it is a new incarnation) ends the older one, an older incarnation is refused.

    per session   read task  -> handler.open / handler.abort       (synchronous, never waits)
                  write task <- pending outputs, bounded           (all of one loop tick leave in one frame)

Losing a session (stream broken, 2 s of silence, the peer does not read) ends its requests: the handler is told which.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import grpc

from pdserve.pulse import LOST_AFTER_S, PeerSilent, Pulse
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc, kv_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    Context = grpc.aio.ServicerContext[pb.ClientFrame, pb.ServerFrame]

MAX_SESSIONS = 1024
MAX_OUTPUTS_IN_FRAME = 4096
MAX_PENDING_OUTPUTS = 65_536
CLOSE_TIMEOUT_S = 5.0  # then stopping the gRPC server cancels what is left

log = logging.getLogger(__name__)


class Handler(Protocol):
    """What a service does with requests. Called on the event loop; must not block."""

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        """A new request. The handler owns it until it sent the terminal output, or abort or session_lost is called."""

    def abort(self, session: ServerSession, request_id: str, reason: str) -> None:
        """The peer wants no more of this open request, and no answer."""

    def session_lost(self, session: ServerSession, request_ids: list[str]) -> None:
        """The session is gone; these requests were open on it. Nobody reads an answer."""


class ServerSession:
    """One peer's session, as the handler sees it: send() outputs, look at ``peer``."""

    def __init__(self, peer: kv_pb2.WorkerIdentity, pulse: Pulse, max_pending_outputs: int) -> None:
        self.peer = peer
        self.pulse = pulse
        self._max_pending_outputs = max_pending_outputs
        self._open: set[str] = set()
        self.pending: deque[pb.Output] = deque()
        self.written = asyncio.Event()
        """gRPC has everything that was sent; not set either while a frame is being written."""
        self.written.set()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._closed.done()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def send(self, outputs: Iterable[pb.Output]) -> None:
        """Queue outputs for the peer. Never waits: a peer that does not read loses its session."""
        for output in outputs:
            if output.request_id not in self._open:
                continue  # it was aborted meanwhile
            if output.HasField("finish"):
                self._open.discard(output.request_id)
            self.pending.append(output)
            self.written.clear()
        if len(self.pending) > self._max_pending_outputs:
            self.close(f"the peer does not read: more than {self._max_pending_outputs} outputs wait")
        self.pulse.ring()

    def close(self, reason: str) -> None:
        """End the session; its open requests are lost."""
        if not self._closed.done():
            self._closed.set_result(reason)

    @property
    def close_reason(self) -> str:
        """Why close() was called; empty while it was not."""
        return self._closed.result() if self._closed.done() else ""

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def opened(self, request_id: str) -> bool:
        """Note an open request; False when the id is open already."""
        if request_id in self._open:
            return False
        self._open.add(request_id)
        return True

    def aborted(self, request_id: str) -> bool:
        """Forget a request; False when it is not open."""
        if request_id not in self._open:
            return False
        self._open.discard(request_id)
        return True

    def take_lost(self, reason: str) -> list[str]:
        """Close, and give back what was open, once."""
        self.close(reason)
        lost = sorted(self._open)
        self._open.clear()
        self.pending.clear()
        return lost

    def take_outputs(self) -> list[pb.Output]:
        """Up to a frame of what waits."""
        return [self.pending.popleft() for _ in range(min(len(self.pending), MAX_OUTPUTS_IN_FRAME))]


class SessionServer(inference_pb2_grpc.GenerationServicer):
    """The servicer: admits sessions, pumps their frames, tells the handler. ``draining`` is told to all peers."""

    def __init__(
        self,
        identity: kv_pb2.WorkerIdentity,
        handler: Handler,
        *,
        load: Callable[[], pb.Load] | None = None,
        max_pending_outputs: int = MAX_PENDING_OUTPUTS,
    ) -> None:
        self.identity = identity
        """``address`` may be set after the port is bound; hello frames are made at each session's start."""
        self._draining = False
        self.sessions: dict[str, ServerSession] = {}
        """By the peer's worker_id."""
        self._idle = asyncio.Event()  # set when the last session leaves
        self._handler = handler
        self._load = load
        self._max_pending_outputs = max_pending_outputs

    @property
    def draining(self) -> bool:
        """Peers should send nothing new. They are told at once."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for session in self.sessions.values():
            session.pulse.ring()

    async def flush(self) -> None:
        """Wait (bounded) until gRPC has everything that was sent: last words are lost when a session is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOST_AFTER_S):  # a peer that does not read loses its session then
                for session in list(self.sessions.values()):
                    if session.alive:
                        await session.written.wait()

    async def close(self) -> None:
        """End all sessions (before the gRPC server is stopped, which would wait for them)."""
        for session in list(self.sessions.values()):
            session.close("the server is closing")
        if self.sessions:  # each leaves when its own tasks have ended
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._idle.wait()

    async def Session(  # type: ignore[override]  # grpc.aio also takes a coroutine that reads and writes its context
        self, request_iterator: AsyncIterator[pb.ClientFrame], context: Context
    ) -> None:
        session = await self._admit(context)
        tasks = [
            asyncio.create_task(self._read(session, context)),
            asyncio.create_task(self._write(session, context)),
        ]
        closed = asyncio.create_task(session.wait_closed())
        reason = "the stream was cancelled"
        try:
            done, _ = await asyncio.wait([*tasks, closed], return_when=asyncio.FIRST_COMPLETED)
            reason = session.close_reason or _reason(done.pop())
        finally:
            lost = session.take_lost(reason)
            if self.sessions.get(session.peer.worker_id) is session:
                del self.sessions[session.peer.worker_id]
            log.info("session of %s ended, %d requests end: %s", session.peer.worker_id, len(lost), reason)
            self._handler.session_lost(session, lost)
            for task in [*tasks, closed]:
                task.cancel()
            try:
                await asyncio.gather(*tasks, closed, return_exceptions=True)
            finally:  # gRPC may cancel this handler more than once
                if not self.sessions:
                    self._idle.set()

    async def _admit(self, context: Context) -> ServerSession:
        """Exchange hellos; refuse a stale incarnation; a newer session of the same peer replaces the older."""
        try:
            async with asyncio.timeout(LOST_AFTER_S):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello frame came")
        if not isinstance(first, pb.ClientFrame) or not first.hello.worker_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame carries `hello` with a worker_id")
        peer = first.hello
        older = self.sessions.get(peer.worker_id)
        if older is not None and older.peer.incarnation > peer.incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {peer.incarnation} of {peer.worker_id} is stale, {older.peer.incarnation} is known",
            )
        if older is None and len(self.sessions) >= MAX_SESSIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open")
        if older is not None:
            older.close(f"replaced by a newer session of {peer.worker_id}")
        session = ServerSession(peer, Pulse(), self._max_pending_outputs)
        self.sessions[peer.worker_id] = session
        self._idle.clear()
        for request in first.open:
            self._open_request(session, request)
        return session

    async def _read(self, session: ServerSession, context: Context) -> None:
        """Give opens and aborts to the handler; ends with the stream."""
        while isinstance(frame := await context.read(), pb.ClientFrame):
            session.pulse.heard()
            for request in frame.open:
                self._open_request(session, request)
            for abort in frame.abort:
                if session.aborted(abort.request_id):
                    self._handler.abort(session, abort.request_id, abort.reason)

    def _open_request(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        if not session.alive:
            return
        if session.opened(request.request_id):
            self._handler.open(session, request)
        else:  # an answer would end the first one of that id, silence would leave the second one open
            session.close(f"protocol violation: request id {request.request_id!r} is open already")

    async def _write(self, session: ServerSession, context: Context) -> None:
        """Write what waits, and a heartbeat when it is due. Raises TimeoutError when the peer does not read."""
        frame = pb.ServerFrame(hello=self.identity)
        is_due = True
        while True:
            frame.draining = self.draining
            if is_due and self._load is not None:
                frame.load.CopyFrom(self._load())
            async with asyncio.timeout(LOST_AFTER_S):
                await context.write(frame)
            if session.pending:
                session.pulse.ring()
            else:
                session.written.set()
            is_due = await session.pulse.beat()
            frame = pb.ServerFrame(outputs=session.take_outputs())


def _reason(task: asyncio.Task[None]) -> str:
    """Why the first of a session's tasks ended."""
    if task.cancelled():
        return "the stream was cancelled"
    error = task.exception()
    if isinstance(error, TimeoutError):
        return "the peer does not read"
    if isinstance(error, PeerSilent | grpc.RpcError | grpc.aio.BaseError | asyncio.InvalidStateError):
        return str(error) or type(error).__name__
    if error is not None:
        raise error
    return "the peer ended the stream"
