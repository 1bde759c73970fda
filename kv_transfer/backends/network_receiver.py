"""The receiver's side of the network backends: headers come over a TCP connection, payloads as the backend says.

    [kv-receive]  prefix, header --> a staging slot --> the backend's reader fills it --> arrivals

A slot into which something may still write is never used again. With the last of them the engine ends, to be started
anew: without any it would let all senders wait, and say nothing. Lengths are checked before memory is taken for them.
Used by tcp (the payload follows on the same connection) and ucx.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from kv_transfer.backends.base import Arrived, ChannelLost, Origin, Wakeup
from kv_transfer.backends.socket_channel import PREFIX, SocketSettings
from kv_transfer.backends.socket_server import SocketServer
from kv_transfer.backends.sockets import ConnectionLost, join_endpoint, receive
from kv_transfer.segment import MAX_HEADER_BYTES, MalformedSegment, parse_header
from kv_transfer.staging import SlotPool
from pdserve.v1 import kv_pb2


class StillWritten(ConnectionLost):
    """Something may still write into the slot: it is never used again."""


FillView = Callable[[memoryview, float], None]
"""Fill the view before the deadline (time.monotonic), or raise ConnectionLost: then nothing writes to it any more,
unless it is StillWritten."""

OpenPayloads = Callable[[socket.socket], AbstractContextManager[FillView]]
"""For one welcome connection."""


def receive_header(
    connected: socket.socket, first: bytes, deadline_s: float, max_bytes: int
) -> tuple[bytes, kv_pb2.SegmentHeader, bytes]:
    """The announcement of a segment, the ``first`` byte of which has come: header, the same parsed, digest.

    Raises:
        MalformedSegment: no header, or a payload of more than ``max_bytes``.
    """
    prefix = first + receive(connected, PREFIX.size - len(first), deadline_s)
    header_length, payload_length, digest = PREFIX.unpack(prefix)
    if header_length > MAX_HEADER_BYTES or payload_length > max_bytes:
        raise MalformedSegment(
            f"a segment of {header_length} + {payload_length} bytes; at most {MAX_HEADER_BYTES} + {max_bytes} are taken"
        )
    header_bytes = receive(connected, header_length, deadline_s)
    header = parse_header(header_bytes)
    if header.payload_bytes != payload_length:
        raise MalformedSegment(f"header says {header.payload_bytes} payload bytes, the wire {payload_length}")
    return header_bytes, header, digest


class NetworkReceiver:
    """Takes connections whose hello fits, and puts what they bring into staging."""

    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        arena: SlotPool,
        wakeup: Wakeup,
        settings: SocketSettings,
        open_payloads: OpenPayloads,
    ) -> None:
        self._arena = arena
        self.max_segment_bytes = arena.slot_bytes
        self._settings = settings
        self._open_payloads = open_payloads
        self._lost_slots: set[int] = set()
        """Into which something may still write: taken for as long as this process lives."""
        self._server = SocketServer(
            me,
            layout,
            wakeup,
            self._receive,
            max_connections=settings.max_connections,
            handshake_timeout_s=settings.handshake_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        self.drop_sender = self._server.drop_sender
        self.close = self._server.close

    def listen(self, host: str, advertised_host: str) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        asked = self._settings.port
        try:
            listener = socket.create_server((host, asked), family=family, backlog=128)
        except OSError as error:
            raise OSError(f"KV cannot come in at {host}:{asked}: {error.strerror}; use another --data-port") from error
        port = listener.getsockname()[1]
        self._server.start(listener)
        return join_endpoint(advertised_host, port)

    def poll(self) -> list[Arrived | ChannelLost]:
        """Raises RuntimeError when no slot is left, and none will ever be: only a new process has some."""
        if len(self._lost_slots) == self._arena.num_slots:
            raise RuntimeError(
                f"no staging is left to receive into: {len(self._lost_slots)} receives of senders that are lost could "
                "not be cancelled; if this engine ends so again, use another --transfer"
            )
        return self._server.poll()

    def unreachable(self, probe: str) -> str:
        """The sender connects to us; whether it can, only it will know."""
        return ""

    def _receive(self, connected: socket.socket, origin: Origin) -> None:
        with self._open_payloads(connected) as fill:
            while not self._server.closing:
                self._receive_segment(connected, origin, fill)

    def _receive_segment(self, connected: socket.socket, origin: Origin, fill: FillView) -> None:
        first = self._await_first(connected)
        deadline_s = time.monotonic() + self._settings.segment_timeout_s
        header_bytes, header, digest = receive_header(connected, first, deadline_s, self.max_segment_bytes)
        slot = self._server.take_slot(self._arena)
        try:
            fill(slot.view[: header.payload_bytes], deadline_s)
        except StillWritten:
            self._lost_slots.add(slot.index)
            raise
        except BaseException:
            slot.give_back()
            raise
        self._server.arrived(Arrived(origin, header_bytes, header, digest, slot))
        self._server.wakeup()

    def _await_first(self, connected: socket.socket) -> bytes:
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
            return first
