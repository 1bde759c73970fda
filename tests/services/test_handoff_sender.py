"""The prefill side of a transfer, alone: what it asks, what it sends when, what it frees."""

from __future__ import annotations

import pytest

from kv_transfer.layout import KVRange
from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.segment import parse_header
from kv_transfer.transfer import TransferKey
from tests.services.handoff_world import CELL_BYTES, D_PEER, LAYERS, LEASE_S, World, layout


@pytest.fixture
def world() -> World:
    return World()


def ticket(cached_tokens: int = 0, **changed: object) -> Ticket:
    values: dict[str, object] = {
        "epoch": 7,
        "cached_tokens": cached_tokens,
        "layout": layout(),
        "backend": "tcp",
        "endpoint": "d:1",
        "lease_s": LEASE_S,
        "max_segment_bytes": 1 << 20,
    }
    return Ticket(**(values | changed))  # type: ignore[arg-type]


def answer(world: World, key: TransferKey, body: object, peer: str = D_PEER) -> None:
    world.sender.on_frame(peer, Frame(key, body))  # type: ignore[arg-type]


def granted(world: World, request_id: str = "r", tokens: int = 32, cached: int = 0) -> TransferKey:
    key = world.add_to_p(request_id, tokens)
    answer(world, key, ticket(cached))
    return key


def test_asks_once_until_it_is_answered(world: World) -> None:
    key = world.add_to_p("r", 32)
    world.add_to_p("r", 32)
    assert [type(body) for body in world.p_said] == [Open]
    answer(world, key, Busy(0.25))
    assert world.p_port.deferred == {"r": 0.25}
    assert world.sender.leases == 0
    world.add_to_p("r", 32)
    assert [type(body) for body in world.p_said] == [Open, Open]
    answer(world, key, ticket(16))
    assert world.p_port.granted == {"r": 16}
    answer(world, key, ticket(16))  # again: no second grant, no second channel
    assert len(world.p_backend.channels) == 1


def test_a_second_request_of_an_attempt_fails_and_leaves_the_first_alone(world: World) -> None:
    key = granted(world, "r", 32)
    world.p_port.kv["other"] = world.p_port.kv["r"]
    world.sender.want_ticket("other", key, D_PEER, 2, 32, world.clock.now_s + 600)
    assert "has a request already" in world.p_port.failed["other"]
    assert "r" not in world.p_port.failed
    answer(world, key, Abort("gone"))
    assert "r" in world.p_port.failed
    world.assert_at_rest()


def test_refused_ends_the_request_with_the_reason(world: World) -> None:
    key = world.add_to_p("r", 32)
    answer(world, key, Refused("layouts differ: ours 1, theirs 2"))
    assert "ours 1, theirs 2" in world.p_port.failed["r"]
    assert not any(isinstance(body, Abort) for body in world.p_said)
    world.assert_at_rest()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layout": layout(num_kv_heads=3)}, ["num_kv_heads", "2", "3"]),
        ({"layout": layout(model_fingerprint="other")}, ["model_fingerprint", "'m'", "'other'"]),
        ({"backend": "pigeon"}, ["pigeon", "tcp"]),
    ],
)
def test_a_ticket_that_does_not_fit_is_given_back(world: World, changed: dict[str, object], said: list[str]) -> None:
    key = world.add_to_p("r", 32)
    answer(world, key, ticket(**changed))
    assert all(word in world.p_port.failed["r"] for word in said)
    assert isinstance(world.p_said[-1], Abort)
    assert not world.p_backend.channels
    world.assert_at_rest()


def test_a_ticket_for_a_transfer_that_is_over_is_answered_with_abort(world: World) -> None:
    key = world.add_to_p("r", 32)
    world.p_port.kv.clear()
    world.sender.request_ended("r", key, D_PEER, "client")
    world.p_port.sent.clear()
    answer(world, key, ticket())
    assert [type(body) for body in world.p_said] == [Abort]
    assert not world.p_port.granted


def test_an_answer_of_another_peer_or_attempt_is_not_heard(world: World) -> None:
    key = world.add_to_p("r", 32)
    answer(world, key, ticket(), peer="someone else")
    answer(world, TransferKey(key.transfer_id, 2), ticket())
    assert not world.p_port.granted


def test_what_the_receiver_has_is_not_sent(world: World) -> None:
    granted(world, tokens=40, cached=16)
    world.compute("r", 16)  # P's own cached part
    world.compute("r", 40, start=16)
    world.end_prefill("r")
    headers = [parse_header(segment.header) for segment, _ in world.p_backend.channels[0].segments]
    assert {(h.token_start, h.token_end) for h in headers} == {(16, 40)}
    assert [h.index for h in headers] == list(range(len(headers)))
    assert sum((h.token_end - h.token_start) * (h.layer_end - h.layer_start) for h in headers) == 24 * LAYERS
    end = world.p_said[-1]
    assert isinstance(end, End)
    assert end.num_segments == len(headers)


def test_without_room_in_staging_ranges_wait_and_are_packed_when_a_slot_is_back() -> None:
    world = World(slots=2, slot_bytes=8 * LAYERS * CELL_BYTES)
    key = granted(world, tokens=64)
    world.compute("r", 64)
    world.end_prefill("r")  # counts what is not packed yet
    end = world.p_said[-1]
    assert isinstance(end, End)
    assert end.num_segments == 8
    assert world.p_port.packs == 2
    channel = world.p_backend.channels[0]
    while channel.segments:
        assert world.p_arena.free_slots == 0 or world.p_port.packs == 8
        channel.segments.pop(0)[1](None)
        world.sender.poll()
    assert world.p_port.packs == 8
    answer(world, key, Done())
    assert world.p_port.done == ["r"]
    world.assert_at_rest()


def test_nothing_is_packed_after_the_blocks_are_freed() -> None:
    world = World(slots=1)
    key = granted(world, tokens=64)
    world.compute("r", 64)
    del world.p_port.kv["r"]  # the engine ended it
    world.sender.request_ended("r", key, D_PEER, "client")
    channel = world.p_backend.channels[0]
    channel.segments.pop(0)[1](None)
    world.polls()  # would raise KeyError
    assert world.p_port.packs == 1
    assert isinstance(world.p_said[-1], Abort)
    world.assert_at_rest()


def test_one_slow_receiver_does_not_take_all_staging() -> None:
    world = World(slots=4)
    slow = granted(world, "slow", tokens=16)
    key = TransferKey("t-fast", 1)
    world.p_port.kv["fast"] = world.p_port.kv["slow"]
    world.sender.want_ticket("fast", key, "stream-to-d2", 3, 16, world.clock.now_s + 60)
    world.sender.on_frame("stream-to-d2", Frame(key, ticket(endpoint="d2:1")))
    for _ in range(8):
        world.sender.kv_computed("slow", KVRange(0, 16, 0, LAYERS))
    assert world.p_arena.free_slots == 2
    world.sender.kv_computed("fast", KVRange(0, 16, 0, LAYERS))
    assert len(world.p_backend.channels[1].segments) == 1
    del slow


def test_a_finished_first_token_drops_what_was_not_sent() -> None:
    world = World(slots=1)
    key = granted(world, tokens=64)
    world.compute("r", 64)
    world.end_prefill("r", finished=True)
    world.p_backend.channels[0].segments.pop(0)[1](None)
    world.polls()
    assert world.p_port.packs == 1
    answer(world, key, Done())
    world.assert_at_rest()


def test_done_before_the_end_is_a_failure(world: World) -> None:
    key = granted(world)
    answer(world, key, Done())
    assert "before the prefill ended" in world.p_port.failed["r"]
    world.assert_at_rest()


def test_the_lease_is_renewed_by_heartbeats_and_never_revived(world: World) -> None:
    key = granted(world)
    for _ in range(3):
        world.pass_time(LEASE_S - 1)
        world.sender.on_peer_alive(D_PEER)
        world.sender.poll()
    assert not world.p_port.failed
    world.pass_time(LEASE_S + 1)  # the process slept; the heartbeats waited for it
    world.sender.on_peer_alive(D_PEER)
    answer(world, key, ticket())
    assert "lease" in world.p_port.failed["r"]
    assert isinstance(world.p_said[-1], Abort)


def test_the_lease_never_outlives_the_request(world: World) -> None:
    key = world.add_to_p("r", 32, deadline_s=3.0)
    answer(world, key, ticket())
    world.pass_time(2.0)
    world.sender.on_peer_alive(D_PEER)
    assert world.sender.next_deadline_s == world.clock.now_s + 1.0
    world.pass_time(1.0)
    world.sender.poll()
    assert "r" in world.p_port.failed


def test_a_receiver_that_never_answers_is_given_up(world: World) -> None:
    world.add_to_p("r", 32)
    assert world.sender.next_deadline_s is not None
    world.pass_time(world.sender.next_deadline_s - world.clock.now_s)
    world.sender.poll()
    assert "r" in world.p_port.failed
    world.assert_at_rest()


def test_a_lost_peer_ends_its_transfers_only() -> None:
    world = World()
    granted(world, "a", tokens=16)
    world.compute("a", 16)
    key = TransferKey("t-b", 1)
    world.p_port.kv["b"] = world.p_port.kv["a"]
    world.sender.want_ticket("b", key, "stream-to-d2", 3, 16, world.clock.now_s + 60)
    world.sender.on_frame("stream-to-d2", Frame(key, ticket(endpoint="d2:1")))
    world.sender.on_peer_lost(D_PEER, "silent")
    assert set(world.p_port.failed) == {"a"}
    is_closed = world.p_backend.channels[0].has_closed.wait(10)  # beside the engine's thread
    assert is_closed
    assert not world.p_backend.channels[1].closed
    world.polls()
    assert world.p_arena.used_bytes == 0
    # A new transfer to the same peer gets a new channel.
    granted(world, "c", tokens=16)
    assert len(world.p_backend.channels) == 3


def test_a_lost_channel_fails_what_used_it(world: World) -> None:
    granted(world)
    world.compute("r", 32)
    world.p_backend.channels[0].break_off("reset by peer")
    assert world.wakeups["p"] > 0
    world.polls()
    assert "reset by peer" in world.p_port.failed["r"]
    assert isinstance(world.p_said[-1], Abort)
    world.assert_at_rest()


def test_the_loss_of_a_dropped_channel_says_nothing_of_its_successor(world: World) -> None:
    """Its thread was about to tell when the peer was lost; by the time it does, the peer is back."""
    granted(world, "a")
    world.sender.on_peer_lost(D_PEER, "gone")
    granted(world, "b")
    before, successor = world.p_backend.channels
    before.on_lost("reset by peer")
    world.sender.poll()
    assert set(world.p_port.failed) == {"a"}
    assert not successor.closed
    granted(world, "c")
    assert len(world.p_backend.channels) == 2


def test_a_receiver_that_takes_no_segment_is_refused(world: World) -> None:
    """An error of one transfer, not of the engine."""
    key = world.add_to_p("r", 32)
    answer(world, key, ticket(max_segment_bytes=CELL_BYTES - 1))
    assert f"one token of one layer is {CELL_BYTES} bytes" in world.p_port.failed["r"]
    assert isinstance(world.p_said[-1], Abort)
    assert not world.p_backend.channels
    world.assert_at_rest()


def test_a_lost_channel_fails_nothing_that_was_read(world: World) -> None:
    """All segments came, and the receiver is about to say so; another one's did not."""
    for name in ("r", "s"):
        world.start(name, 16)
        world.compute(name, 16)
        world.end_prefill(name)
    (channel,) = world.p_backend.channels
    while len(channel.segments) > 1:
        world.deliver_segment(channel)
    world.sender.poll()
    channel.break_off("reset by peer")
    world.sender.poll()
    assert set(world.p_port.failed) == {"s"}
    world.run()
    world.assert_published("r", 16)
    assert world.p_port.done == ["r"]
    world.assert_at_rest()


def test_a_receiver_that_was_never_asked_is_told_too(world: World) -> None:
    key = world.add_to_d("r", 32)
    world.sender.request_ended("r", key, D_PEER, "client")
    world.run()
    assert "client" in world.d_port.failed["r"]
    world.assert_at_rest()


def test_close_tells_the_peers(world: World) -> None:
    granted(world)
    world.p_port.kv.clear()
    world.sender.close()
    assert isinstance(world.p_said[-1], Abort)
    assert world.p_backend.channels[0].closed
