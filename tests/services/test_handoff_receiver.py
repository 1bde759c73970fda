"""The decode side of a transfer, alone: which segments count, when it publishes, how it ends and what it frees then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.protocol import Abort, Busy, End, Frame
from kv_transfer.segment import digest
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2
from tests.services.handoff_world import D_PEER, KEEP_S, LEASE_S, P_PEER, World
from tests.services.test_handoff_tickets import KEY, ask


@pytest.fixture
def world() -> World:
    return World()


def sending(world: World, tokens: int = 32, cached: int = 0) -> None:
    world.d_port.cached["r"] = cached
    world.start("r", tokens)
    world.compute("r", tokens)


@pytest.mark.parametrize("end_first", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (16, 0), (33, 16), (48, 48)])
def test_publishes_when_everything_is_there(
    world: World, tokens: int, cached: int, backwards: bool, end_first: bool
) -> None:
    sending(world, tokens, cached)
    world.end_prefill("r")
    if end_first:
        world.frames_to_d()
    channel = world.p_backend.channels[0]
    while channel.segments:
        assert "r" not in world.d_port.published
        world.deliver_segment(channel, index=-1 if backwards else 0)
        world.receiver.poll()
    world.run()
    world.assert_published("r", tokens, cached)
    assert world.p_port.done == ["r"]
    world.assert_at_rest()


def test_transfer_time_is_what_the_end_had_to_wait(world: World) -> None:
    sending(world)
    world.end_prefill("r")
    world.frames_to_d()
    world.pass_time(0.25)
    world.run()
    assert world.d_port.transfer_s["r"] == pytest.approx(0.25)
    assert world.receiver.counters.streamed == 0


def test_streaming_is_counted_when_a_segment_came_before_the_end(world: World) -> None:
    sending(world)
    world.deliver_segment(world.p_backend.channels[0])
    world.receiver.poll()
    world.end_prefill("r")
    world.run()
    assert world.receiver.counters.streamed == 1


def rewritten(change: Callable[[kv_pb2.SegmentHeader], None]) -> Callable[[Arrived], Arrived]:
    """A header that was changed by someone who knows the digest, too."""

    def bend(arrived: Arrived) -> Arrived:
        header = kv_pb2.SegmentHeader.FromString(arrived.header_bytes)
        change(header)
        data = header.SerializeToString()
        return dataclasses.replace(
            arrived, header=header, header_bytes=data, digest=digest(data, arrived.slot.view[: header.payload_bytes])
        )

    return bend


@pytest.mark.parametrize(
    "change",
    [
        lambda h: setattr(h, "epoch", h.epoch - 1),
        lambda h: setattr(h, "attempt", 2),
        lambda h: setattr(h, "sender_incarnation", 77),
        lambda h: setattr(h, "transfer_id", "t-other"),
    ],
)
def test_segments_of_others_are_dropped(world: World, change: Callable[[kv_pb2.SegmentHeader], None]) -> None:
    sending(world)
    channel = world.p_backend.channels[0]
    world.deliver_segment(channel, rewritten(change))
    world.end_prefill("r")
    world.run()
    assert world.receiver.counters.segments_dropped == {"stale": 1}
    assert not world.d_port.published
    world.pass_time(5.0)  # a segment is missing now
    world.heartbeat()
    world.run()
    assert "missing" in world.d_port.failed["r"]
    assert "r" in world.p_port.failed
    world.assert_at_rest()


def flip_payload(arrived: Arrived) -> Arrived:
    arrived.payload[5] ^= 1
    return arrived


def flip_header(arrived: Arrived) -> Arrived:
    """A bit of ``layer_end`` fell over on the way."""
    header = kv_pb2.SegmentHeader.FromString(arrived.header_bytes)
    header.layer_end += 1
    return dataclasses.replace(arrived, header=header, header_bytes=header.SerializeToString())


@pytest.mark.parametrize("bend", [flip_payload, flip_header])
def test_a_corrupt_segment_fails_the_transfer_at_once(world: World, bend: Callable[[Arrived], Arrived]) -> None:
    sending(world)
    world.deliver_segment(world.p_backend.channels[0], bend)
    world.receiver.poll()
    assert "digest" in world.d_port.failed["r"]
    world.run()
    assert "digest" in world.p_port.failed["r"]
    assert not world.d_port.published
    world.assert_at_rest()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: setattr(h, "token_end", h.token_end + 16),
        lambda h: setattr(h, "layer_end", 9),
        lambda h: setattr(h, "token_start", h.token_end),
        lambda h: setattr(h, "dtype", "int4"),
        lambda h: setattr(h, "dtype", "bfloat16"),  # then there are too many bytes
    ],
)
def test_a_range_that_was_not_asked_for_fails_the_transfer(
    world: World, change: Callable[[kv_pb2.SegmentHeader], None]
) -> None:
    sending(world)
    world.deliver_segment(world.p_backend.channels[0], rewritten(change))
    world.receiver.poll()
    assert "segment 0" in world.d_port.failed["r"]
    world.run()
    world.assert_at_rest()


def test_cached_tokens_are_not_overwritten(world: World) -> None:
    sending(world, tokens=48, cached=16)

    def backwards(header: kv_pb2.SegmentHeader) -> None:
        header.token_start, header.token_end = 0, header.token_end - header.token_start

    world.deliver_segment(world.p_backend.channels[0], rewritten(backwards))
    world.receiver.poll()
    assert "outside" in world.d_port.failed["r"]


def test_a_repeated_segment_is_dropped_and_an_overlapping_one_fails(world: World) -> None:
    sending(world)
    channel = world.p_backend.channels[0]
    segment = channel.segments[0]
    channel.segments.insert(0, (segment[0], lambda error: None))
    world.deliver_segment(channel)
    world.deliver_segment(channel)
    world.receiver.poll()
    assert world.receiver.counters.segments_dropped == {"duplicate": 1}
    world.deliver_segment(channel, rewritten(lambda h: (setattr(h, "layer_start", 0), setattr(h, "layer_end", 2))[0]))
    world.receiver.poll()
    assert "overlaps" in world.d_port.failed["r"]


def test_fewer_segments_than_the_ticket_asks_for_are_incomplete(world: World) -> None:
    world.start("r", 32)
    world.compute("r", 16)  # and never the rest
    world.end_prefill("r")
    world.run()
    assert "expected" in world.d_port.failed["r"]
    world.assert_at_rest()


def test_a_finished_first_token_needs_no_kv(world: World) -> None:
    sending(world)
    world.end_prefill("r", finished=True)
    world.frames_to_d()
    assert world.d_port.finished == ["r"]
    world.run()  # the segments that were on the way
    assert world.receiver.counters.segments_dropped["stale"] > 0
    assert not world.d_port.published
    assert world.p_port.done == ["r"]
    world.assert_at_rest()


# ---- ends


def test_a_lease_that_is_over_frees_before_late_news_are_heard(world: World) -> None:
    sending(world)
    channel = world.p_backend.channels[0]
    while channel.segments:
        world.deliver_segment(channel)  # all is in staging; then the process is stopped
    world.pass_time(LEASE_S + 1)
    world.receiver.on_peer_alive(P_PEER)
    world.end_prefill("r")
    world.frames_to_d()
    world.receiver.poll()
    assert "not heard" in world.d_port.failed["r"]
    assert not world.d_port.published
    assert world.d_arena.used_bytes == 0
    world.run()
    assert "r" in world.p_port.failed


def test_abort_frees_at_once_and_what_comes_later_is_dropped(world: World) -> None:
    sending(world)
    world.receiver.request_ended("r", "client")
    world.d_port.reserved.clear()  # the engine freed them
    assert isinstance(world.d_said[-1], Abort)
    world.deliver_segment(world.p_backend.channels[0])
    world.receiver.poll()
    assert world.receiver.counters.segments_dropped == {"stale": 1}
    world.run()
    assert "gave up" in world.p_port.failed["r"]
    world.assert_at_rest()


def test_a_lost_peer_frees_reservations_and_parked_questions(world: World) -> None:
    sending(world)
    ask(world, TransferKey("t-unknown", 1))
    world.receiver.on_peer_lost(P_PEER, "silent")
    assert "silent" in world.d_port.failed["r"]
    assert (world.receiver.parked, world.receiver.leases) == (0, 1)
    world.pass_time(KEEP_S)  # no other attempt came for the reservation
    world.receiver.poll()
    assert world.receiver.leases == 0


def test_a_lost_channel_matters_only_to_what_still_needs_it(world: World) -> None:
    sending(world)
    channel = world.p_backend.channels[0]
    world.deliver_segment(channel)
    lost = ChannelLost(channel.origin, "reset")
    while world.deliver_segment(channel):
        pass
    world.d_backend.arrivals.append(lost)
    world.receiver.poll()  # all of "r" came before the loss
    assert not world.d_port.failed
    world.end_prefill("r")
    world.run()
    world.assert_published("r", 32)
    world.d_port.tokens["s"] = 32
    world.start("s", 32)
    world.compute("s", 32)
    world.deliver_segment(channel)
    world.d_backend.arrivals.append(lost)
    world.receiver.poll()
    assert "reset" in world.d_port.failed["s"]


def test_the_loss_of_a_channel_that_was_replaced_is_no_loss_of_the_new_one(world: World) -> None:
    """A receive thread that waits for staging sees late that its sender hung up, and connected again, long ago."""
    sending(world)
    old = world.p_backend.channels[0]
    world.deliver_segment(old)
    world.receiver.poll()
    old.break_off("stalled")
    world.polls()
    world.frames_to_d()
    world.d_port.tokens["s"] = 32
    world.start("s", 32)
    world.compute("s", 32)
    new = world.p_backend.channels[1]
    world.deliver_segment(new)
    world.d_backend.arrivals.append(ChannelLost(old.origin, "closed by the sender"))
    world.receiver.poll()
    assert "s" not in world.d_port.failed
    world.end_prefill("s")
    world.run()
    world.assert_published("s", 32)
    world.assert_at_rest()


def test_news_about_nothing_are_answered(world: World) -> None:
    world.receiver.on_frame(P_PEER, Frame(KEY, End(1, b"", False)))
    assert isinstance(world.d_said[-1], Abort)
    world.receiver.on_frame(P_PEER, Frame(KEY, Busy(1.0)))
    assert isinstance(world.d_said[-1], Abort)
    world.add_to_d("s", 32)
    ask(world, TransferKey("t-s", 1))
    world.receiver.on_frame(D_PEER, Frame(TransferKey("t-s", 1), End(0, b"", False)))  # of another stream
    assert world.receiver.leases == 1
