"""One hand-off control stream, whichever side opened it: frames out, frames in, heartbeats, loss.

Owns the queue of outgoing frames (bounded) and the pulse. Used by handoff_client (prefill) and handoff_servicer
(decode); what the frames mean is the engines' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import grpc

from pdserve.pulse import LOST_AFTER_S, PeerSilent, Pulse
from pdserve.v1 import kv_pb2, worker_pb2

MAX_QUEUED_FRAMES = 65_536
MAX_FRAMES_IN_MESSAGE = 1024

log = logging.getLogger(__name__)


class StreamLost(ConnectionError):
    """The peer is gone, silent, or someone else than expected."""


class Wire(Protocol):
    """What grpc.aio's client call and server context have in common."""

    async def read(self) -> object: ...

    async def write(self, message: worker_pb2.HandoffFrames) -> None: ...


class HandoffStream:
    """Made when a stream is wanted; ``run`` when there is one."""

    def __init__(self, peer: str, on_frame: Callable[[str, bytes], object], on_alive: Callable[[str], object]) -> None:
        """``on_frame`` takes this stream's name and a serialized HandoffFrame; ``on_alive`` each sign of life."""
        self.peer = peer
        self._on_frame = on_frame
        self._on_alive = on_alive
        self._outgoing: deque[worker_pb2.HandoffFrame] = deque()
        self._pulse = Pulse()

    def send(self, payload: bytes) -> bool:
        """Queue a serialized HandoffFrame. False when the peer does not read: the stream must end."""
        if len(self._outgoing) >= MAX_QUEUED_FRAMES:
            return False
        self._outgoing.append(worker_pb2.HandoffFrame.FromString(payload))
        self._pulse.ring()
        return True

    async def run(self, wire: Wire) -> str:
        """Carry frames until the stream ends; returns why. Hellos have been exchanged."""
        tasks = [asyncio.create_task(self._read(wire)), asyncio.create_task(self._write(wire))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        ended = results[tasks.index(done.pop())]
        if isinstance(ended, TimeoutError):
            return "the peer does not read"
        if isinstance(ended, PeerSilent | grpc.RpcError | asyncio.InvalidStateError | asyncio.CancelledError):
            return describe(ended)
        if isinstance(ended, BaseException):
            raise ended
        return "the peer ended the stream"

    async def _read(self, wire: Wire) -> None:
        while isinstance(message := await wire.read(), worker_pb2.HandoffFrames):
            self._pulse.heard()
            self._on_alive(self.peer)
            for frame in message.frames:
                self._on_frame(self.peer, frame.SerializeToString())

    async def _write(self, wire: Wire) -> None:
        while True:
            is_due = await self._pulse.beat()
            while self._outgoing or is_due:
                count = min(len(self._outgoing), MAX_FRAMES_IN_MESSAGE)
                message = worker_pb2.HandoffFrames(frames=[self._outgoing.popleft() for _ in range(count)])
                is_due = False
                async with asyncio.timeout(LOST_AFTER_S):
                    await wire.write(message)


async def read_hello(wire: Wire) -> kv_pb2.WorkerIdentity:
    """The peer's first message.

    Raises:
        StreamLost: none came, or it has no hello.
    """
    try:
        async with asyncio.timeout(LOST_AFTER_S):
            first = await wire.read()
    except TimeoutError:
        raise StreamLost(f"no hello came within {LOST_AFTER_S:.0f} s") from None
    except grpc.RpcError as error:
        raise StreamLost(describe(error)) from error
    if not isinstance(first, worker_pb2.HandoffFrames) or not first.hello.worker_id:
        raise StreamLost("the first message has no hello")
    return first.hello


def describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
