"""Segments over TCP: the backend that always works.

    sender:   one thread per channel                        receiver:  one accepting thread, one thread per connection
      engine -> queue -> [thread] == socket ==========================> [thread] -> staging slot -> arrivals -> engine

On the wire: the handshake (handshake.py), then segments: header length, payload length, digest, header, payload.

Sockets stay in blocking mode with kernel timeouts, so that a segment is one system call and the thread asks for the
interpreter lock once, not once per packet. Socket buffers are the kernel's: an explicit size would stop its tuning.
"""

from __future__ import annotations

import contextlib
import socket
import time
from contextlib import AbstractContextManager

from kv_transfer.backends.base import Memory, OnLost, Wakeup
from kv_transfer.backends.network_receiver import NetworkReceiver
from kv_transfer.backends.socket_channel import PREFIX, SocketChannel, SocketSettings
from kv_transfer.backends.sockets import ConnectionLost, receive_into, send_pieces
from kv_transfer.staging import StagingArena
from pdserve.v1 import kv_pb2


class TcpBackend:
    """Registered as ``tcp``."""

    sender_memory: Memory = "host"
    receiver_memory: Memory | None = "host"

    def __init__(self, settings: SocketSettings | None = None) -> None:
        self._settings = settings or SocketSettings()

    def sender(self, arena: StagingArena) -> TcpSender:
        return TcpSender(arena, self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: StagingArena, wakeup: Wakeup
    ) -> NetworkReceiver:
        return NetworkReceiver(me, layout, arena, wakeup, self._settings, _payloads)


class TcpSender:
    probe = ""

    def __init__(self, arena: StagingArena, settings: SocketSettings) -> None:
        self.arena = arena
        self._settings = settings

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> TcpChannel:
        return TcpChannel(endpoint, hello, on_lost, self._settings)

    def close(self) -> None:
        """Nothing beside the channels."""


class TcpChannel(SocketChannel):
    def _carry(self, connected: socket.socket) -> None:
        while not self._closing:
            item = self._next()
            if item is None:
                self._idle(connected)
                continue
            segment, on_done = item
            deadline_s = time.monotonic() + self._settings.segment_timeout_s
            prefix = PREFIX.pack(len(segment.header), len(segment.payload), segment.digest)
            try:
                send_pieces(connected, [prefix, segment.header, segment.payload], deadline_s)
            except (OSError, ConnectionLost) as error:
                on_done(self._why_lost(error))
                raise
            on_done(None)


class TcpPayloads:
    """One after the other, on the connection of the headers."""

    window = 1

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self._next: tuple[memoryview, float] | None = None

    def begin(self, view: memoryview, deadline_s: float) -> None:
        self._next = (view, deadline_s)

    def finish(self) -> None:
        assert self._next is not None
        receive_into(self._connected, *self._next)
        self._next = None

    def give_up(self) -> list[bool]:
        return [] if self._next is None else [False]


def _payloads(connected: socket.socket) -> AbstractContextManager[TcpPayloads]:
    return contextlib.nullcontext(TcpPayloads(connected))
