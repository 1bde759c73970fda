"""The prefill worker's control streams: one to each decode worker that its engine talks to, opened on demand.

A stream that is lost is told to the engine and forgotten; the next frame for that peer opens a new one. There is no
silent reconnecting: the engines' transfers do not survive the loss of a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from engine.messages import PeerAlive, PeerFrame, PeerLost
from pdserve.channel import open_channel
from pdserve.pulse import LOST_AFTER_S
from pdserve.tls import Tls
from pdserve.v1 import kv_pb2, worker_pb2, worker_pb2_grpc
from worker.handoff_stream import HandoffStream, StreamLost, describe, read_hello
from worker.peer import Peer, decode_peer

MAX_STREAMS = 1024

log = logging.getLogger(__name__)

ToEngineSender = Callable[[PeerFrame | PeerAlive | PeerLost], object]


class HandoffClient:
    def __init__(self, to_engine: ToEngineSender, tls: Tls | None = None) -> None:
        self.identity = kv_pb2.WorkerIdentity()
        """Of the engine's current incarnation; set before the first frame."""
        self._to_engine = to_engine
        self._tls = tls
        self._streams: dict[str, tuple[HandoffStream, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, frame: PeerFrame) -> None:
        """A frame of our engine. Never waits."""
        if frame.peer not in self._streams:
            if len(self._streams) >= MAX_STREAMS:
                self._to_engine(PeerLost(frame.peer, f"{MAX_STREAMS} hand-off streams are open"))
                return
            stream = HandoffStream(
                frame.peer,
                on_frame=lambda peer, payload: self._to_engine(PeerFrame(peer, payload)),
                on_alive=lambda peer: self._to_engine(PeerAlive(peer)),
            )
            task = asyncio.create_task(self._run(stream), name=f"hand-off to {frame.peer}")
            self._streams[frame.peer] = (stream, task)
        stream, task = self._streams[frame.peer]
        if not stream.send(frame.payload):
            task.cancel()

    def close_all(self) -> None:
        """End all streams; the peers see it at once."""
        for _, task in self._streams.values():
            task.cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        self.close_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, stream: HandoffStream) -> None:
        peer = decode_peer(stream.peer)
        reason = "closed here"
        try:
            async with open_channel(peer.address, self._tls) as channel:
                reason = await self._carry(channel, peer, stream)
        except (OSError, grpc.RpcError) as error:  # lost, too late, or the certificate cannot be read now
            reason = describe(error)
        finally:
            del self._streams[stream.peer]
            log.info("hand-off stream to %s ended: %s", peer.worker_id, reason)
            self._to_engine(PeerLost(stream.peer, reason))

    async def _carry(self, channel: grpc.aio.Channel, peer: Peer, stream: HandoffStream) -> str:
        call = worker_pb2_grpc.KVHandoffStub(channel).Stream()  # type: ignore[call-arg]  # write() instead of an iterator
        try:
            async with asyncio.timeout(LOST_AFTER_S):
                await call.write(worker_pb2.HandoffFrames(hello=self.identity))
            hello = await read_hello(call)
            if (hello.worker_id, hello.incarnation) != (peer.worker_id, peer.incarnation):
                now = f"{hello.worker_id}/{hello.incarnation}"
                raise StreamLost(f"{peer.address} is {now} now, not {peer.worker_id}/{peer.incarnation}")
            return await stream.run(call)
        finally:
            call.cancel()
