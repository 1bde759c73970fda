"""The sender is lost, the receiver keeps the reservation, and the next attempt goes on with it, from another sender."""

from __future__ import annotations

import pytest

from kv_transfer.protocol import Abort, Busy, End, Frame, Open, Refused, Ticket
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2
from tests.services.handoff_world import KEEP_S, LEASE_S, P_PEER, World, kv_of, layout

Q = kv_pb2.WorkerIdentity(worker_id="q", incarnation=7)
Q_PEER = "stream-of-q"
TOKENS = 32
SECOND = TransferKey("t-r", 2)


@pytest.fixture
def world() -> World:
    """The first attempt has its ticket; D has room for no other."""
    world = World()
    world.d_port.room = 1
    world.start("r/1", TOKENS)
    assert list(world.d_port.reserved) == ["r/1"]
    return world


def ask(world: World, key: TransferKey, peer: str = Q_PEER, sender: kv_pb2.WorkerIdentity = Q) -> object:
    world.receiver.on_frame(peer, Frame(key, Open(sender, layout(), TOKENS, 60.0, ("tcp",))))
    return world.d_said[-1]


def second(world: World, tokens: int = TOKENS) -> None:
    world.d_port.tokens["r/2"] = tokens
    world.receiver.request_added("r/2", SECOND, Q.worker_id, Q.incarnation, tokens, world.clock.now_s + 600)


def other_is_busy(world: World) -> bool:
    """Whether another request finds no room."""
    if "other" not in world.d_port.tokens:
        world.add_to_d("other", TOKENS)
    answer = ask(world, TransferKey("t-other", 1), P_PEER, kv_pb2.WorkerIdentity(worker_id="p", incarnation=1))
    return isinstance(answer, Busy)


def lose_p(world: World) -> None:
    world.receiver.on_peer_lost(P_PEER, "killed")
    assert "killed" in world.d_port.failed["r/1"]


def test_another_sender_goes_on_with_the_reservation(world: World) -> None:
    lose_p(world)
    assert other_is_busy(world)
    second(world)
    assert other_is_busy(world)
    ticket = ask(world, SECOND)
    assert isinstance(ticket, Ticket)
    assert world.d_port.taken_over == ["r/2"]
    assert other_is_busy(world)
    world.pass_time(LEASE_S / 2)
    world.receiver.on_peer_alive(Q_PEER)
    world.pass_time(LEASE_S / 2)
    world.receiver.poll()
    assert "r/2" in world.d_port.reserved, "its lease is the new sender's"


def test_what_the_first_sender_still_sends_is_dropped(world: World) -> None:
    """Its segments and frames, before and after the other one has its ticket: attempt and epoch are others."""
    world.p_port.kv["r/1"] = kv_of("r/1", TOKENS)
    world.compute("r/1", TOKENS)
    channel = world.p_backend.channels[0]
    lose_p(world)
    second(world)
    assert world.deliver_segment(channel)
    world.receiver.poll()
    ask(world, SECOND)
    while world.deliver_segment(channel):
        world.receiver.poll()
    assert world.receiver.counters.segments_dropped["stale"] == 2
    assert world.receiver.counters.segments == 0
    world.receiver.on_frame(P_PEER, Frame(TransferKey("t-r", 1), End(2, b"", False)))
    assert isinstance(world.d_said[-1], Abort)
    assert isinstance(ask(world, TransferKey("t-r", 1), P_PEER), Refused)
    assert "r/2" in world.d_port.reserved


def test_the_router_ends_the_first_attempt_before_the_loss_is_seen(world: World) -> None:
    world.receiver.keep_reservation("r/1")
    world.d_port._end("r/1")
    world.receiver.request_ended("r/1", "retry")
    second(world)
    assert isinstance(ask(world, SECOND), Ticket)
    assert world.d_port.taken_over == ["r/2"]


def test_nobody_comes(world: World) -> None:
    lose_p(world)
    assert world.receiver.leases == 1
    assert world.receiver.next_deadline_s == world.clock.now_s + KEEP_S
    world.pass_time(KEEP_S)
    world.receiver.poll()
    assert world.receiver.leases == 0
    assert not world.d_port.kept
    assert not other_is_busy(world)
    second(world)
    assert isinstance(ask(world, SECOND), Busy)


def test_the_second_sender_does_not_ask_in_time(world: World) -> None:
    """It has a long queue: the reservation is for others then, and the request goes on waiting."""
    lose_p(world)
    second(world)
    assert world.receiver.leases == 1
    world.pass_time(LEASE_S)
    world.receiver.poll()
    assert world.receiver.leases == 0
    assert "r/2" not in world.d_port.failed
    assert not other_is_busy(world)
    assert isinstance(ask(world, SECOND), Busy)
    world.d_port.room = 2
    assert isinstance(ask(world, SECOND), Ticket)


def test_it_goes_past_those_that_wait_for_room(world: World) -> None:
    """Patience is for room that gets free; this room is its own."""
    assert other_is_busy(world)
    for _ in range(15):
        world.pass_time(0.1)
        assert other_is_busy(world)
    lose_p(world)
    second(world)
    assert isinstance(ask(world, SECOND), Ticket)


def test_other_tokens_get_a_reservation_of_their_own(world: World) -> None:
    lose_p(world)
    second(world, tokens=TOKENS + 1)
    assert world.receiver.leases == 0
    assert not world.d_port.taken_over
    assert not other_is_busy(world)


def test_after_its_lease_nothing_is_kept(world: World) -> None:
    """D has slept for longer than a lease: the request is somewhere else by now."""
    world.pass_time(LEASE_S)
    world.receiver.on_peer_lost(P_PEER, "silent")
    assert not world.d_port.kept
    assert world.receiver.leases == 0


def test_a_stale_attempt_does_not_replace_a_newer_one(world: World) -> None:
    lose_p(world)
    second(world)
    world.d_port.tokens["r/1b"] = TOKENS
    world.receiver.request_added("r/1b", TransferKey("t-r", 1), "p", 1, TOKENS, world.clock.now_s + 600)
    assert "stale attempt" in world.d_port.failed["r/1b"]
    assert isinstance(ask(world, SECOND), Ticket)


def test_close_frees_what_is_kept(world: World) -> None:
    lose_p(world)
    world.receiver.close()
    assert not world.d_port.kept
