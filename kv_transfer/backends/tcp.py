"""Segments over TCP: the backend that always works.

    sender:   one thread per channel                        receiver:  one accepting thread, one thread per connection
      engine -> queue -> [thread] == socket ==========================> [thread] -> staging slot -> arrivals -> engine

On the wire: magic and version, then a hello and a welcome (each a length and a protobuf message); then segments: header
length, payload length, digest, header, payload. Lengths are checked before memory is taken for them.

Sockets stay in blocking mode with kernel timeouts, so that a segment is one system call and the thread asks for the
interpreter lock once, not once per packet. Socket buffers are the kernel's: an explicit size would stop its tuning.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kv_transfer.backends.base import Arrived, ChannelLost, OnDone, OnLost, Wakeup
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
from kv_transfer.layout import WIRE_VERSION, mismatch
from kv_transfer.segment import DIGEST_BYTES, MAX_HEADER_BYTES, MalformedSegment, SealedSegment, parse_header
from kv_transfer.staging import StagingArena, StagingSlot
from pdserve.v1 import kv_pb2

MAGIC = b"pdserve-kv"
GREETING = struct.Struct(f"!{len(MAGIC)}sHI")
"""Magic, wire version, length of the DataHello that follows."""
WELCOME = struct.Struct("!I")
PREFIX = struct.Struct(f"!IQ{DIGEST_BYTES}s")
MAX_HELLO_BYTES = 4096


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

    def sender(self) -> TcpSender:
        return TcpSender(self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: StagingArena, wakeup: Wakeup
    ) -> TcpReceiver:
        return TcpReceiver(me, layout, arena, wakeup, self._settings)


# ---- sender


class TcpSender:
    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> TcpChannel:
        return TcpChannel(endpoint, hello, on_lost, self._settings)


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
        hello = self._hello.SerializeToString()
        deadline_s = time.monotonic() + self._settings.handshake_timeout_s
        send_pieces(connected, [GREETING.pack(MAGIC, WIRE_VERSION, len(hello)), hello], deadline_s)
        (length,) = WELCOME.unpack(receive(connected, WELCOME.size, deadline_s))
        if length > MAX_HELLO_BYTES:
            raise ConnectionLost(f"{self._endpoint} does not answer as a pdserve KV endpoint")
        try:
            welcome = kv_pb2.DataWelcome.FromString(receive(connected, length, deadline_s))
        except DecodeError as error:
            raise ConnectionLost(f"the welcome cannot be read: {error}") from error
        if welcome.refusal:
            raise ConnectionLost(f"refused: {welcome.refusal}")
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
        self._me = me
        self._layout = layout
        self._arena = arena
        self._wakeup = wakeup
        self._settings = settings
        self._arrivals: queue.SimpleQueue[Arrived | ChannelLost] = queue.SimpleQueue()  # bounded by the arena
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, tuple[socket.socket, kv_pb2.WorkerIdentity | None]] = {}
        self._closing = False
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def listen(self, host: str, advertised_host: str) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="kv-accept", daemon=True)
        self._acceptor.start()
        return join_endpoint(advertised_host, listener.getsockname()[1])

    def poll(self) -> list[Arrived | ChannelLost]:
        arrivals: list[Arrived | ChannelLost] = []
        while not self._arrivals.empty():
            arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def drop_sender(self, worker_id: str, incarnation: int) -> None:
        with self._lock:
            for connected, sender in self._connections.values():
                if sender is not None and (sender.worker_id, sender.incarnation) == (worker_id, incarnation):
                    shutdown(connected)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        if self._listener is not None:
            shutdown(self._listener)
            self._listener.close()
        with self._lock:
            threads = list(self._connections)
            for connected, _ in self._connections.values():
                shutdown(connected)
        deadline_s = time.monotonic() + 1.0
        for thread in [self._acceptor, *threads]:
            if thread is not None:
                thread.join(timeout=max(0.0, deadline_s - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of file descriptors, or a client that left at once: neither ends the listener
                continue
            thread = threading.Thread(target=self._serve, args=(connected,), name="kv-receive", daemon=True)
            with self._lock:
                taken = not self._closing and len(self._connections) < self._settings.max_connections
                if taken:
                    self._connections[thread] = (connected, None)
            if taken:
                thread.start()
            else:
                connected.close()

    def _serve(self, connected: socket.socket) -> None:
        sender: kv_pb2.WorkerIdentity | None = None
        reason = "closed"
        try:
            configure(connected, self._settings.handshake_timeout_s)
            sender = self._welcome(connected)
            with self._lock:
                self._connections[threading.current_thread()] = (connected, sender)
            set_kernel_timeouts(connected, self._settings.stall_timeout_s)
            while not self._closing:
                self._receive_segment(connected, sender)
        except (OSError, ConnectionLost, MalformedSegment) as error:
            reason = str(error)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
            connected.close()
            if sender is not None and not self._closing:
                self._arrivals.put(ChannelLost(sender, f"data channel from {sender.worker_id} is lost: {reason}"))
                self._wakeup()

    def _welcome(self, connected: socket.socket) -> kv_pb2.WorkerIdentity:
        deadline_s = time.monotonic() + self._settings.handshake_timeout_s
        magic, version, length = GREETING.unpack(receive(connected, GREETING.size, deadline_s))
        if magic != MAGIC or length > MAX_HELLO_BYTES:
            raise ConnectionLost("not a pdserve KV sender")
        try:
            hello = kv_pb2.DataHello.FromString(receive(connected, length, deadline_s))
        except DecodeError as error:
            raise ConnectionLost(f"the hello cannot be read: {error}") from error
        refusal = self._refusal(version, hello)
        welcome = kv_pb2.DataWelcome(receiver=self._me, refusal=refusal).SerializeToString()
        send_pieces(connected, [WELCOME.pack(len(welcome)), welcome], deadline_s)
        if refusal:
            raise ConnectionLost(refusal)
        return hello.sender

    def _refusal(self, version: int, hello: kv_pb2.DataHello) -> str:
        if version != WIRE_VERSION:
            return f"wire version: ours {WIRE_VERSION}, theirs {version}"
        if hello.receiver_incarnation != self._me.incarnation:
            return f"incarnation: ours {self._me.incarnation}, asked for {hello.receiver_incarnation}"
        return mismatch(self._layout, hello.layout) or ""

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
        slot = self._take_slot()
        try:
            receive_into(connected, slot.view[:payload_length], deadline_s)
        except BaseException:
            self._arena.give_back(slot)
            raise
        self._arrivals.put(Arrived(sender, header_bytes, header, digest, slot))
        self._wakeup()

    def _await_prefix(self, connected: socket.socket) -> bytes:
        """Between segments a sender may be silent for as long as its control stream lives."""
        while True:
            try:
                first = connected.recv(1)
            except BlockingIOError:
                if self._closing:
                    raise ConnectionLost("closed") from None
                continue
            if not first:
                raise ConnectionLost("closed by the sender")
            return first + receive(connected, PREFIX.size - 1, time.monotonic() + self._settings.segment_timeout_s)

    def _take_slot(self) -> StagingSlot:
        """Waiting here is the back-pressure: the socket fills up, then the sender's staging. The engine frees slots."""
        while not self._closing:
            slot = self._arena.take(timeout_s=1.0)
            if slot is not None:
                return slot
        raise ConnectionLost("closed")
