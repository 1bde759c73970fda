"""The sender's side of the network backends: a thread per channel that connects, greets, and carries what is queued.

    engine: send --> queue --> [kv-send] _carry (tcp, ucx) == connection ==> receiver

A backend says how a segment is carried; this says how a channel begins and ends. Used by tcp and ucx.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.backends.base import OnDone, OnLost
from kv_transfer.backends.handshake import greet
from kv_transfer.backends.sockets import (
    ConnectionLost,
    configure,
    set_kernel_timeouts,
    shutdown,
    split_endpoint,
)
from kv_transfer.segment import DIGEST_BYTES, SealedSegment
from pdserve.v1 import kv_pb2

PREFIX = struct.Struct(f"!IQ{DIGEST_BYTES}s")
"""Before the header of a segment: length of the header, length of the payload, digest."""


@dataclass(frozen=True, slots=True)
class SocketSettings:
    connect_timeout_s: float = 3.0
    handshake_timeout_s: float = 3.0
    stall_timeout_s: float = 5.0
    """No byte moves for so long in the middle of a segment: the channel is lost."""
    segment_timeout_s: float = 30.0
    """A segment as a whole, however it trickles."""
    max_connections: int = 256
    max_queued_segments: int = 256
    port: int = 0
    """Where a receiver listens; 0: at a free one."""


class SocketChannel:
    """Abstract: ``_carry``."""

    def __init__(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost, settings: SocketSettings) -> None:
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
        self.send_all([(segment, on_done)])

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        refused: list[tuple[OnDone, str]] = []
        with self._lock:
            for segment, on_done in segments:
                lost = self._lost
                if lost is None and len(self._queue) >= self._settings.max_queued_segments:
                    lost = f"{len(self._queue)} segments are queued for {self._endpoint} already"
                if lost is None:
                    self._queue.append((segment, on_done))
                else:
                    refused.append((on_done, lost))
            self._wake()
        for on_done, lost in refused:
            on_done(lost)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._wake()
            if self._socket is not None:
                shutdown(self._socket)
        self._thread.join(timeout=1.0)

    def _carry(self, connected: socket.socket) -> None:
        """On the channel's thread, after the handshake: send what is queued until closing, or raise."""
        raise NotImplementedError

    def _next(self) -> tuple[SealedSegment, OnDone] | None:
        """What to send now; None: nothing. Whoever takes a segment calls its ``on_done``."""
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _idle(self, connected: socket.socket) -> None:
        """Until there is something to send. The receiver never speaks after its welcome: readable means gone."""
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        for descriptor, _ in poller.poll(30_000):
            if descriptor == connected.fileno():
                raise ConnectionLost("closed by the receiver")
            self._wake_read.recv(4096)

    def _why_lost(self, error: Exception) -> str:
        return f"data channel to {self._endpoint} is lost: {error}"

    def _wake(self) -> None:
        """Under the lock, and not after the thread closed the pair."""
        if self._lost is None:
            with contextlib.suppress(BlockingIOError):  # full of wake-ups already
                self._wake_write.send(b"\0")

    def _run(self) -> None:
        reason = "closed"
        try:
            with self._connect() as connected:
                configure(connected, self._settings.handshake_timeout_s)
                greet(connected, self._hello, time.monotonic() + self._settings.handshake_timeout_s)
                set_kernel_timeouts(connected, self._settings.stall_timeout_s)
                self._carry(connected)
        except (OSError, ConnectionLost) as error:
            reason = self._why_lost(error)
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
