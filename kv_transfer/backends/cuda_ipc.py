"""Segments from one process's device memory into another's KV blocks: nothing through the host, one pass.

    sender's engine: packs into its device staging            receiver: opens the staging's handle once a channel
      == unix socket: where the segment is, header, digest ==>  engine: its unpack kernel reads across the mapping,
                                                                digests, writes its own unpublished blocks
      <== one byte: so many segments were read ===============  when the device has read them

The two may share a GPU, or have one each that reach one another (NVLink, PCIe peers). The sender owns the memory, and
nobody maps a KV pool. A slot is free again when it was read, or when the channel is lost: who reads it too late reads
something else, which has another digest. Nothing is copied on arrival, so the receiver has no staging; a segment waits
with its sender, which is the back-pressure.

A mapping is closed when its channel has ended and the last read of it is over.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

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
from kv_transfer.backends.sockets import ConnectionLost, receive, send_pieces, set_kernel_timeouts, shutdown
from kv_transfer.cuda import HANDLE_BYTES, HEAD_BYTES, NONCE_BYTES, CudaError, CudaRuntime, CudaStaging
from kv_transfer.segment import MalformedSegment
from kv_transfer.staging import DeviceView, StagingSlot
from pdserve.v1 import kv_pb2

OFFER = struct.Struct(f"!{HANDLE_BYTES}s{NONCE_BYTES}sQ")
"""Handle of the sender's staging, the nonce at its start, its size."""
MAX_PROBES = 256
ALIGNMENT = 16
"""Of the kernels' accesses."""


class CudaIpcBackend:
    """Registered as ``cuda_ipc``."""

    sender_memory: Memory = "device"
    receiver_memory: Memory | None = None

    def __init__(self, device: str, settings: MappedSettings | None = None) -> None:
        self._runtime = CudaRuntime(device)
        self._settings = settings or MappedSettings()

    def sender(self, arena: CudaStaging) -> CudaIpcSender:
        return CudaIpcSender(arena, self._settings)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: None, wakeup: Wakeup
    ) -> CudaIpcReceiver:
        return CudaIpcReceiver(me, layout, wakeup, self._runtime, self._settings)


# ---- sender


class CudaIpcSender:
    """Its probe: a name in our network namespace, the handle of the staging, and what is written at its start."""

    def __init__(self, arena: CudaStaging, settings: MappedSettings) -> None:
        self.arena = arena
        self._settings = settings
        self._here = NamespaceProbe()
        self.probe = f"{self._here.name} {arena.handle.hex()} {arena.nonce.hex()}"

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> MappedChannel:
        return MappedChannel(endpoint, hello, on_lost, self._settings, self._offer, self.arena.offset)

    def close(self) -> None:
        self._here.close()

    def _offer(self, connected: socket.socket) -> None:
        offer = OFFER.pack(self.arena.handle, self.arena.nonce, self.arena.num_bytes)
        send_pieces(connected, [offer], time.monotonic() + self._settings.handshake_timeout_s)


# ---- receiver


class Mapping:
    """A sender's staging as this process reads it. Slots are told back in the order in which they were told of."""

    def __init__(self, runtime: CudaRuntime, connected: socket.socket, address: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._runtime = runtime
        self._connected = connected
        self._address = address
        self._lock = threading.Lock()
        self._told: deque[StagingSlot] = deque()
        self._read: set[int] = set()
        self._count = 0
        self._has_ended = False

    def slot(self, offset: int, length: int) -> StagingSlot:
        with self._lock:
            slot = StagingSlot(self._count, DeviceView(self._address + offset, length), self._give_back)
            self._count += 1
            self._told.append(slot)
        return slot

    @property
    def num_unread(self) -> int:
        return len(self._told)

    def end(self) -> None:
        """Nothing more will be told of."""
        with self._lock:
            self._has_ended = True
            self._close_if_unused()

    def _give_back(self, slots: Sequence[StagingSlot]) -> None:
        with self._lock:
            self._read.update(slot.index for slot in slots)
            count = 0
            while self._told and self._told[0].index in self._read:
                self._read.remove(self._told.popleft().index)
                count += 1
            if not self._has_ended:
                self._tell(count)
            self._close_if_unused()

    def _tell(self, count: int) -> None:
        try:
            while count:
                self._connected.send(bytes([min(count, 255)]), socket.MSG_DONTWAIT)
                count -= min(count, 255)
        except OSError:  # the sender is gone, or takes not even a byte: the channel's thread finds it closed
            shutdown(self._connected)

    def _close_if_unused(self) -> None:
        if self._has_ended and not self._told and self._address:
            address, self._address = self._address, 0
            self._runtime.close_handle(address)


class CudaIpcReceiver:
    """Opens what each sender offers; the engine reads it."""

    max_segment_bytes = 1 << 40
    """A segment is as large as the sender's slots."""

    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        wakeup: Wakeup,
        runtime: CudaRuntime,
        settings: MappedSettings,
    ) -> None:
        self._me = me
        self._runtime = runtime
        self._settings = settings
        self._probed: dict[str, tuple[str, float]] = {}
        """What came of the latest probes, and until when that holds: a sender shows the same one with every request."""
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
        """Opens the sender's staging and reads a few bytes of it: milliseconds, once for each sender that is reached.
        What failed may have failed by chance, so it is tried again after a while."""
        now_s = time.monotonic()
        why, until_s = self._probed.pop(probe, ("", 0.0))
        if until_s <= now_s:
            why = self._try(probe)
            until_s = now_s + self._settings.probe_again_s if why else math.inf
        if len(self._probed) >= MAX_PROBES:
            del self._probed[next(iter(self._probed))]
        self._probed[probe] = (why, until_s)
        return why

    def _try(self, probe: str) -> str:
        name, _, memory = probe.partition(" ")
        handle, _, nonce = memory.partition(" ")
        if not name or not is_here(name):
            return "the other worker is not in our network namespace"
        try:
            address = self._open(bytes.fromhex(handle), bytes.fromhex(nonce))
            self._runtime.close_handle(address)
        except (CudaError, ConnectionLost, ValueError) as error:
            return f"its memory cannot be read by our GPU ({error})"
        return ""

    def _open(self, handle: bytes, nonce: bytes) -> int:
        if len(handle) != HANDLE_BYTES or len(nonce) != NONCE_BYTES:
            raise ConnectionLost("this is no handle of device memory")
        with contextlib.ExitStack() as undo:
            address = self._runtime.open_handle(handle)
            undo.callback(self._runtime.close_handle, address)
            if self._runtime.read(address, NONCE_BYTES) != nonce:
                raise ConnectionLost("the handle opens other memory than the sender's")
            undo.pop_all()
        return address

    def _receive(self, connected: socket.socket, origin: Origin) -> None:
        check_same_user(connected)
        mapping = self._map(connected)
        try:
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
                del told[: self._take(origin, mapping, told)]
        finally:
            mapping.end()

    def _map(self, connected: socket.socket) -> Mapping:
        handle, nonce, num_bytes = OFFER.unpack(
            receive(connected, OFFER.size, time.monotonic() + self._settings.handshake_timeout_s)
        )
        refusal, address = "", 0
        with contextlib.ExitStack() as undo:
            try:
                address = self._open(handle, nonce)
                undo.callback(self._runtime.close_handle, address)
                # Reading past its end would be another's memory, or the end of every kernel of this process.
                if (size := self._runtime.size_at(address)) < num_bytes:
                    refusal = f"the sender's memory has {size} bytes, not {num_bytes}"
            except (CudaError, ConnectionLost) as error:
                refusal = f"the sender's memory cannot be read by our GPU: {error}"
            answer_offer(connected, self._me, refusal)
            set_kernel_timeouts(connected, self._settings.stall_timeout_s)
            undo.pop_all()
        return Mapping(self._runtime, connected, address, num_bytes)

    def _take(self, origin: Origin, mapping: Mapping, told: bytearray) -> int:
        """Announce every segment that is told of completely; returns how many bytes they were told in."""
        position = 0
        while (segment := next_told(told, position, self.max_segment_bytes, mapping.num_bytes)) is not None:
            if segment.offset < HEAD_BYTES or segment.offset % ALIGNMENT:
                raise MalformedSegment(f"a segment at {segment.offset}: no slot begins there")
            if mapping.num_unread >= self._settings.max_queued_segments:
                raise MalformedSegment(f"{mapping.num_unread} segments of this sender wait already")
            slot = mapping.slot(segment.offset, segment.length)
            self._server.arrived(Arrived(origin, segment.header_bytes, segment.header, segment.digest, slot))
            position = segment.end
        if position:
            self._server.wakeup()
        return position
