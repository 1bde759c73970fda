"""The shm backend against senders that are broken or hostile: sealed memory only, typed losses, nothing left behind."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.backends.handshake import greet
from kv_transfer.backends.mapped import ANSWER, PLACE, MappedSettings, socket_name
from kv_transfer.backends.shm import MEMORY, ShmBackend, ShmReceiver
from kv_transfer.layout import make_layout
from kv_transfer.segment import SealedSegment, digest, seal
from kv_transfer.staging import StagingArena
from pdserve.v1 import kv_pb2

SETTINGS = MappedSettings(handshake_timeout_s=2.0, stall_timeout_s=2.0)
SLOT_BYTES = 64 * 1024
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


class Receiving:
    def __init__(self, slots: int = 2) -> None:
        self.arena = StagingArena(slots, SLOT_BYTES)
        self.receiver: ShmReceiver = ShmBackend(SETTINGS).receiver(ME, LAYOUT, self.arena, lambda: None)
        self.endpoint = self.receiver.listen("", "")
        self.came: list[Arrived | ChannelLost] = []

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline_s, f"not within 30 s: {what}; came: {self.came}"
            time.sleep(0.005)
            self.came += self.receiver.poll()

    @property
    def lost(self) -> list[str]:
        return [item.reason for item in self.came if isinstance(item, ChannelLost)]

    @property
    def segments(self) -> list[Arrived]:
        return [item for item in self.came if isinstance(item, Arrived)]

    def offer(self, memory: int, size: int) -> tuple[socket.socket, str]:
        """A sender that is welcome and offers this memory; the refusal."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(socket_name(self.endpoint))
        greet(client, HELLO, time.monotonic() + 5)
        socket.send_fds(client, [MEMORY.pack(size)], [memory])
        (length,) = ANSWER.unpack(client.recv(ANSWER.size, socket.MSG_WAITALL))
        return client, kv_pb2.DataWelcome.FromString(client.recv(length, socket.MSG_WAITALL)).refusal


class Sending:
    def __init__(self, endpoint: str, slots: int = 4) -> None:
        self.arena = StagingArena(slots, SLOT_BYTES)
        self.sender = ShmBackend(SETTINGS).sender(self.arena)
        self.reasons: list[str] = []
        self.lost = threading.Event()
        self.channel = self.sender.connect(endpoint, HELLO, self.on_lost)
        self.done: list[str | None] = []

    def on_lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self.lost.set()

    def segment(self, index: int, content: bytes) -> SealedSegment:
        slot = self.arena.try_take()
        assert slot is not None
        slot.view[: len(content)] = content
        return seal(header(index, len(content)), slot.view[: len(content)])


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
    sending.channel.close()
    sending.sender.close()


def test_what_was_copied_is_what_is_kept(receiving: Receiving, sending: Sending) -> None:
    """The sender's memory may change as soon as the segment was copied, and not before: then its digest tells."""
    segment = sending.segment(0, b"kv" * 1000)
    sending.channel.send(segment, sending.done.append)
    receiving.wait("the segment", lambda: bool(receiving.segments))
    receiving.wait("the copy is told", lambda: sending.done == [None])
    segment.payload[:2] = b"xx"
    (arrived,) = receiving.segments
    assert bytes(arrived.payload) == b"kv" * 1000
    assert digest(arrived.header_bytes, arrived.payload) == arrived.digest


def test_a_slot_comes_back_when_it_was_copied_and_not_before(receiving: Receiving, sending: Sending) -> None:
    for index in range(3):  # the receiver has two slots
        sending.channel.send(sending.segment(index, bytes([index]) * 100), sending.done.append)
    receiving.wait("two segments", lambda: len(receiving.segments) == 2)
    receiving.wait("two copies", lambda: sending.done == [None, None])
    receiving.arena.give_back(receiving.segments[0].slot)
    receiving.wait("the third", lambda: len(receiving.segments) == 3 and sending.done == [None] * 3)
    assert [arrived.header.index for arrived in receiving.segments] == [0, 1, 2]


def test_a_receiver_that_copies_nothing_is_lost(receiving: Receiving, sending: Sending) -> None:
    for index in range(3):
        sending.channel.send(sending.segment(index, b"x" * 100), sending.done.append)
    assert sending.lost.wait(30)
    assert "stalled" in sending.reasons[0]
    assert len(sending.done) == 3
    assert sending.done[:2] == [None, None]


def test_the_receiver_cannot_write_or_resize_the_senders_memory() -> None:
    arena = StagingArena(1, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fileno, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fileno, 0)
    with pytest.raises(PermissionError):
        os.pwrite(arena.fileno, b"x", 0)
    slot = arena.try_take()
    assert slot is not None
    slot.view[0] = 7
    assert mmap.mmap(arena.fileno, mmap.PAGESIZE, prot=mmap.PROT_READ)[0] == 7


def test_memory_that_could_shrink_is_refused(receiving: Receiving) -> None:
    fileno = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fileno, SLOT_BYTES)
    client, refusal = receiving.offer(fileno, SLOT_BYTES)
    assert "not sealed" in refusal
    client.close()
    os.close(fileno)
    receiving.wait("the loss", lambda: bool(receiving.lost))


def test_memory_that_is_smaller_than_it_says_is_refused(receiving: Receiving) -> None:
    arena = StagingArena(1, SLOT_BYTES)
    client, refusal = receiving.offer(arena.fileno, 1 << 40)
    assert "smaller" in refusal
    client.close()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (PLACE.pack(1 << 20, 10, 0, bytes(16)), "at most"),
        (PLACE.pack(10, SLOT_BYTES + 1, 0, bytes(16)), "at most"),
        (PLACE.pack(10, 100, SLOT_BYTES - 50, bytes(16)), "memory has"),
        (PLACE.pack(10, 100, (1 << 64) - 50, bytes(16)), "memory has"),
        (PLACE.pack(4, 100, 0, bytes(16)) + b"\xff\xff\xff\xff", "header"),
    ],
)
def test_places_are_checked_before_they_are_read(receiving: Receiving, place: bytes, why: str) -> None:
    arena = StagingArena(1, SLOT_BYTES)
    client, refusal = receiving.offer(arena.fileno, SLOT_BYTES)
    assert refusal == ""
    client.sendall(place)
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert why in receiving.lost[0]
    assert receiving.arena.used_bytes == 0
    client.close()


def test_a_stranger_to_the_staging_is_an_error_here(sending: Sending) -> None:
    data = memoryview(bytearray(100))
    with pytest.raises(ValueError, match="not in the sender's staging"):
        sending.channel.send(SealedSegment(b"", bytes(16), data), sending.done.append)


def test_only_the_same_host_is_reached(receiving: Receiving, sending: Sending) -> None:
    assert not receiving.receiver.unreachable(sending.sender.probe)
    assert "network namespace" in receiving.receiver.unreachable("@pdserve-probe-of-another-host")
    assert receiving.receiver.unreachable("")


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_nothing_is_left_of_a_killed_process(who: str) -> None:
    code = f"""
import sys, time
from tests.conformance.test_shm_wire import Receiving, Sending
receiving = Receiving()
sending = Sending(receiving.endpoint)
segment = sending.segment(0, b"x" * 100)
sending.channel.send(segment, sending.done.append)
receiving.wait("the segment", lambda: bool(receiving.segments))
print(receiving.endpoint if {who!r} == "receiver" else sending.sender.probe, flush=True)
time.sleep(60)
"""
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name in Path("/proc/net/unix").read_text()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert name not in Path("/proc/net/unix").read_text()
    assert not [left for left in set(os.listdir("/dev/shm")) - before if "pdserve" in left]


def test_close_is_quick_while_connecting() -> None:
    sending = Sending("@pdserve-nobody-listens")
    assert sending.lost.wait(30)
    since_s = time.monotonic()
    sending.channel.close()
    sending.sender.close()
    assert time.monotonic() - since_s < SETTINGS.handshake_timeout_s


def test_many_small_segments_come_whole_and_in_order(receiving: Receiving, sending: Sending) -> None:
    generator = np.random.default_rng(5)
    contents = [generator.bytes(int(generator.integers(1, 2000))) for _ in range(1000)]
    got: list[bytes] = []

    def drain() -> None:
        for arrived in receiving.receiver.poll():
            assert isinstance(arrived, Arrived)
            got.append(bytes(arrived.payload))
            receiving.arena.give_back(arrived.slot)

    for index, content in enumerate(contents):
        while (slot := sending.arena.try_take()) is None:
            drain()
            time.sleep(0.0002)
        slot.view[: len(content)] = content
        segment = seal(header(index, len(content)), slot.view[: len(content)])
        sending.channel.send(segment, lambda error, slot=slot: sending.arena.give_back(slot))
    deadline_s = time.monotonic() + 30
    while len(got) < len(contents) or sending.arena.used_bytes:
        assert time.monotonic() < deadline_s, f"{len(got)} came"
        drain()
        time.sleep(0.0002)
    assert got == contents
