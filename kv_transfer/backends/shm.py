"""Segments through shared memory, between two processes of one host: one copy, from the sender's staging to ours.

    sender's engine: packs into its arena, a sealed memfd       receiver's thread: maps it read-only, checks the seals
      == unix socket: where the segment is, header, digest ==>    copies the segment into its own staging, says so
      <== one byte: so many segments were copied =============    engine: digests and unpacks the copy

The sender owns the memory and the receiver can only read it; what the receiver verifies is its own copy, so nothing
that the sender does to its slots later matters. A slot is free again when it was copied, or when the channel is lost:
a receiver that wakes too late copies something else, which has another digest.

Nothing is left behind, whatever dies: memfds and abstract socket names end with their processes, and neither counts
against /dev/shm, which containers keep at 64 MiB. An abstract name is seen in one network namespace only: two
containers on a host can use shm when they share it, otherwise ``can_reach`` is false. Only processes of the same user
(or root) are taken, on both ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.backends.base import Arrived, OnDone, OnLost, Wakeup
from kv_transfer.backends.handshake import check_welcome, greet
from kv_transfer.backends.socket_server import SocketServer
from kv_transfer.backends.sockets import (
    ConnectionLost,
    configure,
    receive,
    send_pieces,
    set_kernel_timeouts,
    shutdown,
)
from kv_transfer.segment import DIGEST_BYTES, MAX_HEADER_BYTES, MalformedSegment, SealedSegment, parse_header
from kv_transfer.staging import SEALS, StagingArena
from pdserve.v1 import kv_pb2

MEMORY = struct.Struct("!Q")
"""Size of the sender's arena; its file descriptor comes with it."""
PLACE = struct.Struct(f"!IQQ{DIGEST_BYTES}s")
"""Length of the header that follows, length and offset of the payload, digest."""
ANSWER = struct.Struct("!I")
CREDENTIALS = struct.Struct("iII")
FLUSH_BYTES = 256 * 1024
"""Small segments that came together are told together: to the engine, and back to the sender."""
TURN_S = 1.0


@dataclass(frozen=True, slots=True)
class ShmSettings:
    connect_timeout_s: float = 3.0
    handshake_timeout_s: float = 3.0
    stall_timeout_s: float = 5.0
    """No segment is copied for so long although some wait: the channel is lost."""
    max_connections: int = 256
    max_queued_segments: int = 256


class ShmBackend:
    """Registered as ``shm``."""

    def __init__(self, settings: ShmSettings | None = None) -> None:
        self._settings = settings or ShmSettings()

    def sender(self, arena: StagingArena) -> ShmSender:
        return ShmSender(arena, self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: StagingArena, wakeup: Wakeup
    ) -> ShmReceiver:
        return ShmReceiver(me, layout, arena, wakeup, self._settings)


def unique_name(what: str) -> str:
    """An endpoint; "@" stands for the NUL byte of abstract names, as in /proc/net/unix."""
    return f"@pdserve-{what}-{secrets.token_hex(16)}"


def socket_name(endpoint: str) -> bytes:
    return b"\0" + endpoint.removeprefix("@").encode()


def check_same_user(connected: socket.socket) -> None:
    _, uid, _ = CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ConnectionLost(f"the other end runs as user {uid}, we as {os.geteuid()}")


# ---- sender


class ShmSender:
    """Its probe is a bound datagram socket with a secret name: who can connect to it is in our network namespace."""

    def __init__(self, arena: StagingArena, settings: ShmSettings) -> None:
        self._arena = arena
        self._settings = settings
        self.host_probe = unique_name("probe")
        self._probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._probe.bind(socket_name(self.host_probe))

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> ShmChannel:
        return ShmChannel(endpoint, hello, on_lost, self._arena, self._settings)

    def close(self) -> None:
        self._probe.close()


class ShmChannel:
    """The engine's thread tells where segments are; a thread connects, and hears which ones were copied."""

    def __init__(
        self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost, arena: StagingArena, settings: ShmSettings
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._on_lost = on_lost
        self._arena = arena
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
        offset = self._arena.offset(segment.payload)
        place = PLACE.pack(len(segment.header), len(segment.payload), offset, segment.digest)
        with self._lock:
            lost = self._lost
            if lost is None and len(self._uncopied) >= self._settings.max_queued_segments:
                lost = f"{len(self._uncopied)} segments are queued for {self._endpoint} already"
            if lost is None:
                if not self._uncopied:
                    self._progress_s = time.monotonic()
                self._uncopied.append(on_done)
                self._untold += place + segment.header
                if self._is_open:
                    self._tell()
        if lost is not None:
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
        socket.send_fds(self._socket, [MEMORY.pack(self._arena.limit_bytes)], [self._arena.fileno])
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


# ---- receiver


class ShmReceiver:
    """Maps what each sender offers, and copies what it is told of."""

    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        arena: StagingArena,
        wakeup: Wakeup,
        settings: ShmSettings,
    ) -> None:
        self._me = me
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
        """The hosts do not matter: the endpoint is a name on this one."""
        endpoint = unique_name("kv")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(socket_name(endpoint))
        listener.listen(128)
        self._server.start(listener)
        return endpoint

    def can_reach(self, host_probe: str) -> bool:
        """Whether the sender's secret name is in our network namespace. Connecting a datagram socket never waits."""
        if not host_probe:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probing:
            return probing.connect_ex(socket_name(host_probe)) == 0

    def _receive(self, connected: socket.socket, sender: kv_pb2.WorkerIdentity) -> None:
        check_same_user(connected)
        memory = self._map(connected)
        told = bytearray()
        while not self._server.closing:
            try:
                more = connected.recv(65536)
            except BlockingIOError:
                if told:
                    raise ConnectionLost("stalled in the middle of a message") from None
                continue
            if not more:
                raise ConnectionLost("closed by the sender")
            told += more
            del told[: self._take(connected, sender, memory, told)]

    def _map(self, connected: socket.socket) -> npt.NDArray[np.uint8]:
        """The sender's arena, read-only. Sealed against resizing: no access can fault."""
        data, fds, _, _ = socket.recv_fds(connected, MEMORY.size, 1)
        try:
            data += receive(connected, MEMORY.size - len(data), time.monotonic() + 1.0)
            (size,) = MEMORY.unpack(data)
            refusal, mapped = "", None
            try:
                if not fds or fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
                    refusal = "the sender's memory is not sealed"
                elif os.fstat(fds[0]).st_size < size:
                    refusal = f"the sender's memory is smaller than {size} bytes"
                else:
                    mapped = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
            except OSError as error:
                refusal = f"the sender's memory cannot be mapped: {error}"
        finally:
            for fd in fds:
                os.close(fd)
        answer = kv_pb2.DataWelcome(receiver=self._me, refusal=refusal).SerializeToString()
        send_pieces(connected, [ANSWER.pack(len(answer)), answer], time.monotonic() + 1.0)
        if mapped is None:
            raise ConnectionLost(refusal)
        set_kernel_timeouts(connected, self._settings.stall_timeout_s)
        return np.frombuffer(mapped, np.uint8)

    def _take(
        self,
        connected: socket.socket,
        sender: kv_pb2.WorkerIdentity,
        memory: npt.NDArray[np.uint8],
        told: bytearray,
    ) -> int:
        """Copy every segment that is told of completely; returns how many bytes they were told in."""
        position = copied = copied_bytes = 0
        try:
            while len(told) - position >= PLACE.size:
                header_length, length, offset, digest = PLACE.unpack_from(told, position)
                if header_length > MAX_HEADER_BYTES or length > self._arena.slot_bytes:
                    raise MalformedSegment(
                        f"a segment of {header_length} + {length} bytes; "
                        f"at most {MAX_HEADER_BYTES} + {self._arena.slot_bytes} are taken"
                    )
                if offset + length > len(memory):
                    raise MalformedSegment(f"a segment at {offset} of {length} bytes; the memory has {len(memory)}")
                end = position + PLACE.size + header_length
                if len(told) < end:
                    break
                header_bytes = bytes(told[position + PLACE.size : end])
                header = parse_header(header_bytes)
                if header.payload_bytes != length:
                    raise MalformedSegment(f"header says {header.payload_bytes} payload bytes, the wire {length}")
                slot = self._arena.try_take()
                if slot is None:  # tell what there is before waiting for the engine to free a slot
                    self._flush(connected, copied)
                    copied = copied_bytes = 0
                    slot = self._server.take_slot()
                np.copyto(np.frombuffer(slot.view, np.uint8)[:length], memory[offset : offset + length])
                self._server.arrived(Arrived(sender, header_bytes, header, digest, slot))
                position, copied, copied_bytes = end, copied + 1, copied_bytes + length
                if copied_bytes >= FLUSH_BYTES:
                    self._flush(connected, copied)
                    copied = copied_bytes = 0
        finally:
            self._flush(connected, copied)
        return position

    def _flush(self, connected: socket.socket, copied: int) -> None:
        if not copied:
            return
        self._server.wakeup()
        while copied:
            connected.sendall(bytes([min(copied, 255)]))
            copied -= min(copied, 255)
