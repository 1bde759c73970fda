"""What the backends share whose receiver maps the sender's staging: shm and cuda_ipc.

    sender's engine: packs into its arena == unix socket: where a segment is, header, digest ==> receiver maps and reads
                                          <== one byte: so many segments were copied ===========

A slot is free again when it was copied, or when the channel is lost: a receiver that wakes too late copies something
else, which has another digest. Abstract socket names end with their processes, and are seen in one network namespace
only. Only processes of the same user (or root) are taken, on both ends.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.backends.base import OnDone, OnLost
from kv_transfer.backends.handshake import check_welcome, greet
from kv_transfer.backends.sockets import ConnectionLost, configure, receive, send_pieces, shutdown
from kv_transfer.segment import DIGEST_BYTES, MAX_HEADER_BYTES, MalformedSegment, SealedSegment, parse_header
from pdserve.v1 import kv_pb2

PLACE = struct.Struct(f"!IQQ{DIGEST_BYTES}s")
"""Length of the header that follows, length and offset of the payload, digest."""
ANSWER = struct.Struct("!I")
CREDENTIALS = struct.Struct("iII")
TURN_S = 1.0


@dataclass(frozen=True, slots=True)
class MappedSettings:
    connect_timeout_s: float = 3.0
    handshake_timeout_s: float = 3.0
    stall_timeout_s: float = 5.0
    """No segment is copied for so long although some wait: the channel is lost."""
    probe_again_s: float = 10.0
    """After a sender's memory could not be read (cuda_ipc)."""
    max_connections: int = 256
    max_queued_segments: int = 256


def unique_name(what: str) -> str:
    """An endpoint; "@" stands for the NUL byte of abstract names, as in /proc/net/unix."""
    return f"@pdserve-{what}-{secrets.token_hex(16)}"


def socket_name(endpoint: str) -> bytes:
    return b"\0" + endpoint.removeprefix("@").encode()


def listen_here(endpoint: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_name(endpoint))
    listener.listen(128)
    return listener


class NamespaceProbe:
    """A bound datagram socket with a secret name: who can connect to it is in our network namespace."""

    def __init__(self) -> None:
        self.name = unique_name("probe")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(socket_name(self.name))

    def close(self) -> None:
        self._socket.close()


def is_here(probe: str) -> bool:
    """Whether the probe with this name is in our network namespace. Connecting a datagram socket never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probing:
        return probing.connect_ex(socket_name(probe)) == 0


def check_same_user(connected: socket.socket) -> None:
    _, uid, _ = CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ConnectionLost(f"the other end runs as user {uid}, we as {os.geteuid()}")


def answer_offer(connected: socket.socket, me: kv_pb2.WorkerIdentity, refusal: str) -> None:
    """The receiver's: yes (empty) or no to the memory it was offered."""
    answer = kv_pb2.DataWelcome(receiver=me, refusal=refusal).SerializeToString()
    send_pieces(connected, [ANSWER.pack(len(answer)), answer], time.monotonic() + 1.0)
    if refusal:
        raise ConnectionLost(refusal)


@dataclass(frozen=True, slots=True)
class Told:
    """A segment that a sender told of."""

    header_bytes: bytes
    header: kv_pb2.SegmentHeader
    digest: bytes
    offset: int
    length: int
    end: int
    """Where the next one begins in what was told."""


def next_told(told: bytearray, position: int, max_bytes: int, memory_bytes: int) -> Told | None:
    """The segment that is told of at ``position``; None: not all of it has come.

    Raises:
        MalformedSegment: larger than ``max_bytes``, outside of the memory, or no header.
    """
    if len(told) - position < PLACE.size:
        return None
    header_length, length, offset, digest = PLACE.unpack_from(told, position)
    if header_length > MAX_HEADER_BYTES or length > max_bytes:
        raise MalformedSegment(
            f"a segment of {header_length} + {length} bytes; at most {MAX_HEADER_BYTES} + {max_bytes} are taken"
        )
    if offset + length > memory_bytes:
        raise MalformedSegment(f"a segment at {offset} of {length} bytes; the memory has {memory_bytes}")
    end = position + PLACE.size + header_length
    if len(told) < end:
        return None
    header_bytes = bytes(told[position + PLACE.size : end])
    header = parse_header(header_bytes)
    if header.payload_bytes != length:
        raise MalformedSegment(f"header says {header.payload_bytes} payload bytes, the wire {length}")
    return Told(header_bytes, header, digest, offset, length, end)


class MappedChannel:
    """The engine's thread tells where segments are; a thread connects, and hears which ones were copied."""

    def __init__(
        self,
        endpoint: str,
        hello: kv_pb2.DataHello,
        on_lost: OnLost,
        settings: MappedSettings,
        offer: Callable[[socket.socket], None],
        offset: Callable[[Any], int],
    ) -> None:
        """``offer`` sends what the receiver maps; ``offset`` says where in it a payload is."""
        self._endpoint = endpoint
        self._hello = hello
        self._on_lost = on_lost
        self._offer = offer
        self._offset = offset
        self._settings = settings
        self._lock = threading.Lock()
        self._untold = bytearray()
        """What the socket has not taken yet."""
        self._uncopied: deque[OnDone] = deque()
        self._progress_s = 0.0
        """When a segment was last copied, or the first of those that wait was sent."""
        self._is_open = False
        self._closing = False
        self._lost: str | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{endpoint}", daemon=True)
        self._thread.start()

    def send(self, segment: SealedSegment, on_done: OnDone) -> None:
        self.send_all([(segment, on_done)])

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        """Told in one message, so that the receiver looks once."""
        places = [
            PLACE.pack(len(segment.header), len(segment.payload), self._offset(segment.payload), segment.digest)
            for segment, _ in segments
        ]
        refused: list[tuple[OnDone, str]] = []
        with self._lock:
            for place, (segment, on_done) in zip(places, segments, strict=True):
                lost = self._lost
                if lost is None and len(self._uncopied) >= self._settings.max_queued_segments:
                    lost = f"{len(self._uncopied)} segments are queued for {self._endpoint} already"
                if lost is not None:
                    refused.append((on_done, lost))
                    continue
                if not self._uncopied:
                    self._progress_s = time.monotonic()
                self._uncopied.append(on_done)
                self._untold += place + segment.header
            if self._is_open:
                self._tell()
        for on_done, lost in refused:
            on_done(lost)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            shutdown(self._socket)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        reason = "closed"
        try:
            with self._socket:
                self._open()
                self._hear_copies()
        except (OSError, ConnectionLost) as error:
            reason = f"data channel to {self._endpoint} is lost: {error}"
        finally:
            self._end(reason)

    def _open(self) -> None:
        self._socket.settimeout(self._settings.connect_timeout_s)
        self._socket.connect(socket_name(self._endpoint))
        check_same_user(self._socket)
        configure(self._socket, self._settings.handshake_timeout_s)
        deadline_s = time.monotonic() + self._settings.handshake_timeout_s
        greet(self._socket, self._hello, deadline_s)
        self._offer(self._socket)
        (length,) = ANSWER.unpack(receive(self._socket, ANSWER.size, deadline_s))
        check_welcome(receive(self._socket, min(length, MAX_HEADER_BYTES), deadline_s))
        self._socket.setblocking(False)
        with self._lock:
            if self._closing:
                raise ConnectionLost("closed")
            self._is_open = True
            self._progress_s = time.monotonic()
            self._tell()

    def _hear_copies(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while not self._closing:
            heard = self._socket.recv(4096) if poller.poll(TURN_S * 1000) else None
            if heard == b"":
                raise ConnectionLost("closed by the receiver")
            with self._lock:
                copied = sum(heard or b"")
                if copied > len(self._uncopied):
                    raise ConnectionLost(f"{copied} copies of {len(self._uncopied)} segments")
                done = [self._uncopied.popleft() for _ in range(copied)]
                now_s = time.monotonic()
                if copied:
                    self._progress_s = now_s
                elif self._uncopied and now_s - self._progress_s > self._settings.stall_timeout_s:
                    raise ConnectionLost("stalled: the receiver copies nothing")
                self._tell()
            for on_done in done:
                on_done(None)

    def _tell(self) -> None:
        """Under the lock. What the socket does not take now it takes after the next copy."""
        if not self._untold:
            return
        try:
            sent = self._socket.send(self._untold, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            return  # the thread finds the socket closed, and says why
        del self._untold[:sent]

    def _end(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            self._is_open = False
            uncopied = list(self._uncopied)
            self._uncopied.clear()
            told = self._closing
        for on_done in uncopied:
            on_done(reason)
        if not told:
            self._on_lost(reason)
