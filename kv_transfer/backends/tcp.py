"""Segments over TCP: the backend that always works.

    sender:   one thread per channel                        receiver:  one accepting thread, one thread per connection
      engine -> queue -> [thread] == socket ==========================> [thread] -> staging slot -> arrivals -> engine

On the wire: the handshake (handshake.py), then segments: header length, payload length, digest, header, payload.
Lengths are checked before memory is taken for them.

Sockets stay in blocking mode with kernel timeouts, so that a segment is one system call and the thread asks for the
interpreter lock once, not once per packet. Socket buffers are the kernel's: an explicit size would stop its tuning.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

from kv_transfer.backends.base import Arrived, OnDone, OnLost, Wakeup
from kv_transfer.backends.handshake import greet
from kv_transfer.backends.socket_server import SocketServer
from kv_transfer.backends.sockets import (
    ConnectionLost,
    configure,
    join_endpoint,
    receive,
    receive_into,
    send_pieces,
    set_kernel_timeouts,
    shutdown,
    split_endpoint,
)
from kv_transfer.segment import DIGEST_BYTES, MAX_HEADER_BYTES, MalformedSegment, SealedSegment, parse_header
from kv_transfer.staging import StagingArena
from pdserve.v1 import kv_pb2

PREFIX = struct.Struct(f"!IQ{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class TcpSettings:
    connect_timeout_s: float = 3.0
    handshake_timeout_s: float = 3.0
    stall_timeout_s: float = 5.0
    """No byte moves for so long in the middle of a segment: the channel is lost."""
    segment_timeout_s: float = 30.0
    """A segment as a whole, however it trickles."""
    max_connections: int = 256
    max_queued_segments: int = 256


class TcpBackend:
    """Registered as ``tcp``."""

    def __init__(self, settings: TcpSettings | None = None) -> None:
        self._settings = settings or TcpSettings()

    def sender(self, arena: StagingArena) -> TcpSender:
        return TcpSender(self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: StagingArena, wakeup: Wakeup
    ) -> TcpReceiver:
        return TcpReceiver(me, layout, arena, wakeup, self._settings)


# ---- sender


class TcpSender:
    host_probe = ""

    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> TcpChannel:
        return TcpChannel(endpoint, hello, on_lost, self._settings)

    def close(self) -> None:
        """Nothing beside the channels."""


class TcpChannel:
    """Connects, then sends what is queued, in its own thread."""

    def __init__(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost, settings: TcpSettings) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._on_lost = on_lost
        self._settings = settings
        self._queue: deque[tuple[SealedSegment, OnDone]] = deque()
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._closing = False
        self._socket: socket.socket | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{endpoint}", daemon=True)
        self._thread.start()

    def send(self, segment: SealedSegment, on_done: OnDone) -> None:
        with self._lock:
            lost = self._lost
            if lost is None and len(self._queue) >= self._settings.max_queued_segments:
                lost = f"{len(self._queue)} segments are queued for {self._endpoint} already"
            if lost is None:
                self._queue.append((segment, on_done))
                self._wake()
        if lost is not None:
            on_done(lost)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._wake()
            if self._socket is not None:
                shutdown(self._socket)
        self._thread.join(timeout=1.0)

    def _wake(self) -> None:
        """Under the lock, and not after the thread closed the pair."""
        if self._lost is None:
            with contextlib.suppress(BlockingIOError):  # full of wake-ups already
                self._wake_write.send(b"\0")

    def _run(self) -> None:
        reason = "closed"
        try:
            with self._connect() as connected:
                self._greet(connected)
                self._send_all(connected)
        except (OSError, ConnectionLost) as error:
            reason = f"data channel to {self._endpoint} is lost: {error}"
        finally:
            self._end(reason)

    def _connect(self) -> socket.socket:
        host, port = split_endpoint(self._endpoint)
        connected = socket.create_connection((host, port), timeout=self._settings.connect_timeout_s)
        with self._lock:
            self._socket = connected
            if self._closing:
                connected.close()
                raise ConnectionLost("closed")
        return connected

    def _greet(self, connected: socket.socket) -> None:
        configure(connected, self._settings.handshake_timeout_s)
        greet(connected, self._hello, time.monotonic() + self._settings.handshake_timeout_s)
        set_kernel_timeouts(connected, self._settings.stall_timeout_s)

    def _send_all(self, connected: socket.socket) -> None:
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            with self._lock:
                if self._closing:
                    return
                item = self._queue.popleft() if self._queue else None
            if item is None:
                self._idle(poller, connected)
                continue
            segment, on_done = item
            deadline_s = time.monotonic() + self._settings.segment_timeout_s
            prefix = PREFIX.pack(len(segment.header), len(segment.payload), segment.digest)
            try:
                send_pieces(connected, [prefix, segment.header, segment.payload], deadline_s)
            except (OSError, ConnectionLost) as error:
                on_done(f"data channel to {self._endpoint} is lost: {error}")
                raise
            on_done(None)

    def _idle(self, poller: select.poll, connected: socket.socket) -> None:
        """Until there is something to send. The receiver never speaks after its welcome: readable means gone."""
        for descriptor, _ in poller.poll(30_000):
            if descriptor == connected.fileno():
                raise ConnectionLost("closed by the receiver")
            self._wake_read.recv(4096)

    def _end(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            unsent = list(self._queue)
            self._queue.clear()
            told = self._closing
            self._wake_read.close()
            self._wake_write.close()
        for _, on_done in unsent:
            on_done(reason)
        if not told:
            self._on_lost(reason)


# ---- receiver


class TcpReceiver:
    """Takes connections whose hello fits, and puts what they bring into staging."""

    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        arena: StagingArena,
        wakeup: Wakeup,
        settings: TcpSettings,
    ) -> None:
        self._arena = arena
        self._settings = settings
        self._server = SocketServer(
            me,
            layout,
            arena,
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

    def can_reach(self, host_probe: str) -> bool:
        """The sender connects to us; whether it can, only it will know."""
        return True

    def _receive(self, connected: socket.socket, sender: kv_pb2.WorkerIdentity) -> None:
        while not self._server.closing:
            self._receive_segment(connected, sender)

    def _receive_segment(self, connected: socket.socket, sender: kv_pb2.WorkerIdentity) -> None:
        prefix = self._await_prefix(connected)
        deadline_s = time.monotonic() + self._settings.segment_timeout_s
        header_length, payload_length, digest = PREFIX.unpack(prefix)
        if header_length > MAX_HEADER_BYTES or payload_length > self._arena.slot_bytes:
            raise MalformedSegment(
                f"a segment of {header_length} + {payload_length} bytes; "
                f"at most {MAX_HEADER_BYTES} + {self._arena.slot_bytes} are taken"
            )
        header_bytes = receive(connected, header_length, deadline_s)
        header = parse_header(header_bytes)
        if header.payload_bytes != payload_length:
            raise MalformedSegment(f"header says {header.payload_bytes} payload bytes, the wire {payload_length}")
        slot = self._server.take_slot()
        try:
            receive_into(connected, slot.view[:payload_length], deadline_s)
        except BaseException:
            self._arena.give_back(slot)
            raise
        self._server.arrived(Arrived(sender, header_bytes, header, digest, slot))
        self._server.wakeup()

    def _await_prefix(self, connected: socket.socket) -> bytes:
        """Between segments a sender may be silent for as long as its control stream lives."""
        while True:
            try:
                first = connected.recv(1)
            except BlockingIOError:
                if self._server.closing:
                    raise ConnectionLost("closed") from None
                continue
            if not first:
                raise ConnectionLost("closed by the sender")
            return first + receive(connected, PREFIX.size - 1, time.monotonic() + self._settings.segment_timeout_s)
