"""Segments through shared memory, between two processes of one host: one copy, from the sender's staging to ours.

    sender's engine: packs into its arena, a sealed memfd       receiver's thread: maps it read-only, checks the seals
      == unix socket: where the segment is, header, digest ==>    copies the segment into its own staging, says so
      <== one byte: so many segments were copied =============    engine: digests and unpacks the copy

The sender owns the memory and the receiver can only read it; what the receiver verifies is its own copy, so nothing
that the sender does to its slots later matters.

Nothing is left behind, whatever dies: memfds and abstract socket names end with their processes, and neither counts
against /dev/shm, which containers keep at 64 MiB. Two containers on a host can use shm when they share a network
namespace, otherwise ``unreachable`` says so.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time

import numpy as np
import numpy.typing as npt

from kv_transfer.backends.base import Arrived, Memory, OnLost, Origin, Wakeup
from kv_transfer.backends.mapped import (
    MappedChannel,
    MappedSettings,
    NamespaceProbe,
    answer_offer,
    check_same_user,
    is_here,
    listen_here,
    next_told,
    unique_name,
)
from kv_transfer.backends.socket_server import SocketServer
from kv_transfer.backends.sockets import ConnectionLost, receive, set_kernel_timeouts
from kv_transfer.staging import SEALS, StagingArena
from pdserve.v1 import kv_pb2

MEMORY = struct.Struct("!Q")
"""Size of the sender's arena; its file descriptor comes with it."""
FLUSH_BYTES = 256 * 1024
"""Small segments that came together are told together: to the engine, and back to the sender."""


class ShmBackend:
    """Registered as ``shm``."""

    sender_memory: Memory = "host"
    receiver_memory: Memory | None = "host"

    def __init__(self, settings: MappedSettings | None = None) -> None:
        self._settings = settings or MappedSettings()

    def sender(self, arena: StagingArena) -> ShmSender:
        return ShmSender(arena, self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: StagingArena, wakeup: Wakeup
    ) -> ShmReceiver:
        return ShmReceiver(me, layout, arena, wakeup, self._settings)


class ShmSender:
    def __init__(self, arena: StagingArena, settings: MappedSettings) -> None:
        self.arena = arena
        self._settings = settings
        self._probe = NamespaceProbe()
        self.probe = self._probe.name

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> MappedChannel:
        return MappedChannel(endpoint, hello, on_lost, self._settings, self._offer, self.arena.offset)

    def close(self) -> None:
        self._probe.close()

    def _offer(self, connected: socket.socket) -> None:
        socket.send_fds(connected, [MEMORY.pack(self.arena.limit_bytes)], [self.arena.fileno])


class ShmReceiver:
    """Maps what each sender offers, and copies what it is told of."""

    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        arena: StagingArena,
        wakeup: Wakeup,
        settings: MappedSettings,
    ) -> None:
        self._me = me
        self._arena = arena
        self.max_segment_bytes = arena.slot_bytes
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
        """The hosts do not matter: the endpoint is a name on this one."""
        endpoint = unique_name("kv")
        self._server.start(listen_here(endpoint))
        return endpoint

    def unreachable(self, probe: str) -> str:
        return "" if probe and is_here(probe) else "the other worker is not in our network namespace"

    def _receive(self, connected: socket.socket, origin: Origin) -> None:
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
            del told[: self._take(connected, origin, memory, told)]

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
        answer_offer(connected, self._me, refusal)
        assert mapped is not None
        set_kernel_timeouts(connected, self._settings.stall_timeout_s)
        return np.frombuffer(mapped, np.uint8)

    def _take(
        self,
        connected: socket.socket,
        origin: Origin,
        memory: npt.NDArray[np.uint8],
        told: bytearray,
    ) -> int:
        """Copy every segment that is told of completely; returns how many bytes they were told in."""
        position = copied = copied_bytes = 0
        try:
            while (segment := next_told(told, position, self._arena.slot_bytes, len(memory))) is not None:
                slot = self._arena.try_take()
                if slot is None:  # tell what there is before waiting for the engine to free a slot
                    self._flush(connected, copied)
                    copied = copied_bytes = 0
                    slot = self._server.take_slot(self._arena)
                length, offset = segment.length, segment.offset
                np.copyto(np.frombuffer(slot.view, np.uint8)[:length], memory[offset : offset + length])
                self._server.arrived(Arrived(origin, segment.header_bytes, segment.header, segment.digest, slot))
                position, copied, copied_bytes = segment.end, copied + 1, copied_bytes + length
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
