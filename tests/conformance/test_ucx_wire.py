"""The ucx backend against senders that announce and never send, and without its package."""

from __future__ import annotations

import builtins
import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.backends.handshake import greet
from kv_transfer.backends.network_receiver import NetworkReceiver, Payloads
from kv_transfer.backends.socket_channel import PREFIX, SocketSettings
from kv_transfer.backends.sockets import ConnectionLost, split_endpoint
from kv_transfer.backends.ucx import ADDRESS, UcxBackend, load_ucx
from kv_transfer.layout import make_layout
from kv_transfer.segment import seal
from kv_transfer.staging import StagingArena
from pdserve.v1 import kv_pb2

SETTINGS = SocketSettings(connect_timeout_s=2.0, handshake_timeout_s=2.0, stall_timeout_s=2.0, segment_timeout_s=4.0)
SLOT_BYTES = 1 << 20
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
    def __init__(self) -> None:
        self.arena = StagingArena(2, SLOT_BYTES)
        self.receiver: NetworkReceiver = UcxBackend(settings=SETTINGS).receiver(ME, LAYOUT, self.arena, lambda: None)
        self.endpoint = self.receiver.listen("127.0.0.1", "127.0.0.1")
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

    def welcome(self) -> socket.socket:
        """A sender that got the receiver's UCX address and does nothing with it."""
        client = socket.create_connection(split_endpoint(self.endpoint), timeout=5)
        greet(client, HELLO, time.monotonic() + 5)
        (length,) = ADDRESS.unpack(client.recv(ADDRESS.size, socket.MSG_WAITALL))
        address = client.recv(length, socket.MSG_WAITALL)
        client.sendall(ADDRESS.pack(len(address)) + address)  # not ours: nothing will ever come from there
        return client


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    receiving = Receiving()
    yield receiving
    receiving.receiver.close()


def announcement(payload_bytes: int) -> bytes:
    header = kv_pb2.SegmentHeader(transfer_id="t", dtype="float32", payload_bytes=payload_bytes).SerializeToString()
    return PREFIX.pack(len(header), payload_bytes, bytes(16)) + header


def test_a_payload_that_never_comes_costs_a_slot_until_the_deadline_only(receiving: Receiving) -> None:
    client = receiving.welcome()
    client.sendall(announcement(100_000))
    receiving.wait("the slot is taken", lambda: receiving.arena.used_bytes == SLOT_BYTES)
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert "stalled" in receiving.lost[0]
    assert receiving.arena.used_bytes == 0
    client.close()


def test_a_sender_that_goes_between_announcement_and_payload_is_seen_at_once(receiving: Receiving) -> None:
    client = receiving.welcome()
    client.sendall(announcement(100_000))
    receiving.wait("the slot is taken", lambda: receiving.arena.used_bytes == SLOT_BYTES)
    client.close()
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert "closed by the other end" in receiving.lost[0]
    assert receiving.arena.used_bytes == 0


def test_payloads_that_were_announced_are_awaited_together_and_given_up_together(receiving: Receiving) -> None:
    """Two slots, and a third announcement: it gets one as soon as there is one."""
    client = receiving.welcome()
    client.sendall(announcement(100_000) * 3)
    receiving.wait("both slots are taken", lambda: receiving.arena.used_bytes == 2 * SLOT_BYTES)
    client.close()
    receiving.wait("the loss", lambda: bool(receiving.lost))
    assert receiving.arena.used_bytes == 0


def test_a_receiver_that_takes_nothing_is_lost(receiving: Receiving) -> None:
    """It has two slots, and nobody frees them."""
    arena = StagingArena(8, SLOT_BYTES)
    sender = UcxBackend(settings=SETTINGS).sender(arena)
    reasons: list[str] = []
    channel = sender.connect(receiving.endpoint, HELLO, reasons.append)
    done: list[str | None] = []
    for _ in range(8):
        slot = arena.try_take()
        assert slot is not None
        header = kv_pb2.SegmentHeader(transfer_id="t", dtype="float32", payload_bytes=SLOT_BYTES)
        channel.send(seal(header, slot.view), done.append)
    receiving.wait("the loss", lambda: bool(reasons) and len(done) == 8)
    assert "stalled" in reasons[0] or "closed" in reasons[0]
    assert done[0] is None
    assert done[-1] is not None
    channel.close()


def test_with_the_last_slot_that_is_still_written_the_engine_ends() -> None:
    """Else all senders would wait for ever. UCX on CPUs cancels every receive, so its part is played."""

    class Uncancelled:
        window = 1

        def begin(self, view: memoryview, deadline_s: float) -> None:
            pass

        def finish(self) -> None:
            raise ConnectionLost("stalled")

        def give_up(self) -> list[bool]:
            return [True]

    def payloads(connected: socket.socket) -> contextlib.AbstractContextManager[Payloads]:
        return contextlib.nullcontext(Uncancelled())

    arena = StagingArena(2, SLOT_BYTES)
    receiver = NetworkReceiver(ME, LAYOUT, arena, lambda: None, SETTINGS, payloads)
    endpoint = receiver.listen("127.0.0.1", "127.0.0.1")
    ends: list[str] = []

    def has_ended() -> bool:
        try:
            receiver.poll()
        except RuntimeError as error:
            ends.append(str(error))
        return bool(ends)

    for taken in (1, 2):
        with socket.create_connection(split_endpoint(endpoint), timeout=5) as client:
            greet(client, HELLO, time.monotonic() + 5)
            client.sendall(announcement(1000))
            assert client.recv(1) == b"", "the channel is lost"
        assert arena.used_bytes == taken * SLOT_BYTES
        if taken == 1:
            assert not has_ended()
    assert has_ended()
    assert "--transfer" in ends[0]
    receiver.close()


def test_without_its_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ucxx(name: str, *arguments: object, **named: object) -> object:
        if name.startswith("ucxx"):
            raise ImportError("No module named 'ucxx'")
        return real(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_ucxx)
    with pytest.raises(ValueError, match=r"pdserve\[ucx\]"):
        load_ucx()
