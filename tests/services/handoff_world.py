"""A prefill side and a decode side in one thread, with everything between them in the test's hands.

Frames and segments wait in lists until the test delivers them (or loses, repeats, bends them); time stands until the
test moves it. The KV is real bytes, so that what the receiver published can be compared with what the sender had.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.backends.base import Arrived, ChannelLost, OnDone, OnLost, Origin
from kv_transfer.layout import KVRange, make_layout
from kv_transfer.protocol import Frame
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_port import ReceiverSettings
from kv_transfer.segment import SealedSegment, parse_header
from kv_transfer.sender import Sender
from kv_transfer.staging import StagingArena
from kv_transfer.transfer import Moved, TransferKey
from pdserve.v1 import kv_pb2

LAYERS, HEADS, DIM = 4, 2, 8
CELL_BYTES = 2 * HEADS * DIM * 4
P_PEER = "stream-of-p"
D_PEER = "stream-to-d"
P = kv_pb2.WorkerIdentity(worker_id="p", incarnation=1)
D = kv_pb2.WorkerIdentity(worker_id="d", incarnation=2)
LEASE_S = 10.0
KEEP_S = 1.0


def layout(**changed: object) -> kv_pb2.KVLayout:
    values: dict[str, object] = {
        "model_fingerprint": "m",
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "hash_block_tokens": 16,
        "block_size": 16,
        "dtype": "float32",
    }
    return make_layout(**(values | changed))  # type: ignore[arg-type]


def kv_of(request_id: str, tokens: int) -> np.ndarray:
    """[L, 2, K, T, D] float32, another one for each request."""
    seed = zlib.crc32(request_id.encode())
    return np.random.default_rng(seed).standard_normal((LAYERS, 2, HEADS, tokens, DIM), dtype=np.float32)


def transfer_of(request_id: str) -> str:
    return f"t-{request_id.split('/')[0]}"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Channel:
    """The sender's end; what is sent waits in ``segments``."""

    hello: kv_pb2.DataHello
    on_lost: OnLost
    segments: list[tuple[SealedSegment, OnDone]] = field(default_factory=list)
    closed: bool = False
    has_closed: threading.Event = field(default_factory=threading.Event)
    lost: str | None = None

    def __post_init__(self) -> None:
        self.origin = Origin(self.hello.sender)

    def send(self, segment: SealedSegment, on_done: OnDone) -> None:
        if self.lost is not None:
            on_done(self.lost)
        else:
            self.segments.append((segment, on_done))

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        for segment, on_done in segments:
            self.send(segment, on_done)

    def close(self) -> None:
        self.closed = True
        self._drop("closed")
        self.has_closed.set()

    def break_off(self, reason: str) -> None:
        self._drop(reason)
        if not self.closed:
            self.on_lost(reason)

    def _drop(self, reason: str) -> None:
        self.lost = reason
        unsent, self.segments = self.segments, []
        for _, on_done in unsent:
            on_done(reason)


class SenderBackend:
    probe = ""

    def __init__(self, arena: StagingArena) -> None:
        self.arena = arena
        self.channels: list[Channel] = []

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> Channel:
        self.channels.append(Channel(hello, on_lost))
        return self.channels[-1]

    def close(self) -> None:
        pass


class ReceiverBackend:
    def __init__(self, max_segment_bytes: int) -> None:
        self.max_segment_bytes = max_segment_bytes
        self.arrivals: list[Arrived | ChannelLost] = []
        self.dropped: list[tuple[str, int]] = []

    def listen(self, host: str, advertised_host: str) -> str:
        return f"{advertised_host}:1"

    def unreachable(self, probe: str) -> str:
        return ""

    def poll(self) -> list[Arrived | ChannelLost]:
        out, self.arrivals = self.arrivals, []
        return out

    def drop_sender(self, worker_id: str, incarnation: int) -> None:
        self.dropped.append((worker_id, incarnation))

    def close(self) -> None:
        pass


class SenderPort:
    """P's engine and control stream."""

    def __init__(self, to_d: list[Frame]) -> None:
        self._to_d = to_d
        self.sent: list[tuple[str, Frame]] = []
        self.granted: dict[str, int] = {}
        self.deferred: dict[str, float] = {}
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.kv: dict[str, np.ndarray] = {}
        """A request's KV is here as long as P's blocks are."""
        self.packs = 0

    def send(self, peer: str, frame: Frame) -> None:
        self.sent.append((peer, frame))
        if peer == D_PEER:
            self._to_d.append(frame)

    def ticket_granted(self, request_id: str, cached_tokens: int) -> None:
        self.granted[request_id] = cached_tokens

    def ticket_deferred(self, request_id: str, retry_after_s: float) -> None:
        self.deferred[request_id] = retry_after_s

    def pack(self, request_id: str, part: KVRange, out: memoryview, after: object) -> None:
        kv = self.kv[request_id]  # KeyError: packed after its blocks were freed
        piece = kv[part.layer_start : part.layer_end, :, :, part.token_start : part.token_end]
        data = np.ascontiguousarray(piece).tobytes()
        out[:] = data
        self.packs += 1

    def start_copies(self) -> None:
        raise AssertionError("no device copies here")

    def transfer_done(self, request_id: str) -> None:
        self._free(request_id)
        self.done.append(request_id)

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self._free(request_id)
        assert request_id not in self.failed
        self.failed[request_id] = reason

    def _free(self, request_id: str) -> None:
        self.kv.pop(request_id, None)
        assert request_id not in self.done, "a request ended twice"


class ReceiverPort:
    """D's engine and control stream. ``room``: how many reservations fit."""

    def __init__(self, to_p: list[Frame]) -> None:
        self._to_p = to_p
        self.sent: list[tuple[str, Frame]] = []
        self.room = 100
        self.too_large: set[str] = set()
        """Requests that do not fit now."""
        self.cached: dict[str, int] = {}
        """Tokens that a reservation finds cached."""
        self.tokens: dict[str, int] = {}
        self.reserved: dict[str, np.ndarray] = {}
        self.kept: dict[str, np.ndarray] = {}
        """By transfer id."""
        self.taken_over: list[str] = []
        self.published: dict[str, np.ndarray] = {}
        self.finished: list[str] = []
        self.first_outputs: dict[str, bytes] = {}
        self.transfer_s: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def send(self, peer: str, frame: Frame) -> None:
        self.sent.append((peer, frame))
        if peer == P_PEER:
            self._to_p.append(frame)

    def reserve(self, request_id: str) -> int | None:
        if request_id in self.taken_over:
            return self.cached.get(request_id, 0)
        if len(self.reserved) + len(self.kept) >= self.room or request_id in self.too_large:
            return None
        assert request_id not in self.reserved
        self.reserved[request_id] = np.full((LAYERS, 2, HEADS, self.tokens[request_id], DIM), np.nan, np.float32)
        return self.cached.get(request_id, 0)

    def write_kv(self, request_id: str, part: KVRange, payload: memoryview, dtype: str) -> None:
        target = self.reserved[request_id][part.layer_start : part.layer_end, :, :, part.token_start : part.token_end]
        target[...] = np.frombuffer(payload, dtype).reshape(target.shape)

    def start_copies(self) -> None:
        raise AssertionError("no device copies here")

    def publish(self, request_id: str, first_output: bytes, moved: Moved) -> None:
        self._end(request_id)
        self.published[request_id] = self.reserved.pop(request_id)
        self.first_outputs[request_id] = first_output
        self.transfer_s[request_id] = moved.exposed_s

    def finish(self, request_id: str, first_output: bytes) -> None:
        self._end(request_id)
        self.reserved.pop(request_id, None)
        self.finished.append(request_id)
        self.first_outputs[request_id] = first_output

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self._end(request_id)
        self.reserved.pop(request_id, None)
        self.failed[request_id] = reason

    def keep(self, request_id: str) -> bool:
        if request_id not in self.reserved:
            return False
        self.kept[transfer_of(request_id)] = self.reserved.pop(request_id)
        return True

    def take_over(self, request_id: str) -> bool:
        blocks = self.kept.pop(transfer_of(request_id))
        if blocks.shape[3] != self.tokens[request_id]:
            return False
        self.reserved[request_id] = np.full_like(blocks, np.nan)
        self.taken_over.append(request_id)
        return True

    def drop_kept(self, transfer_id: str) -> None:
        del self.kept[transfer_id]

    def release(self, request_id: str) -> None:
        self.taken_over.remove(request_id)
        del self.reserved[request_id]

    def _end(self, request_id: str) -> None:
        assert request_id not in self.published, "a request ended twice"
        assert request_id not in self.finished, "a request ended twice"
        assert request_id not in self.failed, "a request ended twice"


class World:
    """Both sides. ``run`` delivers until nothing moves."""

    def __init__(
        self,
        *,
        slots: int = 4,
        slot_bytes: int = 16 * LAYERS * CELL_BYTES,
        sender_layout: kv_pb2.KVLayout | None = None,
        receiver_layout: kv_pb2.KVLayout | None = None,
    ) -> None:
        self.clock = Clock()
        self.to_d: list[Frame] = []
        self.to_p: list[Frame] = []
        self.wakeups: Counter[str] = Counter()
        self.p_arena = StagingArena(slots, slot_bytes)
        self.d_arena = StagingArena(slots, slot_bytes)
        self.p_port = SenderPort(self.to_d)
        self.d_port = ReceiverPort(self.to_p)
        self.p_backend = SenderBackend(self.p_arena)
        self.d_backend = ReceiverBackend(slot_bytes)
        self.sender = Sender(
            P,
            sender_layout or layout(),
            self.p_port,
            {"tcp": self.p_backend},
            lambda: self.wakeups.update(["p"]),
            self.clock,
            lease_s=LEASE_S,
        )
        self.receiver = Receiver(
            D,
            receiver_layout or layout(),
            self.d_port,
            {"tcp": (self.d_backend, "d:1")},
            lambda: self.wakeups.update(["d"]),
            self.clock,
            ReceiverSettings(lease_s=LEASE_S, keep_s=KEEP_S),
        )

    # ---- what engines do

    def add_to_d(self, request_id: str, tokens: int, attempt: int = 1, deadline_s: float = 600.0) -> TransferKey:
        key = TransferKey(transfer_of(request_id), attempt)
        self.d_port.tokens[request_id] = tokens
        self.receiver.request_added(request_id, key, "p", 1, tokens, self.clock.now_s + deadline_s)
        return key

    def add_to_p(
        self, request_id: str, tokens: int, attempt: int = 1, deadline_s: float = 600.0, no_kv: bool = False
    ) -> TransferKey:
        key = TransferKey(transfer_of(request_id), attempt)
        self.p_port.kv[request_id] = kv_of(request_id, tokens)
        self.sender.want_ticket(request_id, key, D_PEER, 2, tokens, self.clock.now_s + deadline_s, no_kv)
        return key

    def compute(self, request_id: str, tokens: int, start: int = 0, layers_at_once: int = 2) -> None:
        for layer in range(0, LAYERS, layers_at_once):
            self.sender.kv_computed(request_id, KVRange(start, tokens, layer, min(layer + layers_at_once, LAYERS)))

    def end_prefill(self, request_id: str, finished: bool = False) -> None:
        self.sender.prefill_ended(request_id, b"token 0 of " + request_id.encode(), finished)

    # ---- what networks do

    def frames_to_d(self) -> None:
        while self.to_d:
            self.receiver.on_frame(P_PEER, self.to_d.pop(0))

    def frames_to_p(self) -> None:
        while self.to_p:
            self.sender.on_frame(D_PEER, self.to_p.pop(0))

    def deliver_segment(
        self, channel: Channel, bend: Callable[[Arrived], Arrived] | None = None, index: int = 0
    ) -> bool:
        """Move one segment into D's staging; False when there is none, or no room."""
        if not channel.segments:
            return False
        slot = self.d_arena.try_take()
        if slot is None:
            return False
        segment, on_done = channel.segments.pop(index)
        slot.view[: len(segment.payload)] = segment.payload
        arrived = Arrived(channel.origin, segment.header, parse_header(segment.header), segment.digest, slot)
        self.d_backend.arrivals.append(arrived if bend is None else bend(arrived))
        on_done(None)
        return True

    def polls(self) -> None:
        self.sender.poll()
        self.receiver.poll()

    def run(self) -> None:
        """Everything that waits is delivered, in order."""
        for _ in range(1000):
            before = (len(self.p_port.sent), len(self.d_port.sent), self.p_port.packs)
            moved = False
            self.frames_to_d()
            self.frames_to_p()
            for channel in self.p_backend.channels:
                while self.deliver_segment(channel):
                    moved = True
                    self.polls()
            self.polls()
            if not moved and before == (len(self.p_port.sent), len(self.d_port.sent), self.p_port.packs):
                return
        raise AssertionError("it never comes to rest")

    def start(self, request_id: str, tokens: int, attempt: int = 1) -> TransferKey:
        """Added on both sides, up to the ticket."""
        key = self.add_to_d(request_id, tokens, attempt)
        self.add_to_p(request_id, tokens, attempt)
        self.frames_to_d()
        self.frames_to_p()
        return key

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def heartbeat(self) -> None:
        self.sender.on_peer_alive(D_PEER)
        self.receiver.on_peer_alive(P_PEER)

    # ---- what must hold

    @property
    def d_said(self) -> list[object]:
        return [frame.body for _, frame in self.d_port.sent]

    @property
    def p_said(self) -> list[object]:
        return [frame.body for _, frame in self.p_port.sent]

    def assert_published(self, request_id: str, tokens: int, cached: int = 0) -> None:
        got = self.d_port.published[request_id][:, :, :, cached:]
        assert np.array_equal(got, kv_of(request_id, tokens)[:, :, :, cached:])
        assert self.d_port.first_outputs[request_id] == b"token 0 of " + request_id.encode()

    def assert_at_rest(self) -> None:
        """Nothing is held by either side, once what is kept for another attempt is given up."""
        if self.d_port.kept:
            self.pass_time(KEEP_S)
            self.receiver.poll()
        assert self.sender.open_transfers == self.receiver.open_transfers == 0
        assert self.sender.leases == self.receiver.leases == 0
        assert self.p_arena.used_bytes == self.d_arena.used_bytes == 0
        assert self.receiver.parked == 0
        assert not self.d_port.reserved
        assert not self.d_port.kept
        assert not self.p_port.kv
