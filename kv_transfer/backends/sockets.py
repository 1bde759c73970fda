"""Blocking sockets with deadlines: whole messages out, whole messages in. Used by the tcp and shm backends."""

from __future__ import annotations

import contextlib
import socket
import struct
import time


class ConnectionLost(Exception):
    """The other end is gone, stalled, or speaks something else; the message says which."""


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def configure(connected: socket.socket, timeout_s: float) -> None:
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_kernel_timeouts(connected, timeout_s)


def set_kernel_timeouts(connected: socket.socket, timeout_s: float) -> None:
    """Blocking mode, but no single wait in the kernel is longer than this."""
    connected.settimeout(None)
    timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def send_pieces(connected: socket.socket, pieces: list[bytes | memoryview], deadline_s: float) -> None:
    views = [memoryview(piece) for piece in pieces if len(piece)]
    while views:
        try:
            sent = connected.sendmsg(views)
        except BlockingIOError:
            raise ConnectionLost("stalled: the receiver takes no bytes") from None
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views:
            views[0] = views[0][sent:]
            if time.monotonic() > deadline_s:
                raise ConnectionLost("too slow: the receiver takes few bytes")


def receive(connected: socket.socket, length: int, deadline_s: float) -> bytes:
    data = bytearray(length)
    receive_into(connected, memoryview(data), deadline_s)
    return bytes(data)


def receive_into(connected: socket.socket, view: memoryview, deadline_s: float) -> None:
    """Fill the view. Raises ConnectionLost on the end of the stream, a stall, or the deadline."""
    while len(view):
        try:
            count = connected.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise ConnectionLost("stalled in the middle of a message") from None
        if count == 0:
            raise ConnectionLost("closed by the other end in the middle of a message")
        view = view[count:]
        if len(view) and time.monotonic() > deadline_s:
            raise ConnectionLost("too slow: the deadline of a message passed")


def shutdown(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected (any more): nothing to end
        connected.shutdown(socket.SHUT_RDWR)
