"""Segments between GPUs through NCCL: a communicator of two ranks for each channel, and staging on both devices.

    sender's thread: prefix, header == TCP connection ==> receiver's thread: takes a slot
                     <== one byte: go ==================
                     payload ======== NCCL ============>  into the slot --> the engine unpacks it

A send starts after the receiver said go, so that no kernel spins on a device for want of a slot. A few segments are
announced ahead; those that were announced together are begun together, by one kernel on each side. The TCP connection
shows at once that the peer is gone; a stopped one is the deadlines' business. In either case the communicator is
aborted, which ends the messages under way, and only then are their slots free.

NCCL takes no two ranks on one GPU: there ``cuda_ipc`` serves.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice

import structlog

from kv_transfer.backends.base import Arrived, Memory, OnDone, OnLost, Origin, Wakeup
from kv_transfer.backends.handshake import check_welcome
from kv_transfer.backends.mapped import ANSWER, answer_offer
from kv_transfer.backends.network_receiver import receive_header
from kv_transfer.backends.socket_channel import PREFIX, SocketChannel, SocketSettings
from kv_transfer.backends.socket_server import SocketServer
from kv_transfer.backends.sockets import ConnectionLost, join_endpoint, receive, send_pieces
from kv_transfer.copies import CopyWaiter
from kv_transfer.cuda import CudaError, CudaRuntime, CudaStaging
from kv_transfer.nccl import ID_BYTES, Communicator, Nccl, NcclError, Still
from kv_transfer.segment import MAX_HEADER_BYTES, SealedSegment
from kv_transfer.staging import StagingSlot
from pdserve.v1 import kv_pb2

log = structlog.get_logger()

OFFER = struct.Struct(f"!{ID_BYTES}s64s")
"""The communicator's id, the sender's GPU."""
GO = b"g"
WINDOW = 16
"""Segments announced or on their way on one channel."""
MAX_GROUP = 8
GROUP_BYTES = 256 << 20
"""What is begun together ends together: no more once there is so much, or half of the receiver's slots, that one side
works while the other does."""
MEET_S = 20.0
"""To make a communicator: it loads and allocates on first use."""
TURN_MS = 500
FAILURES = (NcclError, CudaError, RuntimeError)
"""Of NCCL, of the device, of torch; or no thread can be started. The channel is lost, and says why."""


class NcclBackend:
    """Registered as ``nccl``."""

    sender_memory: Memory = "device"
    receiver_memory: Memory | None = "device"

    def __init__(self, device: str, settings: SocketSettings | None = None) -> None:
        self._settings = settings or SocketSettings()
        self._runtime = CudaRuntime(device)
        self._nccl = Nccl()

    def sender(self, arena: CudaStaging) -> NcclSender:
        return NcclSender(arena, self._nccl, self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: CudaStaging, wakeup: Wakeup
    ) -> NcclReceiver:
        return NcclReceiver(me, layout, arena, wakeup, self._nccl, self._settings)


def same_gpu(theirs: str, ours: str) -> str:
    if theirs != ours:
        return ""
    return f"both workers are on GPU {ours}, and NCCL takes no two ranks on one: use cuda_ipc"


class Peer:
    """Whether the other end of a channel is still worth waiting for."""

    def __init__(self, connected: socket.socket) -> None:
        self._poller = select.poll()
        self._poller.register(connected, select.POLLRDHUP)

    def still(self, until_s: float) -> Still:
        def check() -> None:
            if self._poller.poll(0):
                raise ConnectionLost("closed by the other end")
            if time.monotonic() > until_s:
                raise ConnectionLost("stalled: NCCL does not get through to the other GPU")

        return check


# ---- sender


class NcclSender:
    """Its probe is its GPU."""

    def __init__(self, arena: CudaStaging, nccl: Nccl, settings: SocketSettings) -> None:
        self.arena = arena
        self.probe = arena.runtime.uuid
        self._nccl = nccl
        self._settings = settings

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> NcclChannel:
        return NcclChannel(endpoint, hello, on_lost, self._settings, self._nccl, self.arena.runtime)

    def close(self) -> None:
        """Nothing beside the channels."""


class NcclChannel(SocketChannel):
    def __init__(
        self,
        endpoint: str,
        hello: kv_pb2.DataHello,
        on_lost: OnLost,
        settings: SocketSettings,
        nccl: Nccl,
        runtime: CudaRuntime,
    ) -> None:
        self._nccl = nccl
        self._runtime = runtime
        self._announced: deque[tuple[SealedSegment, OnDone]] = deque()
        self._num_moving = 0
        self._progress_s = 0.0
        """When something last moved, or the first of what waits was announced."""
        self._over: str | None = None
        """Why nothing is sent any more. Set before the communicator is aborted: what ends then was not sent."""
        super().__init__(endpoint, hello, on_lost, settings)

    def _carry(self, connected: socket.socket) -> None:
        peer = Peer(connected)
        communicator = self._meet(connected, peer)
        moves = CopyWaiter(lambda: None)
        try:
            try:
                while not self._closing:
                    self._turn(connected, peer, communicator, moves)
                self._over = "closed"
            except Exception as error:
                self._over = self._why_lost(error)
                raise
            finally:
                communicator.abort()
        except FAILURES as error:
            raise ConnectionLost(str(error)) from error
        finally:
            moves.close()  # what was moving is over now, and told
            for _, on_done in self._announced:
                on_done(self._over)
            self._announced.clear()

    def _meet(self, connected: socket.socket, peer: Peer) -> Communicator:
        deadline_s = time.monotonic() + MEET_S
        unique_id = self._nccl.new_id()
        send_pieces(connected, [OFFER.pack(unique_id, self._runtime.uuid.encode())], deadline_s)
        (length,) = ANSWER.unpack(receive(connected, ANSWER.size, deadline_s))
        check_welcome(receive(connected, min(length, MAX_HEADER_BYTES), deadline_s))
        try:
            return Communicator(self._nccl, self._runtime, unique_id, 0, peer.still(deadline_s))
        except FAILURES as error:
            raise ConnectionLost(str(error)) from error

    def _turn(self, connected: socket.socket, peer: Peer, communicator: Communicator, moves: CopyWaiter) -> None:
        self._announce(connected)
        if not self._announced and not self._num_moving:
            self._idle(connected)
            return
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        for descriptor, _ in poller.poll(TURN_MS):
            if descriptor == self._wake_read.fileno():
                self._wake_read.recv(4096)
                continue
            said = connected.recv(WINDOW)
            if not said:
                raise ConnectionLost("closed by the receiver")
            self._send(len(said), peer, communicator, moves)
        moves.check()
        if time.monotonic() - self._progress_s > self._settings.stall_timeout_s:
            raise ConnectionLost("stalled: the receiver takes nothing")

    def _announce(self, connected: socket.socket) -> None:
        pieces: list[bytes | memoryview] = []
        while len(self._announced) + self._num_moving < WINDOW and (item := self._next()) is not None:
            if not self._announced and not self._num_moving:
                self._progress_s = time.monotonic()
            self._announced.append(item)
            segment = item[0]
            pieces += [PREFIX.pack(len(segment.header), len(segment.payload), segment.digest), segment.header]
        if pieces:
            send_pieces(connected, pieces, time.monotonic() + self._settings.stall_timeout_s)

    def _send(self, count: int, peer: Peer, communicator: Communicator, moves: CopyWaiter) -> None:
        if count > len(self._announced):
            raise ConnectionLost("the receiver says go to nothing")
        views = [segment.payload for segment, _ in islice(self._announced, count)]
        move = communicator.send(views, peer.still(time.monotonic() + self._settings.stall_timeout_s))
        sent = [on_done for _, on_done in islice(self._announced, count)]
        with self._lock:
            self._num_moving += count

        def moved(_: list[int]) -> None:
            with self._lock:
                self._num_moving -= count
                self._progress_s = time.monotonic()
                self._wake()
            for on_done in sent:
                on_done(self._over)

        moves.when_done([move], moved)
        for _ in range(count):  # not before: had nobody been found to wait for it, they would be told of with the loss
            self._announced.popleft()


# ---- receiver


class NcclReceiver:
    """Receives into slots of its own, and tells when to send."""

    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        arena: CudaStaging,
        wakeup: Wakeup,
        nccl: Nccl,
        settings: SocketSettings,
    ) -> None:
        self.max_segment_bytes = arena.slot_bytes
        self._me = me
        self._arena = arena
        self._max_group = max(1, min(MAX_GROUP, arena.num_slots // 2))
        self._nccl = nccl
        self._settings = settings
        self._server = SocketServer(
            me,
            layout,
            wakeup,
            self._receive,
            max_connections=settings.max_connections,
            handshake_timeout_s=settings.handshake_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        self.poll = self._server.poll
        self.drop_sender = self._server.drop_sender
        self.close = self._server.close

    def listen(self, host: str, advertised_host: str) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        port = listener.getsockname()[1]
        self._server.start(listener)
        return join_endpoint(advertised_host, port)

    def unreachable(self, probe: str) -> str:
        return same_gpu(probe, self._arena.runtime.uuid) if probe else "the sender has no GPU"

    def _receive(self, connected: socket.socket, origin: Origin) -> None:
        peer = Peer(connected)
        with self._meet(connected, peer) as communicator, _Incoming(self._server) as incoming:
            log.info("nccl_pair", sender=origin.sender.worker_id, bytes=communicator.num_bytes)
            try:
                try:
                    while not self._server.closing:
                        self._turn(connected, origin, peer, communicator, incoming)
                finally:
                    incoming.is_lost = True
                    communicator.abort()
            except FAILURES as error:
                raise ConnectionLost(str(error)) from error

    @contextlib.contextmanager
    def _meet(self, connected: socket.socket, peer: Peer) -> Iterator[Communicator]:
        deadline_s = time.monotonic() + MEET_S
        unique_id, gpu = OFFER.unpack(receive(connected, OFFER.size, deadline_s))
        answer_offer(connected, self._me, same_gpu(gpu.rstrip(b"\0").decode(), self._arena.runtime.uuid))
        try:
            communicator = Communicator(self._nccl, self._arena.runtime, unique_id, 1, peer.still(deadline_s))
        except FAILURES as error:
            raise ConnectionLost(str(error)) from error
        try:
            yield communicator
        finally:
            communicator.abort()

    def _turn(
        self,
        connected: socket.socket,
        origin: Origin,
        peer: Peer,
        communicator: Communicator,
        incoming: _Incoming,
    ) -> None:
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        if not poller.poll(TURN_MS):
            incoming.check_progress(self._settings.stall_timeout_s)
            return
        slots: list[StagingSlot] = []
        begun: list[Arrived] = []
        try:
            announced = self._announcement(connected)
            slots.append(self._take_slot(incoming))
            begun.append(Arrived(origin, *announced, slots[-1]))
            while self._may_grow(begun) and poller.poll(0) and (slot := self._arena.try_take()) is not None:
                slots.append(slot)
                begun.append(Arrived(origin, *self._announcement(connected), slot))
            connected.sendall(GO * len(begun))  # first: the very first message needs both sides to begin
            still = peer.still(time.monotonic() + self._settings.stall_timeout_s)
            incoming.add(begun, communicator, still)
        except BaseException:
            incoming.is_lost = True
            communicator.abort()
            StagingSlot.give_all_back(slots)
            raise

    def _may_grow(self, group: list[Arrived]) -> bool:
        num_bytes = sum(arrived.header.payload_bytes for arrived in group)
        return len(group) < self._max_group and num_bytes < GROUP_BYTES

    def _announcement(self, connected: socket.socket) -> tuple[bytes, kv_pb2.SegmentHeader, bytes]:
        first = connected.recv(1)
        if not first:
            raise ConnectionLost("closed by the sender")
        deadline_s = time.monotonic() + self._settings.stall_timeout_s
        return receive_header(connected, first, deadline_s, self.max_segment_bytes)

    def _take_slot(self, incoming: _Incoming) -> StagingSlot:
        """While this channel waits for a slot it holds others, for messages that may never come: if all channels did
        that, no slot would ever get free."""
        while not self._server.closing:
            slot = self._arena.take(timeout_s=TURN_MS / 1000)
            if slot is not None:
                return slot
            incoming.check_progress(self._settings.stall_timeout_s)
        raise ConnectionLost("closed")


class _Incoming:
    """Messages that were said go to, until they are there."""

    def __init__(self, server: SocketServer) -> None:
        self.is_lost = False
        """Set before the communicator is aborted: what ends then is not whole."""
        self._server = server
        self._moves = CopyWaiter(lambda: None)
        self._since_s: deque[float] = deque()

    def __enter__(self) -> _Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self._moves.close()

    def add(self, begun: list[Arrived], communicator: Communicator, still: Still) -> None:
        move = communicator.receive([arrived.payload for arrived in begun], still)
        self._since_s.append(time.monotonic())

        def moved(_: list[int]) -> None:
            self._since_s.popleft()
            if self.is_lost:
                StagingSlot.give_all_back([arrived.slot for arrived in begun])
                return
            for arrived in begun:
                self._server.arrived(arrived)
            self._server.wakeup()

        self._moves.when_done([move], moved)

    def check_progress(self, stall_timeout_s: float) -> None:
        self._moves.check()
        since_s = min(self._since_s.copy(), default=None)  # a copy: messages end meanwhile, on another thread
        if since_s is not None and time.monotonic() - since_s > stall_timeout_s:
            raise ConnectionLost("stalled: a message did not arrive in time")
