"""The nccl backend's protocol without a GPU: go before each send, aborts, slots that are free only afterwards.

NCCL is played by ``Wire``: a send and a receive of a pair meet in order, unless the test holds them apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from kv_transfer.backends import nccl
from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.backends.nccl import NcclReceiver, NcclSender, same_gpu
from kv_transfer.backends.socket_channel import SocketSettings
from kv_transfer.layout import make_layout
from kv_transfer.nccl import ID_BYTES, NcclError, Still
from kv_transfer.segment import seal_mixed
from kv_transfer.staging import DeviceView, SlotPool, StagingSlot
from pdserve.v1 import kv_pb2

SETTINGS = SocketSettings(connect_timeout_s=2.0, handshake_timeout_s=2.0, stall_timeout_s=2.0)
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


@dataclass
class Wire:
    """Between the two ranks."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    sends: list[DeviceView] = field(default_factory=list)
    receives: list[DeviceView] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    """How many messages were received at once."""
    aborted: set[int] = field(default_factory=set)
    may_move: bool = True


class Move:
    """Up to the ``index``-th message of its rank."""

    def __init__(self, wire: Wire, rank: int, index: int) -> None:
        self.wire, self.rank, self.index = wire, rank, index

    def wait(self) -> int:
        wire = self.wire
        with wire.changed:
            met = wire.changed.wait_for(
                lambda: (
                    self.rank in wire.aborted
                    or (wire.may_move and min(len(wire.sends), len(wire.receives)) > self.index)
                ),
                10,
            )
        assert met, "it spins for ever"
        return 0


class Communicator:
    wire = Wire()
    num_bytes = 0

    def __init__(self, library: object, runtime: object, unique_id: bytes, rank: int, still: Still) -> None:
        assert unique_id == b"i" * ID_BYTES
        self.rank = rank
        self._wire = self.wire

    def send(self, views: Sequence[DeviceView], still: Still) -> Move:
        return self._post(self._wire.sends, views)

    def receive(self, views: Sequence[DeviceView], still: Still) -> Move:
        self._wire.groups.append(len(views))
        return self._post(self._wire.receives, views)

    def abort(self) -> None:
        with self._wire.changed:
            self._wire.aborted.add(self.rank)
            self._wire.changed.notify_all()

    def _post(self, queue: list[DeviceView], views: Sequence[DeviceView]) -> Move:
        with self._wire.changed:
            queue += views
            self._wire.changed.notify_all()
            return Move(self._wire, self.rank, len(queue) - 1)


class Library:
    def new_id(self) -> bytes:
        return b"i" * ID_BYTES


class Runtime:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


class Staging(SlotPool):
    def __init__(self, num_slots: int, gpu: str) -> None:
        super().__init__(num_slots, SLOT_BYTES)
        self.runtime = Runtime(gpu)

    def _view(self, start: int) -> DeviceView:
        return DeviceView(start, self.slot_bytes)


class World:
    def __init__(self, receiver_slots: int, gpus: tuple[str, str] = ("GPU-a", "GPU-b")) -> None:
        self.p_arena, self.d_arena = Staging(8, gpus[0]), Staging(receiver_slots, gpus[1])
        library = Library()
        self.receiver = NcclReceiver(ME, LAYOUT, self.d_arena, lambda: None, library, SETTINGS)  # type: ignore[arg-type]
        sender = NcclSender(self.p_arena, library, SETTINGS)  # type: ignore[arg-type]
        self.lost: list[str] = []
        self.channel = sender.connect(self.receiver.listen("127.0.0.1", "127.0.0.1"), HELLO, self.lost.append)
        self.done: list[tuple[int, str | None]] = []
        self.came: list[Arrived | ChannelLost] = []

    def send(self, count: int) -> None:
        """In one go."""
        segments = []
        for index in range(count):
            slot = self.p_arena.try_take()
            assert slot is not None
            header = kv_pb2.SegmentHeader(transfer_id="t", index=index, dtype="float32", payload_bytes=64)
            segments.append((seal_mixed(header, slot.view[:64], mix=index), self._on_done(index, slot)))
        self.channel.send_all(segments)

    def _on_done(self, index: int, slot: StagingSlot) -> Callable[[str | None], None]:
        def on_done(error: str | None) -> None:
            self.done.append((index, error))
            slot.give_back()

        return on_done

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline_s, f"not within 30 s: {what}; came: {self.came}; lost: {self.lost}"
            time.sleep(0.005)
            self.came += self.receiver.poll()

    @property
    def segments(self) -> list[Arrived]:
        return [item for item in self.came if isinstance(item, Arrived)]

    @property
    def losses(self) -> list[str]:
        return [item.reason for item in self.came if isinstance(item, ChannelLost)]

    def close(self) -> None:
        self.channel.close()
        self.receiver.close()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(nccl, "Communicator", type("Communicator", (Communicator,), {"wire": wire}))
    return wire


@pytest.fixture
def world(wire: Wire) -> Iterator[World]:
    world = World(receiver_slots=2)
    yield world
    world.close()


def test_segments_arrive_in_order_as_slots_get_free(world: World, wire: Wire) -> None:
    world.send(6)
    world.wait("two segments", lambda: len(world.segments) == 2)
    time.sleep(0.1)
    assert len(wire.sends) == 2  # the others are announced: no send spins where no slot is free
    for n in range(6):
        world.wait("the next", lambda n=n: len(world.segments) > n)  # type: ignore[misc]
        world.segments[n].slot.give_back()
    assert [arrived.header.index for arrived in world.segments] == list(range(6))
    world.wait("all slots are back", lambda: world.done == [(n, None) for n in range(6)])
    assert world.p_arena.used_bytes == world.d_arena.used_bytes == 0


def test_what_was_announced_together_moves_together_in_half_of_the_slots_at_most(wire: Wire) -> None:
    world = World(receiver_slots=8)
    world.send(8)
    world.wait("all of them", lambda: len(world.segments) == 8 and len(world.done) == 8)
    assert wire.groups == [4, 4]
    assert [arrived.header.index for arrived in world.segments] == list(range(8))
    assert [view.address for view in wire.receives] == [arrived.slot.view.address for arrived in world.segments]
    assert [view.address for view in wire.sends] == [SLOT_BYTES * n for n in range(8)]
    world.close()


def test_a_message_that_does_not_come_costs_its_slot_until_the_abort_only(world: World, wire: Wire) -> None:
    wire.may_move = False
    world.send(1)
    world.wait("the receive is posted", lambda: len(wire.receives) == 1)
    assert world.d_arena.used_bytes == SLOT_BYTES
    world.wait("both sides give up", lambda: bool(world.losses) and bool(world.lost))
    assert wire.aborted == {0, 1}
    assert not world.segments
    world.wait("the slots are back", lambda: world.d_arena.used_bytes == world.p_arena.used_bytes == 0)
    assert "stalled" in world.lost[0] + world.losses[0]
    assert world.done == [(0, world.lost[0])]  # not as if it had been sent


def test_a_dead_sender_is_seen_at_once_and_its_message_aborted(world: World, wire: Wire) -> None:
    wire.may_move = False
    world.send(1)
    world.wait("the receive is posted", lambda: len(wire.receives) == 1)
    since_s = time.monotonic()
    world.channel.close()
    world.wait("the loss", lambda: bool(world.losses))
    assert "closed by the sender" in world.losses[0]
    assert time.monotonic() - since_s < SETTINGS.stall_timeout_s
    world.wait("the slots are back", lambda: world.d_arena.used_bytes == world.p_arena.used_bytes == 0)
    assert wire.aborted == {0, 1}


def test_a_receiver_that_closes_ends_what_was_announced(world: World, wire: Wire) -> None:
    world.send(5)
    world.wait("two segments", lambda: len(world.segments) == 2)
    world.receiver.close()
    world.wait("the sender hears of it", lambda: bool(world.lost) and len(world.done) == 5)
    assert [index for index, error in world.done if error is None] == [0, 1]
    assert world.p_arena.used_bytes == 0


def test_an_abort_that_fails_strands_no_slot(world: World, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    world.send(5)
    world.wait("two segments", lambda: len(world.segments) == 2)
    really = Communicator.abort

    def abort(self: Communicator) -> None:
        before = set(wire.aborted)
        really(self)
        if self.rank not in before:
            raise NcclError("ncclCommAbort: unhandled cuda error (1)")

    monkeypatch.setattr(Communicator, "abort", abort)
    world.receiver.close()
    world.wait("the sender hears of it", lambda: bool(world.lost) and len(world.done) == 5)
    assert [index for index, error in world.done if error is None] == [0, 1]
    assert world.p_arena.used_bytes == 0
    for arrived in world.segments:
        arrived.slot.give_back()
    assert world.d_arena.used_bytes == 0


def test_what_torch_could_not_begin_is_not_told_as_sent(
    world: World, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: Communicator, views: Sequence[DeviceView], still: Still) -> Move:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Communicator, "send", send)
    world.send(3)
    world.wait("the loss", lambda: bool(world.lost) and bool(world.losses) and len(world.done) == 3)
    assert "out of memory" in world.lost[0]
    assert world.done == [(n, world.lost[0]) for n in range(3)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_device_is_the_reason_of_the_loss(
    world: World, wire: Wire, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Its slots are not used again: nothing that the device holds can be trusted."""
    really = Move.wait

    def wait(self: Move) -> int:
        if self.rank == rank:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return really(self)

    monkeypatch.setattr(Move, "wait", wait)
    world.send(1)
    world.wait("the loss", lambda: bool(world.lost) and bool(world.losses))
    assert "illegal memory access" in (world.lost + world.losses)[rank]
    assert (world.p_arena, world.d_arena)[rank].used_bytes == SLOT_BYTES


@pytest.mark.parametrize("refused", [1, 2])
def test_without_a_thread_to_wait_each_segment_is_told_of_once(
    world: World, wire: Wire, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Each side starts one with its first message; ``refused`` of them are not."""
    started = threading.Thread.start
    left = [RuntimeError("can't start new thread")] * refused

    def start(thread: threading.Thread) -> None:
        if thread.name == "kv-copies" and left:
            raise left.pop()
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    wire.may_move = False
    world.send(3)
    world.wait("the loss", lambda: bool(world.lost) and bool(world.losses) and len(world.done) == 3)
    assert "can't start new thread" in world.lost[0] + world.losses[0]
    assert sorted(world.done) == [(n, world.lost[0]) for n in range(3)]
    world.wait("the slots are back", lambda: world.d_arena.used_bytes == world.p_arena.used_bytes == 0)


def test_a_receiver_without_slots_is_lost_after_a_while(world: World, wire: Wire) -> None:
    world.send(5)  # it has two slots, and nobody frees them
    world.wait("the sender gives up", lambda: bool(world.lost) and len(world.done) == 5)
    assert "stalled" in world.lost[0]
    assert [error for _, error in world.done][:2] == [None, None]
    assert all(error for _, error in world.done[2:])


def test_one_gpu_is_refused_with_the_remedy(wire: Wire) -> None:
    world = World(receiver_slots=2, gpus=("GPU-a", "GPU-a"))
    world.send(1)
    world.wait("the refusal", lambda: bool(world.lost))
    assert "both workers are on GPU GPU-a" in world.lost[0]
    assert "use cuda_ipc" in world.lost[0]
    assert "use cuda_ipc" in world.receiver.unreachable("GPU-a")
    assert world.receiver.unreachable("GPU-b") == ""
    assert world.receiver.unreachable("")
    assert same_gpu("GPU-a", "GPU-b") == ""
    assert world.done == [(0, world.lost[0])]
    world.close()
