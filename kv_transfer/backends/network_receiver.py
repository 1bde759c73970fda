"""The receiver's side of the network backends: headers come over a TCP connection, payloads as the backend says.

    [kv-receive]  prefix, header --> a staging slot --> coming: the backend fills it, a few at once --> arrivals

A slot into which something may still write is never used again. With the last of them the engine ends, to be started
anew: without any it would let all senders wait, and say nothing. Lengths are checked before memory is taken for them.
Used by tcp (the payload follows on the same connection) and ucx.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import structlog

from kv_transfer.backends.base import Arrived, ChannelLost, Origin, Wakeup
from kv_transfer.backends.socket_channel import PREFIX, SocketSettings
from kv_transfer.backends.socket_server import SocketServer
from kv_transfer.backends.sockets import ConnectionLost, join_endpoint, receive
from kv_transfer.segment import MAX_HEADER_BYTES, MalformedSegment, parse_header
from kv_transfer.staging import SlotPool
from pdserve.v1 import kv_pb2

log = structlog.get_logger()


class Payloads(Protocol):
    """What belongs to the headers of one connection, in their order. Used by one thread."""

    window: int
    """So many may be asked for at once."""

    def begin(self, view: Any, deadline_s: float) -> None:
        """Ask for the next one, to be written into this view before the deadline (time.monotonic)."""
        ...

    def finish(self) -> None:
        """Until the oldest that was asked for is there. Raises ConnectionLost when it will not be."""
        ...

    def give_up(self) -> list[bool]:
        """No more is wanted. Of each that was asked for and is not there: whether something may still write to it."""
        ...


OpenPayloads = Callable[[socket.socket], AbstractContextManager[Payloads]]
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
        coming: deque[Arrived] = deque()
        more = select.poll()
        more.register(connected, select.POLLIN | select.POLLRDHUP)
        with self._open_payloads(connected) as payloads:
            try:
                while not self._server.closing:
                    # Whoever hung up sends no more headers, but what is coming may still come.
                    has_more = [events for _, events in more.poll(0)] == [select.POLLIN]
                    if coming and (len(coming) == payloads.window or not has_more):
                        self._finish(payloads, coming)
                    else:
                        self._begin(connected, origin, payloads, coming)
            finally:
                self._give_up(payloads, coming)

    def _begin(self, connected: socket.socket, origin: Origin, payloads: Payloads, coming: deque[Arrived]) -> None:
        first = self._await_first(connected)
        deadline_s = time.monotonic() + self._settings.segment_timeout_s
        header_bytes, header, digest = receive_header(connected, first, deadline_s, self.max_segment_bytes)
        slot = self._arena.try_take()
        while slot is None and coming:  # else channels that wait here could hold all slots between them
            self._finish(payloads, coming)
            slot = self._arena.try_take()
        if slot is None:
            slot = self._server.take_slot(self._arena)
        try:
            payloads.begin(slot.view[: header.payload_bytes], deadline_s)
        except BaseException:
            slot.give_back()
            raise
        coming.append(Arrived(origin, header_bytes, header, digest, slot))

    def _finish(self, payloads: Payloads, coming: deque[Arrived]) -> None:
        payloads.finish()
        self._server.arrived(coming.popleft())
        self._server.wakeup()

    def _give_up(self, payloads: Payloads, coming: deque[Arrived]) -> None:
        for arrived, still_written in zip(coming, payloads.give_up(), strict=True):
            if still_written:
                self._lost_slots.add(arrived.slot.index)
                log.warning("kv_slot_lost", sender=arrived.origin.sender.worker_id, lost=len(self._lost_slots))
            else:
                arrived.slot.give_back()

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
