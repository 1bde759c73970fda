"""A decode engine on a device, at random: no KV is written where something may still read or write.

The real core, hand-off, receiver and copies on a played device (played_device.py), which objects to any two accesses
that nothing orders. Senders of all kinds: prompt, late, twice, corrupt, lost, tried again; requests end in any way, in
the middle of anything; the pool is too small, so blocks change hands at once, by way of host memory too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from decode_service import engine_main
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import AddRequest, FinishReason, ReceiveKV, RequestOutput, Timings
from kv_transfer import segment_intake
from kv_transfer.backends.base import Arrived, ChannelLost, Origin
from kv_transfer.block_mix import block_mix64
from kv_transfer.layout import BLOCK_MIX64, KVRange, make_layout
from kv_transfer.protocol import Abort, End, Frame, Open
from kv_transfer.segment import mixed_digest
from kv_transfer.staging import StagingSlot
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2, worker_pb2
from prefill_service.engine_main import frame_to_pb
from tests.unit.fake_runner import make_message, next_token, oracle
from tests.unit.handoff_link import Clock
from tests.unit.leaks import assert_no_leak, check_books
from tests.unit.played_device import (
    LAYERS,
    PlayedDevice,
    PlayedHostKV,
    PlayedRunner,
    PlayedWaiter,
    played,
    value_of,
)
from worker.translate import output_to_pb

SENDER = kv_pb2.WorkerIdentity(worker_id="p", incarnation=1)
ORIGIN = Origin(SENDER)
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


class Backend:
    """The data plane, and what a mapped one leaves to the sender: its memory, which it writes when it has it back."""

    receiver_memory = None
    max_segment_bytes = 1 << 20

    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self.arrivals: list[Arrived | ChannelLost] = []
        self.num_out = 0

    def receiver(self, *_: object) -> Backend:
        return self

    def listen(self, *_: object) -> str:
        return "here"

    def unreachable(self, probe: str) -> str:
        return ""

    def poll(self) -> list[Arrived | ChannelLost]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def drop_sender(self, *_: object) -> None:
        """As if the loss came later, or never."""

    def arrive(self, header: kv_pb2.SegmentHeader, payload: np.ndarray[Any, Any], *, intact: bool) -> None:
        buffer = np.zeros(payload.nbytes + 16, np.uint8)
        at = -buffer.ctypes.data % 16
        memory = buffer[at : at + payload.nbytes]
        memory[:] = payload.view(np.uint8).reshape(-1)
        header.digest_kind = BLOCK_MIX64
        data = header.SerializeToString(deterministic=True)
        digest = mixed_digest(data, block_mix64(memory.tobytes()) ^ (not intact))
        slot = StagingSlot(self.num_out, memoryview(memory), lambda _: self._back(memory))
        self.num_out += 1
        self.arrivals.append(Arrived(ORIGIN, data, header, digest, slot))

    def _back(self, memory: np.ndarray[Any, Any]) -> None:
        self.num_out -= 1
        self._device.touch_from_host("slot is back", writes=[("wire", memory.ctypes.data)])
        memory[:] = 0xFF


@dataclass
class Transfer:
    """One attempt, as its sender sees it."""

    message: AddRequest
    key: TransferKey
    dtype: str
    """Of its sender's cache; another one than ours is converted on its way into the blocks."""
    epoch: int = 0
    cached: int = 0
    to_send: list[tuple[int, KVRange]] = field(default_factory=list)
    num_segments: int | None = None
    is_over: bool = False


class World:
    def __init__(self, device: PlayedDevice, clock: Clock, backend: Backend, waiters: list[PlayedWaiter]) -> None:
        self.device = device
        self.random = device.random
        self.clock = clock
        self.backend = backend
        self.waiters = waiters
        self.transfers: dict[TransferKey, Transfer] = {}
        self.messages: dict[str, AddRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.numbers = itertools.count()
        self.stream = 1
        config = EngineConfig(
            model="played",
            block_size=4,
            hash_block_tokens=2,
            max_num_seqs=self.random.choice([2, 5]),
            max_num_batched_tokens=self.random.choice([5, 8, 40]),
            itl_budget_ms=self.random.choice([0.0, 0.2]),
            enable_prefix_caching=self.random.random() < 0.8,
        )
        runner = PlayedRunner(config, self.device, self.random.choice([8, 12, 20]))
        self.runner = runner
        host = PlayedHostKV(runner, self.device, 6, runner.copies.follow) if self.random.random() < 0.8 else None
        self.core = EngineCore(config, runner, host_memory=host, clock=clock)
        process: Any = SimpleNamespace(wakeup=lambda: None, send=lambda frame: self.hear(frame.payload))
        me = kv_pb2.WorkerIdentity(worker_id="d", incarnation=1)
        self.handoff = engine_main.DecodeHandoff(process, self.core, runner.kv_cache, me, LAYOUT, "", "", "")
        self.core.receiver = self.handoff
        self.core.while_waiting = self.between

    # --- the engine's loop

    def step(self) -> None:
        outputs = self.core.step()
        self.take(outputs.outputs)
        check_books(self.core)

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            rid = output.request_id
            assert rid not in self.ended, "an output came after the end"
            self.outputs[rid] += output.token_ids
            if output.finish_reason is not None:
                self.ended[rid] = output.finish_reason

    def between(self) -> bool:
        """What comes while a step is waited for, and between steps."""
        for _ in range(self.random.randrange(7)):
            self.random.choice(self.EVENTS)(self)
        for waiter in self.waiters:
            if self.random.random() < 0.3:
                waiter.go_on()
        self.handoff.poll()
        self.take(self.core.take_news().outputs)
        return True

    # --- what may come

    def add_local(self) -> None:
        self.add(None)

    def add_received(self) -> None:
        transfer_id = f"t{next(self.numbers)}"
        self.add(TransferKey(transfer_id, 1))

    def add(self, key: TransferKey | None, prompt: list[int] | None = None) -> None:
        if len(self.messages) - len(self.ended) >= 8:
            return
        rid = f"r{next(self.numbers)}"
        handoff = None if key is None else ReceiveKV(key.transfer_id, key.attempt, "p", 1)
        message = make_message(
            rid,
            prompt or self.random.choice(PROMPTS),
            self.random.choice([1, 2, 12, 24]),
            timeout_s=0.05 if self.random.random() < 0.1 else 100.0,
            handoff=handoff,
            priority=self.random.choice([0, 0, 1]),
            ignore_eos=self.random.random() < 0.5,
        )
        self.messages[rid], self.outputs[rid] = message, []
        if key is not None:
            self.transfers[key] = Transfer(message, key, self.random.choice(["float32", "float32", "float16"]))
        self.core.add(message)

    def pick(self) -> Transfer | None:
        open_ones = [transfer for transfer in self.transfers.values() if not transfer.is_over]
        return self.random.choice(open_ones) if open_ones else None

    def say(self, transfer: Transfer, body: Open | End | Abort) -> None:
        frame = frame_to_pb(Frame(transfer.key, body))
        self.handoff.on_frame(f"s{self.stream}", frame.SerializeToString())

    def go_on(self) -> None:
        """What comes next on the newest transfer, which is likely to have blocks that were just another's."""
        open_ones = [transfer for transfer in self.transfers.values() if not transfer.is_over]
        if not open_ones:
            return
        transfer = open_ones[-1]
        if not transfer.epoch:
            self.open(transfer)
        if transfer.to_send:
            self.send(transfer)
        elif transfer.epoch:
            self.end(transfer)

    def open(self, transfer: Transfer | None = None) -> None:
        transfer = transfer or self.pick()
        if transfer is not None:
            tokens = len(transfer.message.prompt_token_ids)
            self.say(transfer, Open(SENDER, LAYOUT, tokens, 10.0, ("fake",)))

    def hear(self, payload: bytes) -> None:
        frame = worker_pb2.HandoffFrame.FromString(payload)
        transfer = self.transfers.get(TransferKey(frame.transfer_id, frame.attempt))
        if transfer is None:
            return
        if frame.HasField("ticket") and not transfer.epoch:
            transfer.epoch, transfer.cached = frame.ticket.epoch, frame.ticket.cached_tokens
            tokens = len(transfer.message.prompt_token_ids)
            cuts = sorted({transfer.cached, tokens, self.random.randint(transfer.cached, tokens)})
            parts = [
                KVRange(start, end, layer, layer + 1)
                for start, end in itertools.pairwise(cuts)
                for layer in range(LAYERS)
            ]
            transfer.to_send = list(enumerate(parts))
            transfer.num_segments = len(parts)
            self.random.shuffle(transfer.to_send)
        elif frame.WhichOneof("body") in ("abort", "refused", "done"):
            transfer.is_over = self.random.random() < 0.7  # else it hears too late, and goes on

    def send(self, transfer: Transfer | None = None) -> None:
        transfer = transfer or self.pick()
        if transfer is None or not transfer.to_send:
            return
        for _ in range(self.random.choice([1, 1, 2, 5])):
            if not transfer.to_send:
                return
            item = transfer.to_send.pop()
            self.segment(transfer, *item, intact=self.random.random() > 0.03)
            if self.random.random() < 0.05:
                transfer.to_send.append(item)

    def segment(self, transfer: Transfer, index: int, part: KVRange, *, intact: bool) -> None:
        prompt = transfer.message.prompt_token_ids
        values = np.empty((1, 2, 1, part.token_end - part.token_start, 2), transfer.dtype)
        for at in range(part.token_start, part.token_end):
            values[:, :, :, at - part.token_start] = value_of(prompt[: at + 1], part.layer_start)
        header = kv_pb2.SegmentHeader(
            transfer_id=transfer.key.transfer_id,
            attempt=transfer.key.attempt,
            epoch=transfer.epoch - (self.random.random() < 0.03),
            sender_incarnation=1,
            index=index,
            token_start=part.token_start,
            token_end=part.token_end,
            layer_start=part.layer_start,
            layer_end=part.layer_end,
            dtype=transfer.dtype,
            payload_bytes=values.nbytes,
        )
        self.backend.arrive(header, values, intact=intact)

    def end(self, transfer: Transfer | None = None) -> None:
        """Mostly at its time; the first token may end the request before all segments came."""
        transfer = transfer or self.pick()
        if transfer is None or transfer.num_segments is None or (transfer.to_send and self.random.random() < 0.8):
            return
        message = transfer.message
        (token, *_), reason = oracle(message, self.runner.max_model_len)
        finished = len(oracle(message, self.runner.max_model_len)[0]) == 1
        first = RequestOutput(
            request_id=message.request_id,
            token_ids=[token],
            finish_reason=reason if finished else None,
            timings=Timings(),
            cached_tokens=0,
        )
        assert token == next_token(message.prompt_token_ids)
        data = output_to_pb(first, message.request_id).SerializeToString()
        self.say(transfer, End(transfer.num_segments, data, finished))

    def give_up(self) -> None:
        if (transfer := self.pick()) is not None and self.random.random() < 0.3:
            self.say(transfer, Abort("no more"))
            transfer.is_over = self.random.random() < 0.7

    def lose_peer(self) -> None:
        if self.random.random() < 0.1:
            self.handoff.on_peer_lost(f"s{self.stream}", "cut")
            self.stream += 1

    def lose_channel(self) -> None:
        if self.random.random() < 0.1:
            self.backend.arrivals.append(ChannelLost(ORIGIN, "cut"))

    def abort(self) -> None:
        """By a client, or by a router whose next attempt comes soon, late, or never."""
        rids = [rid for rid in self.messages if rid not in self.ended]
        scheduler = self.core.scheduler
        holders = [r.request_id for r in scheduler.preempted] + list(scheduler.reservations.reserved)
        if not rids or self.random.random() < (0.5 if holders else 0.9):
            return
        rid = self.random.choice(holders or rids)
        is_retry = self.random.random() < 0.7
        self.core.abort([rid], "test", is_retry)
        self.take(self.core.take_news().outputs)
        if is_retry:
            self.try_again(rid)

    def retry(self) -> None:
        failed = [t.message.request_id for t in self.transfers.values() if t.message.request_id in self.ended]
        if failed:
            self.try_again(self.random.choice(failed[-3:]))

    def try_again(self, rid: str) -> None:
        before = self.messages[rid]
        if isinstance(before.handoff, ReceiveKV) and self.random.random() < 0.8:
            attempts = [key.attempt for key in self.transfers if key.transfer_id == before.handoff.transfer_id]
            self.add(TransferKey(before.handoff.transfer_id, max(attempts) + 1), before.prompt_token_ids)

    def sleep(self) -> None:
        self.clock.now_s += self.random.choice([0.01, 0.01, 0.06, 0.3, 1.1])

    EVENTS = (
        add_local, add_received, add_received, go_on, go_on, go_on, go_on, go_on, send, end, open,
        give_up, lose_peer, lose_channel, abort, retry, sleep,
    )  # fmt: skip

    # --- the end

    def finish(self) -> None:
        self.core.while_waiting = None
        self.core.abort(list(self.core.scheduler.waiting_for_kv), "the end")
        for turn in range(600):
            self.clock.now_s += 0.01 if turn < 590 else 20
            for waiter in self.waiters:
                waiter.close()
            self.handoff.poll()
            self.take(self.core.step().outputs)
            if turn == 589:
                assert set(self.ended) == set(self.messages), "a request waits for ever"
        assert not self.handoff._receiver.leases
        assert not self.handoff._receiver.open_transfers
        assert not self.handoff._receiver.parked
        assert not self.backend.num_out, "a slot of the sender never came back"
        copies = self.runner.copies
        assert len(copies._free) == len({id(desk) for desk in copies._free})
        assert not any(desk.num_unread for desk in copies._free)
        assert_no_leak(self.core)
        for rid, message in self.messages.items():
            tokens, reason = oracle(message, self.runner.max_model_len)
            assert self.outputs[rid] == tokens[: len(self.outputs[rid])]
            if self.ended[rid] in (FinishReason.STOP, FinishReason.LENGTH):
                assert (self.outputs[rid], self.ended[rid]) == (tokens, reason)


def live(seed: int, steps: int) -> World:
    device, clock = PlayedDevice(seed), Clock()
    backend, waiters = Backend(device), []

    def waiter(_: object) -> PlayedWaiter:
        waiters.append(PlayedWaiter())
        return waiters[-1]

    with (
        played(device),
        mock.patch.object(segment_intake, "CopyWaiter", waiter),
        mock.patch.object(engine_main, "load_all", return_value={"fake": backend}),
        mock.patch.object(engine_main, "time", SimpleNamespace(monotonic=clock)),
    ):
        world = World(device, clock, backend, waiters)
        for _ in range(steps):
            world.between()
            world.step()
        world.finish()
    return world


def test_nothing_is_written_where_something_may_still_be_read_or_written() -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        world = live(seed, 120)
        stats = world.core.stats()
        world.handoff.fill_stats(stats)
        seen["done"] += stats.transfers_done_total
        seen["failed"] += sum(stats.transfers_failed_total.values())
        seen["taken over"] += stats.reservations_taken_over_total
        seen["to the host"] += stats.offloaded_blocks_total
        seen["from the host"] += stats.restored_blocks_total
    assert all(seen[what] > 5 for what in ("done", "failed", "taken over", "to the host", "from the host")), seen
