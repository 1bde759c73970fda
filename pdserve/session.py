"""Client side of a session: one bidirectional stream to one address carries all requests of this process to it.

The gateway holds one per router, a router holds one per worker. A session reconnects by itself until it is closed.

    task     run: connect -> hello <-> hello -> { read, write } -> lost -> backoff -> connect ...
    queues   opens and aborts wait for the writer (all of one loop tick leave in one frame)
             each request has a bounded buffer of outputs; the reader never waits for whoever takes them

A request ends exactly once here: with the peer's terminal output, or with one made here (session lost, buffer
overflow, abort). What the peer says about it afterwards is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import grpc

from pdserve import terminal
from pdserve.channel import open_channel
from pdserve.pulse import LOST_AFTER_S, Pulse
from pdserve.tls import Tls
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc, kv_pb2

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[pb.ClientFrame, pb.ServerFrame]

MAX_OPEN_REQUESTS = 16_384
MAX_FRAME_BYTES = 8 * 2**20  # of requests in one frame; a single larger request still goes, alone
DEFAULT_BUFFERED_OUTPUTS = 1024
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
CLOSED = "closed here"

log = logging.getLogger(__name__)


class OutputBuffer:
    """Outputs received and not yet taken, bounded. Several handles may share one: the taker sees who it was.

    One task takes. A terminal output always fits, so a buffer holds at most ``limit`` plus one for each handle.
    """

    __slots__ = ("_items", "_limit", "_waiter")

    def __init__(self, limit: int = DEFAULT_BUFFERED_OUTPUTS) -> None:
        self._limit = limit
        self._items: deque[tuple[Handle, pb.Output]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, handle: Handle, output: pb.Output) -> bool:
        """False when it is full; the output is then not kept."""
        if len(self._items) >= self._limit and not output.HasField("finish"):
            return False
        self._items.append((handle, output))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    async def get(self) -> tuple[Handle, pb.Output]:
        """The oldest output, and the handle that it belongs to. Waits for ever: the caller bounds it."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class Handle:
    """One request on a session. Iterate it for its outputs (the last one has ``finish``), or read its shared buffer."""

    __slots__ = ("_buffer", "_session", "_taken_all", "finish", "request_id")

    def __init__(self, session: Session, request_id: str, buffer: OutputBuffer) -> None:
        self.request_id = request_id
        self.finish: pb.Finish | None = None
        """Set once the terminal output was received (or made); it may still wait in the buffer."""
        self._session = session
        self._buffer = buffer
        self._taken_all = False

    def abort(self, reason: str) -> None:
        """End the request here and on the peer. No effect on one that has ended."""
        self._session.abort(self, reason)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.Output:
        if self._taken_all:
            raise StopAsyncIteration
        _, output = await self._buffer.get()
        self._taken_all = output.HasField("finish")
        return output

    def deliver(self, output: pb.Output) -> bool:
        """Called by the session. False when the buffer is full."""
        if output.HasField("finish"):
            self.finish = output.finish
        return self._buffer.put(self, output)


class Session:
    """All requests of this process to one address. Made by :meth:`start` or :meth:`connect`, ended by :meth:`close`."""

    def __init__(
        self,
        address: str,
        identity: kv_pb2.WorkerIdentity,
        on_change: Callable[[Session], None] | None = None,
        on_load: Callable[[pb.Load], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self.peer: kv_pb2.WorkerIdentity | None = None
        """Who answered last; kept while the session is down."""
        self.load = pb.Load()
        self.draining = False
        self.alive = False
        self.unknown_outputs_total = 0
        """Outputs about requests that had ended here."""
        self.connects_total = 0
        self._identity = identity
        self._on_change = on_change
        self._on_load = on_load
        self._tls = tls
        self._open: dict[str, Handle] = {}
        self._opens: deque[pb.GenerateRequest] = deque()
        self._aborts: deque[pb.Abort] = deque()
        self._pulse: Pulse | None = None
        self._alive_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def start(
        cls,
        address: str,
        identity: kv_pb2.WorkerIdentity,
        on_change: Callable[[Session], None] | None = None,
        on_load: Callable[[pb.Load], None] | None = None,
        tls: Tls | None = None,
    ) -> Session:
        """A session that connects in the background and keeps trying; ``on_change`` hears of alive, lost, draining,
        ``on_load`` of each report."""
        session = cls(address, identity, on_change, on_load, tls)
        session._task = asyncio.create_task(session._run(), name=f"session {address}")
        return session

    @classmethod
    async def connect(
        cls,
        address: str,
        identity: kv_pb2.WorkerIdentity,
        *,
        timeout_s: float = 5.0,
        on_change: Callable[[Session], None] | None = None,
        tls: Tls | None = None,
    ) -> Session:
        """A session that is alive. Raises ConnectionError when nobody answered in time."""
        session = cls.start(address, identity, on_change, tls=tls)
        try:
            if await session.wait_alive(timeout_s):
                return session
        except asyncio.CancelledError:
            await session.close()
            raise
        await session.close()
        raise ConnectionError(f"nobody answers at {address} ({timeout_s:g} s); is it started, is the address right?")

    async def wait_alive(self, timeout_s: float) -> bool:
        """Wait until the session is alive; False when it is not by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._alive_event.wait()
        except TimeoutError:
            return False
        return True

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def open(
        self,
        request: pb.GenerateRequest,
        *,
        max_buffered_outputs: int = DEFAULT_BUFFERED_OUTPUTS,
        buffer: OutputBuffer | None = None,
    ) -> Handle:
        """Start a request; ``request`` belongs to the session from now on. Never waits and never fails by an exception:
        on a lost or full session the handle has ended already. Raises ValueError for an id that is open."""
        request_id = request.request_id
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is open on this session; ids are unique")
        handle = Handle(self, request_id, buffer or OutputBuffer(max_buffered_outputs))
        if not self.alive:
            handle.deliver(_lost(request_id, f"no session to {self.address}"))
        elif len(self._open) >= MAX_OPEN_REQUESTS:
            message = f"{MAX_OPEN_REQUESTS} requests are open on the session to {self.address}"
            handle.deliver(
                terminal.failed(request_id, pb.ERROR_CODE_OVERLOADED, message, retryable=True, retry_after_s=1.0)
            )
        else:
            self._open[request_id] = handle
            self._opens.append(request)
            self._ring()
        return handle

    def abort(self, handle: Handle, reason: str) -> None:
        """End an open request with FINISH_REASON_ABORT and tell the peer. No effect on one that has ended."""
        self._end_here(handle, terminal.aborted(handle.request_id, reason), reason)

    async def close(self) -> None:
        """Cancel the stream (the peer ends the requests) and end what is open here."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _end_here(self, handle: Handle, output: pb.Output, reason: str) -> None:
        if self._open.get(handle.request_id) is handle:
            del self._open[handle.request_id]
            self._aborts.append(pb.Abort(request_id=handle.request_id, reason=reason))
            self._ring()
            handle.deliver(output)

    def _ring(self) -> None:
        if self._pulse is not None:
            self._pulse.ring()

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        try:
            while not _is_cancelled():
                connects = self.connects_total
                self._set_lost(await self._run_once())
                if self.connects_total > connects:
                    backoff_s = FIRST_BACKOFF_S
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            self._set_lost(CLOSED)

    async def _run_once(self) -> str:
        """One connection, from the first hello to its loss; returns why it was lost."""
        try:
            channel = open_channel(self.address, self._tls)
        except OSError as error:  # the certificate is just being replaced: the next try reads it again
            log.warning("no session to %s: its certificate cannot be read: %s", self.address, error)
            return str(error)
        call: Call | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            stub: inference_pb2_grpc.GenerationAsyncStub = inference_pb2_grpc.GenerationStub(channel)
            call = stub.Session()  # type: ignore[call-arg]  # the stubs know request iterators only
            async with asyncio.timeout(LOST_AFTER_S):
                await call.write(pb.ClientFrame(hello=self._identity))
                first = await call.read()
            if _is_cancelled():  # or it would be waited for as long as the peer lives
                raise asyncio.CancelledError
            if not isinstance(first, pb.ServerFrame):
                return await _status(call)
            pulse = Pulse()
            self._set_alive(first, pulse)
            tasks = [asyncio.create_task(self._read(call, pulse)), asyncio.create_task(self._write(call, pulse))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # Not raised here: a frame that an error of its own task has been through is part of a cycle, which
                # would keep the call, and with it the connection, until garbage is collected.
                if not task.cancelled() and (failure := task.exception()) is not None:
                    return _cause(failure)
            return await _status(call)  # a failed write cancels the call, and with it the read
        except (TimeoutError, grpc.aio.AioRpcError, ConnectionError, asyncio.InvalidStateError) as error:
            return _cause(error)
        finally:
            for task in tasks:
                task.cancel()
            if call is not None:
                call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close(None)

    async def _read(self, call: Call, pulse: Pulse) -> None:
        """Hand each output to its request's buffer; ends at the end of the stream."""
        while isinstance(frame := await call.read(), pb.ServerFrame):
            pulse.heard()
            for output in frame.outputs:
                self._dispatch(output)
            if frame.HasField("load"):
                self._set_load(frame.load)
            if frame.draining != self.draining:
                self.draining = frame.draining
                self._notify()

    def _dispatch(self, output: pb.Output) -> None:
        request_id = output.request_id
        handle = self._open.get(request_id)
        if handle is None:
            self.unknown_outputs_total += 1
        elif not handle.deliver(output):
            message = "the consumer did not take its outputs in time"
            overflow = terminal.failed(request_id, pb.ERROR_CODE_SLOW_CONSUMER, message)
            self._end_here(handle, overflow, "slow_consumer")
        elif handle.finish is not None:
            del self._open[request_id]

    async def _write(self, call: Call, pulse: Pulse) -> None:
        """Write what waits, and a heartbeat when it is due. Raises TimeoutError when the peer does not read."""
        while True:
            await pulse.beat()
            async with asyncio.timeout(LOST_AFTER_S):
                await call.write(self._take_frame())
            if self._opens:
                pulse.ring()

    def _take_frame(self) -> pb.ClientFrame:
        frame = pb.ClientFrame()
        frame_bytes = 0
        while self._opens:
            request_bytes = self._opens[0].ByteSize()
            if frame_bytes and frame_bytes + request_bytes > MAX_FRAME_BYTES:
                return frame  # aborts wait: one of them may be for a request that still waits here
            frame.open.append(self._opens.popleft())
            frame_bytes += request_bytes
        frame.abort.extend(self._aborts)
        self._aborts.clear()
        return frame

    def _set_alive(self, first: pb.ServerFrame, pulse: Pulse) -> None:
        self.peer, self.draining = first.hello, first.draining
        self._set_load(first.load)
        self._pulse = pulse
        self.connects_total += 1
        self.alive = True
        self._alive_event.set()
        log.info("session to %s (%s) is up", self.address, self.peer.worker_id)
        self._notify()

    def _set_lost(self, cause: str) -> None:
        """End everything that is open. What the writer had not sent is gone with it."""
        if not self.alive:
            return
        self.alive = False
        self._alive_event.clear()
        self._pulse = None
        self._opens.clear()
        self._aborts.clear()
        lost, self._open = self._open, {}
        level = logging.INFO if cause == CLOSED else logging.WARNING
        log.log(level, "session to %s is lost, %d requests end: %s", self.address, len(lost), cause)
        for request_id, handle in lost.items():
            handle.deliver(_lost(request_id, f"session to {self.address} lost: {cause}"))
        self._notify()

    def _set_load(self, load: pb.Load) -> None:
        self.load = load
        if self._on_load is not None:
            self._on_load(load)

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


def _lost(request_id: str, message: str) -> pb.Output:
    return terminal.failed(request_id, pb.ERROR_CODE_WORKER_LOST, message, retryable=True)


def _cause(error: BaseException) -> str:
    """Why a connection was lost. Raises what does not mean that."""
    match error:
        case TimeoutError():
            return "the peer does not read or does not answer"
        case grpc.aio.AioRpcError():
            return error.details() or str(error.code())
        case ConnectionError():
            return str(error)
        case asyncio.InvalidStateError():  # grpc.aio's word for a call that has ended
            return "the stream has ended"
    raise error


def _is_cancelled() -> bool:
    """grpc.aio swallows a cancellation at some of its waits; that it was asked for remains."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _status(call: Call) -> str:
    return f"the peer ended the session: {await call.details() or await call.code()}"
