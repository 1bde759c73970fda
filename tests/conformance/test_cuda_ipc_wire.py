"""The cuda_ipc backend against senders that are broken or hostile, and what it does to its mappings; without a GPU.

The CUDA runtime is played by a dictionary: a handle opens an address, and what was written there is read there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.backends.cuda_ipc import OFFER, CudaIpcReceiver, CudaIpcSender
from kv_transfer.backends.handshake import greet
from kv_transfer.backends.mapped import ANSWER, PLACE, MappedSettings, socket_name
from kv_transfer.cuda import HANDLE_BYTES, HEAD_BYTES, NONCE_BYTES, CudaError
from kv_transfer.layout import make_layout
from kv_transfer.segment import SealedSegment, seal_mixed
from kv_transfer.staging import DeviceView, SlotPool
from pdserve.v1 import kv_pb2

SETTINGS = MappedSettings(handshake_timeout_s=0.5, stall_timeout_s=0.5)
SLOT_BYTES = 4096
ME = kv_pb2.WorkerIdentity(worker_id="d", incarnation=9)
LAYOUT = make_layout(
    model_fingerprint="m",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    hash_block_tokens=16,
    block_size=16,
    dtype="float32",
)
HELLO = kv_pb2.DataHello(
    sender=kv_pb2.WorkerIdentity(worker_id="p", incarnation=1), layout=LAYOUT, receiver_incarnation=9
)
MEMORY_BYTES = 1 << 20
HANDLE, NONCE = b"h" * HANDLE_BYTES, b"n" * NONCE_BYTES


class Runtime:
    """Of the receiver: which handles it can open, and where; what is open now."""

    def __init__(self) -> None:
        self.memories = {HANDLE: (0x10000, NONCE)}
        self.open: list[int] = []

    def open_handle(self, handle: bytes) -> int:
        if handle not in self.memories:
            raise CudaError("cudaIpcOpenMemHandle: invalid resource handle (400)")
        address, _ = self.memories[handle]
        self.open.append(address)
        return address

    def close_handle(self, address: int) -> None:
        self.open.remove(address)

    def size_at(self, address: int) -> int:
        assert address in self.open
        return MEMORY_BYTES

    def read(self, address: int, num_bytes: int) -> bytes:
        assert address in self.open
        return next(content for at, content in self.memories.values() if at == address)[:num_bytes]


class Staging(SlotPool):
    """Of the sender."""

    handle, nonce = HANDLE, NONCE

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, SLOT_BYTES)
        self.num_bytes = HEAD_BYTES + num_slots * SLOT_BYTES

    def offset(self, view: DeviceView) -> int:
        return view.address

    def _view(self, start: int) -> DeviceView:
        return DeviceView(HEAD_BYTES + start, self.slot_bytes)


class Receiving:
    def __init__(self) -> None:
        self.runtime = Runtime()
        self.receiver = CudaIpcReceiver(ME, LAYOUT, lambda: None, self.runtime, SETTINGS)  # type: ignore[arg-type]
        self.endpoint = self.receiver.listen("", "")
        self.came: list[Arrived | ChannelLost] = []

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline_s, f"not within 10 s: {what}; came: {self.came}"
            time.sleep(0.005)
            self.came += self.receiver.poll()

    @property
    def lost(self) -> list[str]:
        return [item.reason for item in self.came if isinstance(item, ChannelLost)]

    @property
    def segments(self) -> list[Arrived]:
        return [item for item in self.came if isinstance(item, Arrived)]

    def offer(self, handle: bytes, nonce: bytes = NONCE, num_bytes: int = MEMORY_BYTES) -> tuple[socket.socket, str]:
        """A sender that is welcome and offers this memory; the refusal."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(socket_name(self.endpoint))
        greet(client, HELLO, time.monotonic() + 5)
        client.sendall(OFFER.pack(handle, nonce, num_bytes))
        (length,) = ANSWER.unpack(client.recv(ANSWER.size, socket.MSG_WAITALL))
        return client, kv_pb2.DataWelcome.FromString(client.recv(length, socket.MSG_WAITALL)).refusal


class Sending:
    def __init__(self, endpoint: str, slots: int = 4) -> None:
        self.arena = Staging(slots)
        self.sender = CudaIpcSender(self.arena, SETTINGS)  # type: ignore[arg-type]
        self.lost: list[str] = []
        self.channel = self.sender.connect(endpoint, HELLO, self.lost.append)
        self.done: list[str | None] = []

    def send(self, index: int) -> SealedSegment:
        slot = self.arena.try_take()
        assert slot is not None
        segment = seal_mixed(header(index, 64), slot.view[:64], mix=7)
        self.channel.send(segment, self.done.append)
        return segment

    def close(self) -> None:
        self.channel.close()
        self.sender.close()


def header(index: int, payload_bytes: int) -> kv_pb2.SegmentHeader:
    return kv_pb2.SegmentHeader(transfer_id="t", index=index, dtype="float32", payload_bytes=payload_bytes)


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    receiving = Receiving()
    yield receiving
    receiving.receiver.close()


@pytest.fixture
def sending(receiving: Receiving) -> Iterator[Sending]:
    sending = Sending(receiving.endpoint)
    yield sending
    sending.close()


def test_a_segment_is_where_the_sender_has_it(receiving: Receiving, sending: Sending) -> None:
    sent = sending.send(0)
    receiving.wait("the segment", lambda: bool(receiving.segments))
    (arrived,) = receiving.segments
    assert (arrived.header_bytes, arrived.digest) == (sent.header, sent.digest)
    assert (arrived.payload.address, len(arrived.payload)) == (0x10000 + HEAD_BYTES, 64)


def test_a_slot_comes_back_when_it_was_read_and_all_before_it_were(receiving: Receiving, sending: Sending) -> None:
    """The sender counts: a later one that was dropped unread must not free an earlier one that is being read."""
    for index in range(3):
        sending.send(index)
    receiving.wait("three segments", lambda: len(receiving.segments) == 3)
    receiving.segments[1].slot.give_back()
    time.sleep(0.1)
    assert sending.done == []
    receiving.segments[0].slot.give_back()
    receiving.wait("the first two are free", lambda: sending.done == [None, None])
    receiving.segments[2].slot.give_back()
    receiving.wait("the third is free", lambda: sending.done == [None] * 3)


def test_a_mapping_is_closed_after_the_last_read_of_it(receiving: Receiving, sending: Sending) -> None:
    sending.send(0)
    receiving.wait("the segment", lambda: bool(receiving.segments))
    assert receiving.runtime.open == [0x10000]
    sending.channel.close()
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert receiving.runtime.open == [0x10000]  # the device may still read there
    receiving.segments[0].slot.give_back()
    assert receiving.runtime.open == []


def test_a_receiver_that_reads_nothing_is_lost(receiving: Receiving, sending: Sending) -> None:
    sending.send(0)
    receiving.wait("the sender gives up", lambda: bool(sending.lost))
    assert "stalled" in sending.lost[0]
    assert sending.done == [sending.lost[0]]


@pytest.mark.parametrize(
    ("handle", "nonce", "said"),
    [
        (b"x" * HANDLE_BYTES, NONCE, "invalid resource handle"),
        (HANDLE, b"x" * NONCE_BYTES, "other memory than the sender's"),
    ],
)
def test_memory_that_cannot_be_read_is_refused(receiving: Receiving, handle: bytes, nonce: bytes, said: str) -> None:
    client, refusal = receiving.offer(handle, nonce)
    assert said in refusal
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert receiving.runtime.open == []
    client.close()


def test_memory_whose_reading_fails_does_not_stay_mapped(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(address: int, num_bytes: int) -> bytes:
        raise CudaError("cudaMemcpyAsync: out of memory (2)")

    monkeypatch.setattr(receiving.runtime, "read", read)
    client, refusal = receiving.offer(HANDLE)
    assert "out of memory" in refusal
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert receiving.runtime.open == []
    client.close()


def test_a_sender_that_offers_more_than_its_memory_has_is_refused(receiving: Receiving) -> None:
    """It says where segments are, so past the end it would have another's memory read."""
    client, refusal = receiving.offer(HANDLE, num_bytes=MEMORY_BYTES + 1)
    assert f"has {MEMORY_BYTES} bytes" in refusal
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert receiving.runtime.open == []
    client.close()


def test_memory_whose_size_is_not_known_is_refused(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    def size_at(address: int) -> int:
        raise CudaError("cuMemGetAddressRange: no memory begins here (1)")

    monkeypatch.setattr(receiving.runtime, "size_at", size_at)
    client, refusal = receiving.offer(HANDLE)
    assert "no memory begins here" in refusal
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert receiving.runtime.open == []
    client.close()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (PLACE.pack(10, 100, MEMORY_BYTES - 50, bytes(16)), "memory has"),
        (PLACE.pack(10, 100, (1 << 64) - 50, bytes(16)), "memory has"),
        (PLACE.pack(1 << 20, 100, HEAD_BYTES, bytes(16)), "at most"),
        (PLACE.pack(4, 100, HEAD_BYTES, bytes(16)) + b"\xff\xff\xff\xff", "header"),
        (PLACE.pack(len(header(0, 64).SerializeToString()), 32, HEAD_BYTES, bytes(16)), "the wire 32"),
        (PLACE.pack(len(header(0, 64).SerializeToString()), 64, 0, bytes(16)), "no slot begins there"),
        (PLACE.pack(len(header(0, 64).SerializeToString()), 64, HEAD_BYTES + 3, bytes(16)), "no slot begins there"),
    ],
)
def test_places_outside_of_the_senders_slots_end_the_connection(receiving: Receiving, told: bytes, said: str) -> None:
    client, refusal = receiving.offer(HANDLE)
    assert refusal == ""
    client.sendall(told if len(told) > PLACE.size else told + header(0, 64).SerializeToString())
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert said in receiving.lost[0]
    assert not receiving.segments
    assert receiving.runtime.open == []
    client.close()


def test_a_probe_that_opens_the_senders_memory_reaches_it(receiving: Receiving, sending: Sending) -> None:
    assert receiving.receiver.unreachable(sending.sender.probe) == ""
    assert receiving.receiver.unreachable(sending.sender.probe) == ""  # remembered
    assert 0x10000 not in receiving.runtime.open or receiving.runtime.open.count(0x10000) == 1  # the channel's own


def test_why_a_probe_does_not_reach(receiving: Receiving, sending: Sending) -> None:
    name, _, nonce = sending.sender.probe.split(" ")
    assert "network namespace" in receiving.receiver.unreachable("")
    assert "network namespace" in receiving.receiver.unreachable(f"@pdserve-probe-elsewhere {HANDLE.hex()} {nonce}")
    assert "invalid resource handle" in receiving.receiver.unreachable(f"{name} {(b'x' * HANDLE_BYTES).hex()} {nonce}")
    assert "other memory" in receiving.receiver.unreachable(f"{name} {HANDLE.hex()} {(b'x' * NONCE_BYTES).hex()}")
    assert "no handle" in receiving.receiver.unreachable(f"{name} 00 {nonce}")
    assert "cannot be read" in receiving.receiver.unreachable(f"{name} not-hex {nonce}")


def test_a_probe_that_failed_is_tried_again_after_a_while(receiving: Receiving, sending: Sending) -> None:
    """Its memory may be readable by then; meanwhile nobody asks the device again with each request."""
    opened: list[bytes] = []
    runtime, probe = receiving.runtime, sending.sender.probe
    really = runtime.open_handle

    def open_handle(handle: bytes) -> int:
        opened.append(handle)
        if len(opened) == 1:
            raise CudaError("cudaIpcOpenMemHandle: out of memory (2)")
        return really(handle)

    receiving.wait("the channel has opened it", lambda: bool(runtime.open))
    runtime.open_handle = open_handle  # type: ignore[method-assign]
    assert "out of memory" in receiving.receiver.unreachable(probe)
    for _ in range(3):
        assert "out of memory" in receiving.receiver.unreachable(probe)
    assert len(opened) == 1
    soon = CudaIpcReceiver(ME, LAYOUT, lambda: None, runtime, replace(SETTINGS, probe_again_s=0.05))  # type: ignore[arg-type]
    opened.clear()
    assert "out of memory" in soon.unreachable(probe)
    receiving.wait("it is reached", lambda: soon.unreachable(probe) == "")
    assert soon.unreachable(probe) == ""
    assert len(opened) == 2
    soon.close()
