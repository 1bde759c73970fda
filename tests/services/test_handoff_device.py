"""Hand-offs whose packing and unpacking a device does: started by the engine's thread, over some time later.

The device is played by the test: a copy reads and writes when the test lets it, as a kernel would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kv_transfer.backends import load, load_all
from kv_transfer.backends.base import ChannelLost
from kv_transfer.block_mix import block_mix64, mix_words
from kv_transfer.copies import AT_ONCE, DeviceCopy
from kv_transfer.layout import KVRange
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_port import ReceiverSettings
from kv_transfer.sender import Sender
from tests.services import handoff_world
from tests.services.handoff_world import LAYERS, LEASE_S, D, P, World, layout


class Copy:
    """Ends when it is told to; what it moves, it moves then."""

    def __init__(self, move: Callable[[], int]) -> None:
        self._move = move
        self.is_started = False
        self.may_end = threading.Event()

    def wait(self) -> int:
        assert self.is_started
        assert self.may_end.wait(10)
        return self._move()


def start(copies: list[Copy]) -> None:
    waiting = [copy for copy in copies if not copy.is_started]
    assert waiting
    for copy in waiting:
        copy.is_started = True


class SenderPort(handoff_world.SenderPort):
    copies: list[Copy]

    def pack(self, request_id: str, part: KVRange, out: memoryview, after: object) -> DeviceCopy:  # type: ignore[override]
        kv = self.kv[request_id][part.layer_start : part.layer_end, :, :, part.token_start : part.token_end].copy()

        def move() -> int:
            out[:] = kv.tobytes()
            return block_mix64(out)

        self.packs += 1
        self.copies.append(Copy(move))
        return self.copies[-1]

    def start_copies(self) -> None:
        start(self.copies)


class ReceiverPort(handoff_world.ReceiverPort):
    copies: list[Copy]

    def write_kv(self, request_id: str, part: KVRange, payload: memoryview, dtype: str) -> DeviceCopy:  # type: ignore[override]
        blocks = self.reserved[request_id]
        target = blocks[part.layer_start : part.layer_end, :, :, part.token_start : part.token_end]

        def move() -> int:
            target[...] = np.frombuffer(payload, dtype).reshape(target.shape)
            return block_mix64(target.tobytes())

        self.copies.append(Copy(move))
        return self.copies[-1]

    def start_copies(self) -> None:
        start(self.copies)


class DeviceWorld(World):
    def __init__(self, slots: int = 4) -> None:
        super().__init__(slots=slots)
        self.p_port, self.d_port = SenderPort(self.to_d), ReceiverPort(self.to_p)
        self.p_port.copies, self.d_port.copies = [], []
        self.sender = Sender(
            P, layout(), self.p_port, {"tcp": self.p_backend}, lambda: None, self.clock, lease_s=LEASE_S
        )
        self.receiver = Receiver(
            D,
            layout(),
            self.d_port,
            {"tcp": (self.d_backend, "d:1")},
            lambda: None,
            self.clock,
            ReceiverSettings(lease_s=LEASE_S),
            device_writes=True,
        )

    def end_copies(self, copies: list[Copy]) -> None:
        for copy in copies:
            copy.may_end.set()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline_s, f"never: {what}"
            self.polls()
            time.sleep(0.001)

    @property
    def sent(self) -> int:
        return sum(len(channel.segments) for channel in self.p_backend.channels)

    def close(self) -> None:
        self.end_copies(self.p_port.copies + self.d_port.copies)
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def world() -> Iterator[DeviceWorld]:
    world = DeviceWorld()
    yield world
    world.close()


def pack_all(world: DeviceWorld, tokens: int = 16) -> None:
    """A ticket, all layers computed and packed, segments on their way."""
    world.start("r", tokens)
    world.compute("r", tokens)
    packs = world.p_port.packs
    world.end_copies(world.p_port.copies)
    world.until(lambda: world.sent == packs, "what was packed is sent")


def test_a_segment_leaves_when_it_is_packed_and_not_before(world: DeviceWorld) -> None:
    world.start("r", 16)
    world.compute("r", 16)
    assert world.p_port.packs == 2  # two groups of layers, both begun at once
    world.end_copies(world.p_port.copies[:1])
    world.until(lambda: world.sent == 1, "the first one is sent")
    world.sender.poll()
    assert world.sent == 1


def test_kv_that_a_device_moved_is_published_when_all_of_it_was_checked(world: DeviceWorld) -> None:
    pack_all(world)
    world.end_prefill("r")
    world.run()
    assert len(world.d_port.copies) == 2
    assert not world.d_port.published
    world.end_copies(world.d_port.copies[:1])
    world.until(lambda: world.receiver.counters.segments == 1, "one is checked")
    assert not world.d_port.published
    world.end_copies(world.d_port.copies)
    world.until(lambda: bool(world.d_port.published), "both are")
    world.run()
    world.assert_published("r", 16)
    world.assert_at_rest()


def test_a_few_go_on_while_others_are_still_copied() -> None:
    """Both sides work at once: what was started together is sent, and let go of, and does not wait for the rest."""
    world = DeviceWorld(slots=8)
    count = AT_ONCE + 2
    world.start("r", 16 * count)
    world.compute("r", 16 * count, layers_at_once=LAYERS)
    assert world.p_port.packs == count
    world.end_copies(world.p_port.copies[:AT_ONCE])
    world.until(lambda: world.sent == AT_ONCE, "the first few are sent")
    world.end_copies(world.p_port.copies)
    world.until(lambda: world.sent == count, "the others are, too")
    while world.deliver_segment(world.p_backend.channels[0]):
        pass
    world.receiver.poll()
    assert len(world.d_port.copies) == count
    world.end_copies(world.d_port.copies[:AT_ONCE])
    world.until(lambda: world.d_arena.free_slots == 8 - 2, "the first few are read")
    world.end_prefill("r")
    world.end_copies(world.d_port.copies)
    world.run()
    world.until(lambda: bool(world.d_port.published), "all is there")
    world.assert_published("r", 16 * count)
    world.close()


def test_a_slot_stays_taken_while_the_device_reads_it(world: DeviceWorld) -> None:
    pack_all(world)
    world.run()
    assert world.d_arena.free_slots == 2
    world.end_copies(world.d_port.copies)
    world.until(lambda: world.d_arena.used_bytes == 0, "both were read")


def test_a_slot_that_changes_while_it_is_read_fails_the_transfer(world: DeviceWorld) -> None:
    """A sender that takes the receiver for gone and uses the slot again: what was written there is another segment."""
    pack_all(world)
    world.run()
    taken = world.d_arena.try_take()
    assert taken is not None
    np.frombuffer(world.d_arena._memory, np.uint8)[: 2 * world.d_arena.slot_bytes] ^= 1  # both slots that are read
    taken.give_back()
    world.end_copies(world.d_port.copies)
    world.until(lambda: "r" in world.d_port.failed, "the digest tells")
    assert "digest" in world.d_port.failed["r"]
    world.run()
    world.assert_at_rest()


def test_a_channel_that_is_lost_while_the_last_segment_is_checked_fails_nothing(world: DeviceWorld) -> None:
    pack_all(world)
    world.end_prefill("r")
    world.run()
    assert len(world.d_port.copies) == 2
    world.d_backend.arrivals.append(ChannelLost(world.p_backend.channels[0].origin, "reset by peer"))
    world.p_backend.channels[0].break_off("reset by peer")
    world.run()
    assert not world.d_port.failed
    world.end_copies(world.d_port.copies)
    world.until(lambda: bool(world.d_port.published), "all is there")
    world.run()
    assert world.p_port.done == ["r"]
    world.assert_at_rest()


def test_a_channel_that_is_lost_before_the_last_segment_came_fails_its_transfer(world: DeviceWorld) -> None:
    pack_all(world)
    world.frames_to_d()
    world.deliver_segment(world.p_backend.channels[0])
    world.d_backend.arrivals.append(ChannelLost(world.p_backend.channels[0].origin, "reset by peer"))
    world.receiver.poll()
    assert "reset by peer" in world.d_port.failed["r"]
    world.end_copies(world.d_port.copies)
    world.until(lambda: world.d_arena.used_bytes == 0, "the slot is free all the same")


def test_a_request_that_ends_while_its_kv_is_written_is_not_published(world: DeviceWorld) -> None:
    pack_all(world)
    world.end_prefill("r")
    world.run()
    world.d_port.reserved.pop("r")
    world.receiver.request_ended("r", "client")
    world.end_copies(world.d_port.copies)
    world.until(lambda: world.d_arena.used_bytes == 0, "the slots are free all the same")
    world.run()
    assert not world.d_port.published
    assert "client" in world.p_port.failed["r"]
    world.assert_at_rest()


def test_a_segment_that_comes_twice_is_written_once(world: DeviceWorld) -> None:
    pack_all(world)
    segment, _ = world.p_backend.channels[0].segments[0]
    world.p_backend.channels[0].segments.insert(1, (segment, lambda error: None))
    world.end_prefill("r")
    world.run()
    assert len(world.d_port.copies) == 2
    assert world.receiver.counters.segments_dropped == {"duplicate": 1}
    world.end_copies(world.d_port.copies)
    world.until(lambda: bool(world.d_port.published), "all is there")
    world.assert_published("r", 16)


def test_an_error_of_the_device_ends_the_engine(world: DeviceWorld) -> None:
    world.start("r", 16)
    world.compute("r", 16)

    def fail() -> int:
        raise RuntimeError("an illegal memory access was encountered")

    world.p_port.copies[0]._move = fail
    world.end_copies(world.p_port.copies)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.until(lambda: False, "poll raises it")


def test_block_mix_is_of_every_word_and_its_place() -> None:
    """Against the formula, one word at a time, in Python's own integers."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    total, mod = 0, 2**64
    for i, word in enumerate(words.tolist()):
        h = (word + (i + 1) * 0x9E3779B97F4A7C15) * 0xC2B2AE3D27D4EB4F % mod
        h = (h ^ (h >> 32)) * 0x94D049BB133111EB % mod
        total += h ^ (h >> 29)
    assert block_mix64(words.tobytes()) == total % mod
    assert (mix_words(words[:300]) + mix_words(words[300:], 300)) % mod == total % mod
    swapped = words[[1, 0, *range(2, 1000)]]
    assert block_mix64(swapped.tobytes()) != total % mod
    assert block_mix64(words.tobytes()[:-3]) == block_mix64(words.tobytes()[:-3] + bytes(3))


def test_auto_takes_backends_of_gpus_only_where_there_is_one() -> None:
    assert [name for name in load_all("auto", "cpu") if name != "ucx"] == ["shm", "tcp"]  # ucx: with RDMA devices
    with pytest.raises(ValueError, match="need a CUDA device; use another --transfer"):
        load("cuda_ipc", "cpu")
    with pytest.raises(ValueError, match="need a CUDA device; use another --transfer"):
        load("nccl", "cpu")


def test_why_no_backend_reaches_the_sender_is_said(world: DeviceWorld) -> None:
    world.d_backend.unreachable = lambda probe: f"the probe {probe!r} opens nothing here"  # type: ignore[method-assign]
    world.start("r", 16)
    assert "the probe '' opens nothing here" in world.d_port.failed["r"]
    assert "the probe '' opens nothing here" in world.p_port.failed["r"]
    world.assert_at_rest()
