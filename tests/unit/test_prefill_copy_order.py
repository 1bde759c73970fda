"""A prefill engine on a device, at random: what leaves is what was computed, and blocks are written only after that.

The real core, hand-off, sender and copies on a played device (played_device.py), which objects to any two accesses that
nothing orders. Receivers of all kinds: busy, prompt, late, refusing, lost; requests end in any way, in the middle of
anything; pool and staging are too small, so blocks and slots change hands at once.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from decode_service.engine_main import frame_to_pb
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import AddRequest, FinishReason, PeerFrame, SendKV
from kv_transfer import sender
from kv_transfer.backends.base import OnDone, OnLost
from kv_transfer.block_mix import block_mix64
from kv_transfer.layout import make_layout
from kv_transfer.protocol import Abort, Busy, Done, Frame, Refused, Ticket
from kv_transfer.segment import SealedSegment, key_of, mixed_digest, parse_header
from kv_transfer.staging import StagingArena, address_of
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2, worker_pb2
from prefill_service import engine_main
from tests.unit.fake_runner import make_message
from tests.unit.handoff_link import Clock
from tests.unit.leaks import assert_no_leak, check_books
from tests.unit.played_device import LAYERS, PlayedDevice, PlayedRunner, PlayedWaiter, played, value_of

LAYOUT = make_layout(
    model_fingerprint="played",
    num_layers=LAYERS,
    num_kv_heads=1,
    head_dim=2,
    hash_block_tokens=2,
    block_size=4,
    dtype="float32",
)
PROMPTS = [[1, 2, 3, 4] * 2 + [5], [1, 2, 3, 4] * 2 + [6, 8, 9, 6, 5], [9, 9, 8], [4, 5, 6, 4, 5, 6, 4, 5]]
SLOT_BYTES = 6 * 16
"""Six cells."""


class Channel:
    """Takes what is sent, and says later that it is read, or that it is lost."""

    def __init__(self, device: PlayedDevice, check: Callable[[SealedSegment], None], on_lost: OnLost) -> None:
        self._device = device
        self._check = check
        self._on_lost = on_lost
        self.held: deque[tuple[SealedSegment, OnDone]] = deque()
        self.lost: str | None = None

    def send(self, segment: SealedSegment, on_done: OnDone) -> None:
        self.send_all([(segment, on_done)])

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        for segment, on_done in segments:
            if self.lost is not None:
                on_done(self.lost)
            else:
                self._check(segment)
                self.held.append((segment, on_done))

    def read(self) -> None:
        if self.held:
            segment, on_done = self.held.popleft()
            self._check(segment)  # nobody wrote into the slot meanwhile
            on_done(None)

    def lose(self) -> None:
        if self.lost is None:
            self.lost = "cut"
            self.give_up()
            self._on_lost("cut")

    def give_up(self) -> None:
        while self.held:
            self.held.popleft()[1](self.lost)

    def close(self) -> None:
        """On a thread of its own: the rest is done by the test's."""
        self.lost = self.lost or "closed"


class World:
    sender_memory = "host"
    probe = ""

    def __init__(self, device: PlayedDevice, clock: Clock, waiters: list[PlayedWaiter]) -> None:
        self.device, self.random, self.clock, self.waiters = device, device.random, clock, waiters
        self.arena = StagingArena(self.random.choice([1, 3, 8]), SLOT_BYTES)
        staging = SimpleNamespace(arena=lambda _: self.arena)
        self.channels: list[Channel] = []
        self.messages: dict[str, AddRequest] = {}
        self.keys: dict[TransferKey, str] = {}
        self.epochs: dict[TransferKey, int] = {}
        self.cached: dict[TransferKey, int] = {}
        self.expected: dict[TransferKey, int] = {}
        """Segments, once the end was told."""
        self.sent: Counter[TransferKey] = Counter()
        self.ended: dict[str, FinishReason] = {}
        self.asked: list[tuple[str, TransferKey]] = []
        self.numbers = itertools.count(1)
        self.seen: Counter[str] = Counter()
        config = EngineConfig(
            model="played",
            block_size=4,
            hash_block_tokens=2,
            max_num_seqs=self.random.choice([2, 5]),
            max_num_batched_tokens=self.random.choice([5, 6, 40]),
            enable_prefix_caching=self.random.random() < 0.8,
        )
        self.runner = PlayedRunner(config, device, self.random.choice([8, 10, 16]))
        self.core = EngineCore(config, self.runner, clock=clock)
        process: Any = SimpleNamespace(wakeup=lambda: None, send=self.hear)
        me = kv_pb2.WorkerIdentity(worker_id="p", incarnation=1)
        with (
            mock.patch.object(engine_main, "load_all", return_value={"fake": self}),
            mock.patch.object(engine_main, "EngineStaging", return_value=staging),
            mock.patch.object(engine_main, "time", SimpleNamespace(monotonic=clock)),
        ):
            self.handoff = engine_main.PrefillHandoff(process, self.core, self.runner.kv_cache, me, LAYOUT, "")
        self.core.sender = self.handoff
        self.core.while_waiting = self.between

    # --- the backend and the staging

    def sender(self, arena: StagingArena) -> World:
        return self

    def close(self) -> None:
        """Nothing beside the channels."""

    def connect(self, endpoint: str, hello: object, on_lost: OnLost) -> Channel:
        self.channels.append(Channel(self.device, self.check, on_lost))
        return self.channels[-1]

    def check(self, segment: SealedSegment) -> None:
        """The segment holds what its header says, and nothing writes into its slot."""
        header = parse_header(segment.header)
        self.device.touch_from_host("sent", reads=[("wire", address_of(segment.payload))])
        assert mixed_digest(segment.header, block_mix64(segment.payload)) == segment.digest
        prompt = self.messages[self.keys[key_of(header)]].prompt_token_ids
        layers, tokens = header.layer_end - header.layer_start, header.token_end - header.token_start
        kv = np.frombuffer(segment.payload, np.float32).reshape(layers, 2, tokens, 2)
        for layer, token in itertools.product(range(layers), range(tokens)):
            value = value_of(prompt[: header.token_start + token + 1], header.layer_start + layer)
            assert (kv[layer, :, token] == value).all()

    # --- the engine's loop

    def step(self) -> None:
        self.take(self.core.step().outputs)
        check_books(self.core)

    def take(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "an output came after the end"
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def between(self) -> bool:
        for _ in range(self.random.randrange(7)):
            self.random.choice(self.EVENTS)(self)
        for waiter in self.waiters:
            if self.random.random() < 0.3:
                waiter.go_on()
        for channel in self.channels:
            if channel.lost is not None:
                channel.give_up()
        self.handoff.poll()
        self.take(self.core.take_news().outputs)
        return True

    # --- what may come

    def add(self) -> None:
        if len(self.messages) - len(self.ended) >= 8:
            return
        number = next(self.numbers)
        rid, key = f"r{number}", TransferKey(f"t{number}", 1)
        handoff = None
        if self.random.random() < 0.8:
            handoff = SendKV(key.transfer_id, 1, "here", self.random.choice("de"), 1)
            self.keys[key] = rid
        self.messages[rid] = make_message(
            rid,
            self.random.choice(PROMPTS),
            self.random.choice([1, 5]),
            timeout_s=0.05 if self.random.random() < 0.1 else 100.0,
            handoff=handoff,
        )
        self.core.add(self.messages[rid])

    def hear(self, message: PeerFrame) -> None:
        frame = worker_pb2.HandoffFrame.FromString(message.payload)
        key = TransferKey(frame.transfer_id, frame.attempt)
        match frame.WhichOneof("body"):
            case "open":
                self.asked.append((message.peer, key))
            case "end":
                self.expected[key] = frame.end.num_segments

    def say(self, peer: str, key: TransferKey, body: Ticket | Busy | Refused | Done | Abort) -> None:
        self.handoff.on_frame(peer, frame_to_pb(Frame(key, body)).SerializeToString())

    def answer(self) -> None:
        if not self.asked:
            return
        peer, key = self.asked.pop()
        body: Ticket | Busy | Refused
        match self.random.randrange(10):
            case 0:
                body = Refused("no")
            case 1 | 2:
                body = Busy(0.001)
            case _:
                tokens = len(self.messages[self.keys[key]].prompt_token_ids)
                self.cached[key] = self.random.choice([0, 0, 4, tokens])
                self.cached[key] = min(self.cached[key], tokens)
                body = Ticket(1, self.cached[key], LAYOUT, "fake", "there", 10.0, 1 << 20)
        self.say(peer, key, body)
        if self.random.random() < 0.1:
            self.say(peer, key, body)

    def transfers(self) -> list[Any]:
        return list(self.handoff._sender._by_request.values())

    def has_finished(self, request_id: str) -> bool:
        """By its first token."""
        held = self.core.scheduler.holding.get(request_id)
        return held is not None and held.first_output is not None and held.first_output.finish_reason is not None

    def done(self) -> None:
        """As soon as everything was sent: its slots may not be back yet. Or as soon as the first token ended it."""
        for transfer in self.transfers():
            if transfer.ended and transfer.segments_sent == self.expected[transfer.key] == transfer.segments_read:
                self.say(transfer.peer, transfer.key, Done())
                self.seen["done"] += 1
            elif transfer.ended and self.has_finished(transfer.request_id):
                self.say(transfer.peer, transfer.key, Done())
                self.seen["finished"] += 1

    def give_up(self) -> None:
        transfers = self.transfers()
        if transfers and self.random.random() < 0.3:
            transfer = self.random.choice(transfers)
            self.say(transfer.peer, transfer.key, Abort("no more"))
            self.seen["given up"] += 1

    def abort(self) -> None:
        rids = [rid for rid in self.messages if rid not in self.ended]
        if rids and self.random.random() < 0.3:
            self.core.abort([self.random.choice(rids)], "test")
            self.take(self.core.take_news().outputs)
            self.seen["aborted"] += 1

    def lose_peer(self) -> None:
        transfers = self.transfers()
        if transfers and self.random.random() < 0.1:
            self.handoff.on_peer_lost(self.random.choice(transfers).peer, "cut")
            self.seen["peer lost"] += 1

    def lose_channel(self) -> None:
        if self.channels and self.random.random() < 0.1:
            self.random.choice(self.channels).lose()
            self.seen["channel lost"] += 1

    def read(self) -> None:
        for channel in self.channels:
            channel.read()

    def sleep(self) -> None:
        self.clock.now_s += self.random.choice([0.002, 0.01, 0.06, 0.6])

    EVENTS = (
        add, add, answer, answer, answer, read, read, read, done, done,
        give_up, abort, lose_peer, lose_channel, sleep,
    )  # fmt: skip

    # --- the end

    def finish(self) -> None:
        self.core.while_waiting = None
        for _ in range(400):
            self.clock.now_s += 0.01
            self.answer()
            self.read()
            self.done()
            for waiter in self.waiters:
                waiter.go_on()
            self.handoff.poll()
            self.take(self.core.step().outputs)
        assert set(self.ended) == set(self.messages), "a request waits for ever"
        for channel in self.channels:
            channel.lose()
        self.handoff.poll()
        assert not self.handoff._sender.leases
        assert not self.handoff._sender.open_transfers
        assert self.arena.free_slots == self.arena.num_slots
        copies = self.runner.copies
        assert len(copies._free) == len({id(desk) for desk in copies._free})
        assert not any(desk.num_unread for desk in copies._free)
        assert_no_leak(self.core)


def live(seed: int, steps: int) -> World:
    device, waiters = PlayedDevice(seed), []

    def waiter(_: object) -> PlayedWaiter:
        waiters.append(PlayedWaiter())
        return waiters[-1]

    with played(device), mock.patch.object(sender, "CopyWaiter", waiter):
        world = World(device, Clock(), waiters)
        for _ in range(steps):
            world.between()
            world.step()
        world.finish()
    return world


def test_blocks_are_written_only_after_what_was_in_them_has_left() -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        seen += live(seed, 120).seen
    assert len(seen) == 6, seen
    assert all(count > 5 for count in seen.values()), seen
