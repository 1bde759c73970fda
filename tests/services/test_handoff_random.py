"""Both sides under any order of events that hypothesis can think of: the laws hold, whatever is lost or late.

Frames and segments may be lost, repeated, reordered and bent; either side may abort, lose its peer, or sleep through
its leases. The world's ports check that a request ends once and that nothing is packed from freed blocks.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.layout import KVRange
from kv_transfer.transfer import TransferKey
from tests.services.handoff_world import D_PEER, LAYERS, LEASE_S, P_PEER, World

TOKENS = 32
CHUNK = 16
REQUESTS = ["a/1", "b/1", "c/1", "a/2"]
"""Name and attempt."""
requests = st.sampled_from(REQUESTS)


def flip(arrived: Arrived) -> Arrived:
    arrived.payload[0] ^= 0x40
    return arrived


class Handoffs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(slots=2)
        self.world.d_port.room = 2
        self.computed: dict[str, int] = {}
        self.on_d: set[str] = set()

    # ---- engines

    @rule(request=requests, order=st.sampled_from(["pd", "dp", "pd", "dp", "p", "d"]))
    def add(self, request: str, order: str) -> None:
        for side in order:
            if side == "p":
                self.add_to_p(request)
            elif request not in self.on_d:
                self.on_d.add(request)
                self.world.add_to_d(request, TOKENS, int(request[-1]))

    def add_to_p(self, request: str) -> None:
        """Once; and again when the engine asks again after a Busy."""
        port = self.world.p_port
        if request not in self.computed or (request in port.kv and request not in port.granted):
            self.computed.setdefault(request, 0)
            self.world.add_to_p(request, TOKENS, int(request[-1]))

    @rule(finished=st.sampled_from([False, False, False, True]))
    def one_step(self, finished: bool) -> None:
        self.step(finished)

    def step(self, finished: bool) -> None:
        """P's engine computes one chunk of every request that has a ticket, or ends its prefill."""
        port = self.world.p_port
        for request in [name for name in port.granted if name in port.kv]:
            start = self.computed[request]
            if start < TOKENS:
                for layer in range(0, LAYERS, 2):
                    self.world.sender.kv_computed(request, KVRange(start, start + CHUNK, layer, layer + 2))
                self.computed[request] = start + CHUNK
            elif start == TOKENS:
                self.world.end_prefill(request, finished)
                self.computed[request] = TOKENS + 1

    def abort_on_p(self, request: str) -> None:
        if self.world.p_port.kv.pop(request, None) is not None:
            key = TransferKey(f"t-{request[0]}", int(request[-1]))
            self.world.sender.request_ended(request, key, D_PEER, "client")

    def abort_on_d(self, request: str) -> None:
        self.world.d_port.reserved.pop(request, None)
        self.world.receiver.request_ended(request, "client")

    # ---- networks

    @rule()
    def frames_move(self) -> None:
        self.world.frames_to_d()
        self.world.frames_to_p()

    @rule(count=st.integers(1, 4))
    def segments_move(self, count: int) -> None:
        for channel in self.world.p_backend.channels:
            for _ in range(count):
                self.world.deliver_segment(channel)

    @rule()
    def beat(self) -> None:
        self.world.heartbeat()
        self.world.polls()
        for request in self.world.p_port.deferred.copy():
            self.add_to_p(request)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(steps=st.integers(1, 4))
    def all_goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.world.run()
            self.step(finished=False)
        self.world.run()

    # ---- trouble

    @rule(data=st.data(), direction=st.sampled_from(["d", "p"]), fate=st.sampled_from(["again", "lost", "late"]))
    def frame_trouble(self, data: st.DataObject, direction: str, fate: str) -> None:
        frames = self.world.to_d if direction == "d" else self.world.to_p
        if not frames:
            return
        index = data.draw(st.integers(0, len(frames) - 1)) if fate == "late" else 0
        frame = frames[index] if fate == "again" else frames.pop(index)
        if fate == "lost":
            return
        if direction == "d":
            self.world.receiver.on_frame(P_PEER, frame)
        else:
            self.world.sender.on_frame(D_PEER, frame)

    @rule(data=st.data(), fate=st.sampled_from(["bent", "lost", "again", "late"]))
    def segment_trouble(self, data: st.DataObject, fate: str) -> None:
        for channel in [c for c in self.world.p_backend.channels if c.segments]:
            segment, on_done = channel.segments[0]
            if fate == "lost":
                channel.segments.pop(0)
                on_done(None)
                continue
            if fate == "again":
                copy = dataclasses.replace(segment, payload=memoryview(bytes(segment.payload)))
                channel.segments.insert(0, (copy, lambda error: None))
            index = data.draw(st.integers(0, len(channel.segments) - 1)) if fate == "late" else 0
            self.world.deliver_segment(channel, flip if fate == "bent" else None, index)

    @rule(
        request=requests,
        what=st.sampled_from(["abort on p", "abort on d", "p loses d", "d loses p", "channel breaks", "long sleep"]),
    )
    def trouble(self, request: str, what: str) -> None:
        match what:
            case "abort on p":
                self.abort_on_p(request)
            case "abort on d":
                self.abort_on_d(request)
            case "p loses d":
                self.world.sender.on_peer_lost(D_PEER, "silent")
            case "d loses p":
                self.world.receiver.on_peer_lost(P_PEER, "silent")
            case "long sleep":
                self.world.pass_time(LEASE_S + 1)
            case "channel breaks":
                for channel in self.world.p_backend.channels:
                    if channel.lost is None:
                        channel.break_off("reset")
                        self.world.d_backend.arrivals.append(ChannelLost(channel.origin, "reset"))

    # ---- the laws

    @invariant()
    def what_is_published_is_what_p_had(self) -> None:
        for request in self.world.d_port.published:
            self.world.assert_published(request, TOKENS)

    @invariant()
    def p_is_done_only_when_d_is(self) -> None:
        port = self.world.d_port
        assert set(self.world.p_port.done) <= set(port.published) | set(port.finished)

    @invariant()
    def one_attempt_of_a_request_is_open_on_d(self) -> None:
        assert len({name.split("/")[0] for name in self.world.d_port.reserved}) == len(self.world.d_port.reserved)

    def teardown(self) -> None:
        """Cut off from each other, each side frees by itself: leases within a lease, the rest by deadlines."""
        world = self.world
        for channel in world.p_backend.channels:
            channel.break_off("cut off")
        world.polls()
        world.pass_time(LEASE_S + 0.1)
        world.polls()
        assert world.sender.leases == world.receiver.leases == 0
        for request in REQUESTS:
            self.abort_on_p(request)
            self.abort_on_d(request)
        world.polls()
        world.assert_at_rest()
        for request in self.on_d & set(self.computed):
            assert self.computed[request] <= TOKENS + 1
        world.pass_time(LEASE_S + 0.1)
        world.polls()
        assert world.receiver.tombstones == 0


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
