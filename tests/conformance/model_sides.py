"""The two engines of the protocol model (model.py), and what lies between them. All in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.backends.base import Arrived, ChannelLost, OnDone, OnLost, Origin
from kv_transfer.layout import KVRange, cell_bytes, make_layout
from kv_transfer.protocol import Frame
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_port import ReceiverSettings
from kv_transfer.segment import SealedSegment
from kv_transfer.sender import Sender
from kv_transfer.staging import StagingSlot
from kv_transfer.transfer import Moved, TransferKey
from pdserve.v1 import kv_pb2

LEASE_S = 10.0
LAYERS = 2
LAYOUT = make_layout(
    model_fingerprint="m",
    num_layers=LAYERS,
    num_kv_heads=1,
    head_dim=1,
    hash_block_tokens=1,
    block_size=1,
    dtype="float32",
)
SEGMENT_BYTES = cell_bytes(LAYOUT, "float32")


class Around(Protocol):
    """What a side sees of the world."""

    deadline: float
    to_d: list[tuple[str, Frame]]
    to_p: list[tuple[str, Frame]]

    def clock(self) -> float: ...

    def stream_of(self, p: P) -> str: ...

    def is_up(self, stream: str) -> bool: ...


class Violation(AssertionError):
    """A law does not hold."""


def require(holds: bool, law: str) -> None:
    if not holds:
        raise Violation(law)


class Arena:
    """StagingArena without a kernel."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = SEGMENT_BYTES
        self.free = [StagingSlot(i, memoryview(bytearray(SEGMENT_BYTES)), self.take_back) for i in range(num_slots)]

    def try_take(self) -> StagingSlot | None:
        return self.free.pop() if self.free else None

    def take_back(self, slots: Sequence[StagingSlot]) -> None:
        for slot in slots:
            require(slot.index not in [other.index for other in self.free], "a slot is given back once")
            self.free.append(slot)


@dataclass(eq=False)
class Channel:
    hello: kv_pb2.DataHello
    on_lost: OnLost
    segments: list[tuple[SealedSegment, OnDone]] = field(default_factory=list)
    is_open: bool = True

    def __post_init__(self) -> None:
        self.origin = Origin(self.hello.sender)

    def send(self, segment: SealedSegment, on_done: OnDone) -> None:
        if self.is_open:
            self.segments.append((segment, on_done))
        else:
            on_done("lost")

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        for segment, on_done in segments:
            self.send(segment, on_done)

    def close(self) -> None:
        self.is_open = False
        unsent, self.segments = self.segments, []
        for _, on_done in unsent:
            on_done("closed")


class SenderBackend:
    probe = ""

    def __init__(self, channels: list[Channel], arena: Arena) -> None:
        self.arena = arena
        self._channels = channels

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> Channel:
        self._channels.append(Channel(hello, on_lost))
        return self._channels[-1]

    def close(self) -> None:
        pass


class ReceiverBackend:
    max_segment_bytes = SEGMENT_BYTES

    def __init__(self) -> None:
        self.arrivals: list[Arrived | ChannelLost] = []

    def listen(self, host: str, advertised_host: str) -> str:
        return "d"

    def unreachable(self, probe: str) -> str:
        return ""

    def poll(self) -> list[Arrived | ChannelLost]:
        out, self.arrivals = self.arrivals, []
        return out

    def drop_sender(self, worker_id: str, incarnation: int) -> None:
        pass

    def close(self) -> None:
        pass


class P:
    """An incarnation of the prefill worker: its engine, and the sender's port."""

    def __init__(self, world: Around, worker_id: str, incarnation: int) -> None:
        self.world = world
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.channels: list[Channel] = []
        self.arena = Arena(1)
        self.waiting: set[str] = set()
        """Asked for a ticket; hold nothing."""
        self.deferred: set[str] = set()
        self.blocks: dict[str, int] = {}
        """Request -> layers computed; it has blocks as long as it is here. LAYERS + 1: the prefill has ended."""
        self.ended: dict[str, str] = {}
        me = kv_pb2.WorkerIdentity(worker_id=worker_id, incarnation=incarnation)
        self.sender = Sender(
            me,
            LAYOUT,
            self,
            {"x": SenderBackend(self.channels, self.arena)},  # type: ignore[dict-item]
            lambda: None,
            world.clock,
            lease_s=LEASE_S,
            answer_timeout_s=LEASE_S,
        )

    def ask(self, name: str, receiver_incarnation: int) -> None:
        self.waiting.add(name)
        self.deferred.discard(name)
        stream = self.world.stream_of(self)
        self.sender.want_ticket(name, key_of(name), stream, receiver_incarnation, 1, self.world.deadline)

    def compute(self, name: str, finished: bool) -> None:
        layer = self.blocks[name]
        if layer < LAYERS:
            self.blocks[name] += 1
            self.sender.kv_computed(name, KVRange(0, 1, layer, layer + 1))
        else:
            self.blocks[name] += 1
            self.sender.prefill_ended(name, b"token 0", finished)

    def abort(self, name: str) -> None:
        self._end(name, "aborted")
        self.sender.request_ended(name, key_of(name), self.world.stream_of(self), "client")

    def send(self, peer: str, frame: Frame) -> None:
        if peer == self.world.stream_of(self):
            self.world.to_d.append((peer, frame))

    def ticket_granted(self, request_id: str, cached_tokens: int) -> None:
        require(request_id in self.waiting, "a ticket is granted once, to who waits")
        self.waiting.remove(request_id)
        self.blocks[request_id] = 0

    def ticket_deferred(self, request_id: str, retry_after_s: float) -> None:
        self.deferred.add(request_id)

    def pack(self, request_id: str, part: KVRange, out: memoryview, after: object) -> None:
        require(request_id in self.blocks, "law 2: nothing is packed from blocks that were freed")
        out[:] = tag(self.worker_id, self.incarnation, request_id)

    def start_copies(self) -> None:
        raise AssertionError("no device copies here")

    def transfer_done(self, request_id: str) -> None:
        self._end(request_id, "done")

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self._end(request_id, "failed")

    def _end(self, name: str, how: str) -> None:
        require(name not in self.ended, "law 1: a request ends once on P")
        self.ended[name] = how
        self.waiting.discard(name)
        self.deferred.discard(name)
        self.blocks.pop(name, None)


class D:
    """An incarnation of the decode worker: its engine, and the receiver's port."""

    def __init__(self, world: Around, incarnation: int, room: int) -> None:
        self.world = world
        self.incarnation = incarnation
        self.room = room
        self.arena = Arena(1)
        self.expected: dict[str, tuple[str, int]] = {}
        """Request -> the worker, and its incarnation, that it was told of."""
        self.reserved: dict[str, dict[int, bytes]] = {}
        """Request -> what was written into its blocks, by layer."""
        self.kept: set[str] = set()
        """Transfers whose blocks wait for the next attempt."""
        self.taken_over: set[str] = set()
        self.num_taken_over = 0
        self.ended: dict[str, str] = {}
        self.backend = ReceiverBackend()
        me = kv_pb2.WorkerIdentity(worker_id="d", incarnation=incarnation)
        self.receiver = Receiver(
            me,
            LAYOUT,
            self,
            {"x": (self.backend, "d")},
            lambda: None,
            world.clock,
            ReceiverSettings(lease_s=LEASE_S, park_s=LEASE_S, stall_timeout_s=LEASE_S),
        )

    def add(self, name: str, sender: P) -> None:
        self.expected[name] = sender.worker_id, sender.incarnation
        self.receiver.request_added(name, key_of(name), *self.expected[name], 1, self.world.deadline)

    def retry(self, name: str) -> None:
        """The router ends this attempt, since another one comes."""
        self.receiver.keep_reservation(name)
        self.abort(name)

    def abort(self, name: str) -> None:
        self._end(name, "aborted")
        self.receiver.request_ended(name, "client")

    def send(self, peer: str, frame: Frame) -> None:
        if self.world.is_up(peer):
            self.world.to_p.append((peer, frame))

    def reserve(self, request_id: str) -> int | None:
        if request_id in self.taken_over:
            return 0
        require(request_id not in self.reserved, "one reservation a request")
        if len(self.reserved) + len(self.kept) >= self.room:
            return None
        self.reserved[request_id] = {}
        return 0

    def write_kv(self, request_id: str, part: KVRange, payload: memoryview, dtype: str) -> None:
        require(request_id in self.reserved, "law 2: nothing is written into blocks that were freed")
        content = bytes(payload)
        wanted = tag(*self.expected[request_id], request_id)
        require(content == wanted, f"laws 3 and 6: KV of {content!r} was written where {wanted!r} belongs")
        self.reserved[request_id][part.layer_start] = content

    def start_copies(self) -> None:
        raise AssertionError("no device copies here")

    def publish(self, request_id: str, first_output: bytes, moved: Moved) -> None:
        require(set(self.reserved[request_id]) == set(range(LAYERS)), "law 3: every layer is there")
        require(first_output == b"token 0", "the first token is P's")
        self._end(request_id, "published")

    def finish(self, request_id: str, first_output: bytes) -> None:
        self._end(request_id, "finished")

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self._end(request_id, "failed")

    def keep(self, request_id: str) -> bool:
        if self.reserved.pop(request_id, None) is None:
            return False
        self.taken_over.discard(request_id)
        require(request_id[0] not in self.kept, "a transfer keeps one reservation")
        self.kept.add(request_id[0])
        return True

    def take_over(self, request_id: str) -> bool:
        self.kept.remove(request_id[0])
        self.taken_over.add(request_id)
        self.num_taken_over += 1
        self.reserved[request_id] = {}  # whatever is in the blocks is not this attempt's
        return True

    def drop_kept(self, transfer_id: str) -> None:
        self.kept.remove(transfer_id)

    def release(self, request_id: str) -> None:
        self.taken_over.remove(request_id)
        del self.reserved[request_id]

    def _end(self, name: str, how: str) -> None:
        require(name not in self.ended, "law 1: a request ends once on D")
        self.ended[name] = how
        self.reserved.pop(name, None)
        self.taken_over.discard(name)


def key_of(name: str) -> TransferKey:
    """``r/2``: the second attempt of r."""
    return TransferKey(name[0], int(name[2]))


def tag(worker_id: str, incarnation: int, name: str) -> bytes:
    return f"{worker_id}{incarnation} {name}".encode().ljust(SEGMENT_BYTES)
