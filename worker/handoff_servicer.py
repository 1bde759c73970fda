"""The decode worker's end of control streams: serves KVHandoff to prefill workers.

One stream per prefill worker: a newer one (it reconnected, or it is a new incarnation) ends the older, an older
incarnation is refused. Every stream has a new name, so that what the engine is told of an old one never touches a new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import grpc

from engine.messages import PeerAlive, PeerFrame, PeerLost
from pdserve.v1 import kv_pb2, worker_pb2, worker_pb2_grpc
from worker.handoff_stream import HandoffStream, StreamLost, read_hello

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    Context = grpc.aio.ServicerContext[worker_pb2.HandoffFrames, worker_pb2.HandoffFrames]

MAX_STREAMS = 1024

log = logging.getLogger(__name__)

ToEngineSender = Callable[[PeerFrame | PeerAlive | PeerLost], object]


class HandoffServicer(worker_pb2_grpc.KVHandoffServicer):
    def __init__(self, identity: kv_pb2.WorkerIdentity, to_engine: ToEngineSender) -> None:
        self.identity = identity
        """Of the engine's current incarnation."""
        self.not_ready: str | None = "the engine is starting"
        """Why no stream is taken now."""
        self._to_engine = to_engine
        self._streams: dict[str, HandoffStream] = {}
        self._tasks: dict[str, tuple[int, asyncio.Task[str]]] = {}
        """By worker id: incarnation, and the task that carries its stream."""
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, frame: PeerFrame) -> None:
        """A frame of our engine. Never waits; one for a stream that is gone is dropped (the engine is told of it)."""
        stream = self._streams.get(frame.peer)
        if stream is not None and not stream.send(frame.payload):
            for _, task in self._tasks.values():
                if task.get_name() == frame.peer:
                    task.cancel()

    def close_all(self) -> None:
        """End all streams: the engine they spoke to is gone."""
        for _, task in self._tasks.values():
            task.cancel()

    async def Stream(  # type: ignore[override]  # grpc.aio also takes a coroutine that reads and writes its context
        self, request_iterator: AsyncIterator[worker_pb2.HandoffFrames], context: Context
    ) -> None:
        sender = await self._admit(context)
        name = f"{next(self._numbers)} {sender.incarnation} {sender.worker_id}"
        stream = HandoffStream(
            name,
            on_frame=lambda peer, payload: self._to_engine(PeerFrame(peer, payload)),
            on_alive=lambda peer: self._to_engine(PeerAlive(peer)),
        )
        await context.write(worker_pb2.HandoffFrames(hello=self.identity))
        task = asyncio.create_task(stream.run(context), name=name)
        self._streams[name] = stream
        self._tasks[sender.worker_id] = (sender.incarnation, task)
        reason = "the stream was cancelled"
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                reason = task.result()
        finally:
            task.cancel()
            del self._streams[name]
            if self._tasks.get(sender.worker_id, (0, None))[1] is task:
                del self._tasks[sender.worker_id]
            log.info("hand-off stream of %s ended: %s", sender.worker_id, reason)
            self._to_engine(PeerLost(name, reason))

    async def _admit(self, context: Context) -> kv_pb2.WorkerIdentity:
        try:
            sender = await read_hello(context)
        except StreamLost as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self.not_ready is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.not_ready)
        known = self._tasks.get(sender.worker_id)
        if known is not None and known[0] > sender.incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {sender.incarnation} of {sender.worker_id} is stale, {known[0]} is known",
            )
        if known is None and len(self._tasks) >= MAX_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} hand-off streams are open")
        if known is not None:
            known[1].cancel()
        return sender
