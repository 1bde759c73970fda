"""The tcp backend against peers that are broken, hostile or asleep: typed losses, no hang, no slot lost."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.backends.handshake import GREETING, MAGIC, WELCOME
from kv_transfer.backends.network_receiver import NetworkReceiver
from kv_transfer.backends.socket_channel import PREFIX, SocketSettings
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.layout import WIRE_VERSION, make_layout
from kv_transfer.segment import digest, seal
from kv_transfer.staging import StagingArena
from pdserve.v1 import kv_pb2

SETTINGS = SocketSettings(
    connect_timeout_s=2.0, handshake_timeout_s=1.5, stall_timeout_s=1.5, segment_timeout_s=4.0, max_connections=4
)
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
    """A listening receiver, and what came."""

    def __init__(self, slots: int = 2) -> None:
        self.arena = StagingArena(slots, SLOT_BYTES)
        self.woken = threading.Event()
        self.receiver: NetworkReceiver = TcpBackend(SETTINGS).receiver(ME, LAYOUT, self.arena, self.woken.set)
        self.endpoint = self.receiver.listen("127.0.0.1", "127.0.0.1")
        self.port = int(self.endpoint.rpartition(":")[2])
        self.came: list[Arrived | ChannelLost] = []

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
            self.woken.wait(0.02)
            self.woken.clear()
            self.came += self.receiver.poll()

    @property
    def lost(self) -> list[str]:
        return [item.reason for item in self.came if isinstance(item, ChannelLost)]

    @property
    def segments(self) -> list[Arrived]:
        return [item for item in self.came if isinstance(item, Arrived)]

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        client.settimeout(5)
        return client

    def greet(self, hello: kv_pb2.DataHello = HELLO, version: int = WIRE_VERSION) -> tuple[socket.socket, str]:
        """A connection, and the receiver's refusal."""
        client = self.connect()
        data = hello.SerializeToString()
        client.sendall(GREETING.pack(MAGIC, version, len(data)) + data)
        (length,) = WELCOME.unpack(client.recv(WELCOME.size, socket.MSG_WAITALL))
        return client, kv_pb2.DataWelcome.FromString(client.recv(length, socket.MSG_WAITALL)).refusal


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    receiving = Receiving()
    yield receiving
    receiving.receiver.close()


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def header(index: int, payload_bytes: int) -> bytes:
    return kv_pb2.SegmentHeader(
        transfer_id="t", index=index, dtype="float32", token_end=1, layer_end=1, payload_bytes=payload_bytes
    ).SerializeToString()


def packet(index: int, payload: bytes) -> bytes:
    head = header(index, len(payload))
    return PREFIX.pack(len(head), len(payload), digest(head, memoryview(payload))) + head + payload


def test_without_threads_left_connections_are_closed_and_later_ones_are_taken(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Thread.start
    refused: list[str] = []

    def start(thread: threading.Thread) -> None:
        if thread.name == "kv-receive" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with receiving.connect() as client:
        assert is_closed(client)
    client, refusal = receiving.greet()
    assert refused
    assert refusal == ""
    client.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        GREETING.pack(MAGIC, WIRE_VERSION, 1 << 30),
        GREETING.pack(MAGIC, WIRE_VERSION, 4) + b"\xff\xff\xff\xff",
        GREETING.pack(b"pdserve-xx", WIRE_VERSION, 0),
    ],
)
def test_strangers_are_closed(receiving: Receiving, garbage: bytes) -> None:
    client = receiving.connect()
    client.sendall(garbage)
    assert is_closed(client)
    ok, refusal = receiving.greet()
    assert refusal == ""
    ok.close()
    client.close()


def test_a_silent_client_is_closed(receiving: Receiving) -> None:
    client = receiving.connect()
    assert is_closed(client)
    client.close()


@pytest.mark.parametrize(
    ("hello", "version", "said"),
    [
        (HELLO, WIRE_VERSION + 1, [str(WIRE_VERSION), str(WIRE_VERSION + 1)]),
        (
            kv_pb2.DataHello(
                sender=HELLO.sender,
                layout=make_layout(
                    model_fingerprint="other",
                    num_layers=2,
                    num_kv_heads=1,
                    head_dim=8,
                    hash_block_tokens=16,
                    block_size=16,
                    dtype="float32",
                ),
                receiver_incarnation=9,
            ),
            WIRE_VERSION,
            ["'m'", "'other'"],
        ),
        (kv_pb2.DataHello(sender=HELLO.sender, layout=LAYOUT, receiver_incarnation=8), WIRE_VERSION, ["9", "8"]),
    ],
)
def test_refusals_name_both_values(
    receiving: Receiving, hello: kv_pb2.DataHello, version: int, said: list[str]
) -> None:
    client, refusal = receiving.greet(hello, version)
    assert all(word in refusal for word in said)
    assert is_closed(client)
    client.close()


@pytest.mark.parametrize(
    "lie",
    [
        PREFIX.pack(5000, 16, bytes(16)),
        PREFIX.pack(16, SLOT_BYTES + 1, bytes(16)),
        PREFIX.pack(16, 1 << 60, bytes(16)),
        PREFIX.pack(4, 16, bytes(16)) + b"\xff\xff\xff\xff",
        PREFIX.pack(len(header(0, 32)), 16, bytes(16)) + header(0, 32),
    ],
)
def test_lengths_are_checked_before_memory_is_taken(receiving: Receiving, lie: bytes) -> None:
    client, _ = receiving.greet()
    client.sendall(lie)
    assert is_closed(client)
    receiving.wait("the loss is told", lambda: bool(receiving.lost))
    assert receiving.arena.used_bytes == 0
    client.close()


def test_a_sender_that_stalls_in_a_segment_loses_its_slot(receiving: Receiving) -> None:
    client, _ = receiving.greet()
    client.sendall(packet(0, bytes(1000))[:-1])
    receiving.wait("the stall is seen", lambda: bool(receiving.lost))
    assert "stalled" in receiving.lost[0]
    assert receiving.arena.used_bytes == 0
    client.close()


def test_a_sender_that_trickles_is_lost_too(receiving: Receiving) -> None:
    client, _ = receiving.greet()
    data = packet(0, bytes(1000))
    client.sendall(data[:-200])
    for byte in data[-200:]:
        receiving.came += receiving.receiver.poll()
        if receiving.lost:
            break
        with contextlib.suppress(ConnectionError):  # it is lost just now
            client.sendall(bytes([byte]))
        time.sleep(0.1)
    receiving.wait("the loss is told", lambda: bool(receiving.lost))
    assert "deadline" in receiving.lost[0]
    assert receiving.arena.used_bytes == 0
    client.close()


def test_an_idle_sender_is_not_lost(receiving: Receiving) -> None:
    client, _ = receiving.greet()
    time.sleep(1.5 * SETTINGS.stall_timeout_s)
    client.sendall(packet(0, b"payload"))
    receiving.wait("the segment comes", lambda: bool(receiving.segments))
    assert bytes(receiving.segments[0].payload) == b"payload"
    client.close()


def test_a_dropped_sender_is_gone_at_once(receiving: Receiving) -> None:
    client, _ = receiving.greet()
    client.sendall(packet(0, bytes(1000))[:500])  # in the middle of a receive
    other, _ = receiving.greet(
        kv_pb2.DataHello(
            sender=kv_pb2.WorkerIdentity(worker_id="q", incarnation=1), layout=LAYOUT, receiver_incarnation=9
        )
    )
    receiving.receiver.drop_sender("p", 1)
    assert is_closed(client)
    other.sendall(packet(0, b"from q"))
    receiving.wait("the other goes on", lambda: bool(receiving.segments))
    client.close()
    other.close()


def test_too_many_connections(receiving: Receiving) -> None:
    clients = [receiving.greet()[0] for _ in range(SETTINGS.max_connections)]
    extra = receiving.connect()
    assert is_closed(extra)
    for client in [*clients, extra]:
        client.close()
    receiving.wait("all are gone", lambda: len(receiving.lost) == len(clients))
    again, refusal = receiving.greet()
    assert refusal == ""
    again.close()


def test_close_is_quick_whatever_the_senders_do() -> None:
    receiving = Receiving(slots=1)
    stalled, _ = receiving.greet()
    stalled.sendall(packet(0, bytes(1000))[:500])
    waiting, _ = receiving.greet()
    waiting.sendall(packet(0, bytes(1000)) * 3)  # waits for the only slot
    silent = receiving.connect()
    started_s = time.monotonic()
    receiving.receiver.close()
    assert time.monotonic() - started_s < SETTINGS.stall_timeout_s
    for client in (stalled, waiting, silent):
        client.close()


# ---- the sender's side


class Listening:
    """A receiver that welcomes, then does nothing."""

    def __init__(self, welcome: bytes | None = None) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.client: socket.socket | None = None
        data = kv_pb2.DataWelcome(receiver=ME).SerializeToString()
        self.welcome = WELCOME.pack(len(data)) + data if welcome is None else welcome

    def accept(self) -> socket.socket:
        self.client, _ = self.server.accept()
        length = GREETING.unpack(self.client.recv(GREETING.size, socket.MSG_WAITALL))[2]
        self.client.recv(length, socket.MSG_WAITALL)
        self.client.sendall(self.welcome)
        return self.client

    def close(self) -> None:
        self.server.close()
        if self.client is not None:
            self.client.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.close()


class Sending:
    def __init__(self, endpoint: str) -> None:
        self.lost = threading.Event()
        self.reasons: list[str] = []
        self.done: list[str | None] = []
        self.channel = TcpBackend(SETTINGS).sender(StagingArena(1, SLOT_BYTES)).connect(endpoint, HELLO, self.on_lost)

    def on_lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self.lost.set()

    def send(self, size: int = 1 << 20) -> None:
        payload = memoryview(bytearray(size))
        header = kv_pb2.SegmentHeader(transfer_id="t", payload_bytes=size)
        self.channel.send(seal(header, payload), self.done.append)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    sending = Sending(endpoint)
    sending.send()
    assert sending.lost.wait(30)
    assert len(sending.reasons) == 1
    assert sending.done == sending.reasons
    sending.send()  # afterwards, too
    assert len(sending.done) == 2
    sending.channel.close()


def test_a_receiver_that_takes_nothing_is_lost(listening: Listening) -> None:
    sending = Sending(listening.endpoint)
    for _ in range(20):
        sending.send()
    listening.accept()
    assert sending.lost.wait(30)
    assert "stalled" in sending.reasons[0]
    assert len(sending.done) == 20  # each exactly once
    assert sending.done[-1] is not None
    sending.channel.close()


def test_a_receiver_that_goes_while_all_is_idle_is_seen(listening: Listening) -> None:
    sending = Sending(listening.endpoint)
    listening.accept().close()
    assert sending.lost.wait(30)
    assert "closed by the receiver" in sending.reasons[0]
    sending.channel.close()


def test_something_else_answers() -> None:
    listening = Listening(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    sending = Sending(listening.endpoint)
    listening.accept()
    assert sending.lost.wait(30)
    assert "does not answer as a pdserve KV endpoint" in sending.reasons[0]
    sending.channel.close()
    listening.close()


@pytest.mark.parametrize("when", ["connecting", "idle", "sending"])
def test_close_is_quick_whatever_the_receiver_does(listening: Listening, when: str) -> None:
    sending = Sending(listening.endpoint)
    if when == "sending":
        for _ in range(20):
            sending.send()
    if when != "connecting":
        listening.accept()
    started_s = time.monotonic()
    sending.channel.close()
    assert time.monotonic() - started_s < SETTINGS.connect_timeout_s
    assert not sending.lost.wait(0.5)  # not after close
    assert len(sending.done) == (20 if when == "sending" else 0)


# ---- bits that fall over


class FlippingProxy:
    """Between a sender and a receiver; flips one bit of what the sender says, at a given offset after the hello."""

    def __init__(self, port: int, offset: int, bit: int) -> None:
        self._port = port
        self._offset = offset
        self._bit = bit
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        client, _ = self.server.accept()
        upstream = socket.create_connection(("127.0.0.1", self._port))
        with client, upstream:
            length = GREETING.unpack(head := client.recv(GREETING.size, socket.MSG_WAITALL))[2]
            upstream.sendall(head + client.recv(length, socket.MSG_WAITALL))
            (size,) = WELCOME.unpack(head := upstream.recv(WELCOME.size, socket.MSG_WAITALL))
            client.sendall(head + upstream.recv(size, socket.MSG_WAITALL))
            seen = 0
            client.settimeout(2)
            try:
                while data := bytearray(client.recv(65536)):
                    if seen <= self._offset < seen + len(data):
                        data[self._offset - seen] ^= 1 << self._bit
                    seen += len(data)
                    upstream.sendall(data)
            except OSError:
                return  # the receiver closed: it did not like what it got


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_never_makes_a_valid_segment(receiving: Receiving, seed: int) -> None:
    payload = bytearray(random.Random(seed).randbytes(300))
    sealed = seal(kv_pb2.SegmentHeader(transfer_id="t", epoch=5, payload_bytes=300), memoryview(payload))
    size = PREFIX.size + len(sealed.header) + 300
    # The first seeds walk through the prefix and the header, the others fall anywhere.
    offset = seed * 5 if seed < 10 else random.Random(seed).randrange(size)
    proxy = FlippingProxy(receiving.port, offset, seed % 8)
    sending = Sending(proxy.endpoint)
    sending.channel.send(sealed, sending.done.append)
    receiving.wait("it arrives, or the channel is lost", lambda: bool(receiving.came))
    for arrived in receiving.segments:
        assert digest(arrived.header_bytes, arrived.payload) != arrived.digest
        receiving.arena.give_back(arrived.slot)
    sending.channel.close()
    proxy.server.close()
    proxy.thread.join(5)
