"""Whatever happens to one side, the other ends the transfer with a reason, frees everything, and serves again."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from kv_transfer.protocol import Frame, Open, Ticket
from tests.conformance.conftest import Lane, MakePair
from tests.conformance.jobs import Job
from tests.conformance.pair import Pair, Side
from tests.ports import free_port

HELD = {"ticket": 0, "streaming": 2}


def held_job(name: str, state: str, **changed: object) -> Job:
    return Job(name, 300, hold_after=HELD[state], **changed)  # type: ignore[arg-type]


def run_to(pair: Pair, job: Job, state: str) -> None:
    """Until P has the ticket, or has sent its first chunks."""
    pair.start(job)
    pair.run_until(lambda: bool(pair.p.of("granted", job.name)), "the ticket is granted")
    if state == "streaming":
        pair.run_for(0.2)


def still_works(pair: Pair) -> None:
    job = Job("afterwards", 100)
    pair.start(job)
    pair.run_to_end(job)
    pair.assert_published(job)
    pair.assert_at_rest()


# ---- abort


@pytest.mark.parametrize("state", ["ticket", "streaming"])
@pytest.mark.parametrize("who", ["p", "d"])
def test_abort_from_either_side(pair: Pair, who: str, state: str) -> None:
    job = held_job("aborted", state)
    run_to(pair, job, state)
    aborting, other = (pair.p, pair.d) if who == "p" else (pair.d, pair.p)
    aborting.command("abort", job.name)
    pair.run_to_end(job)
    assert "client" in str(other.of("failed", job.name)[0][2])
    pair.assert_at_rest()
    still_works(pair)


def test_abort_while_the_receiver_is_in_a_long_step(pair: Pair) -> None:
    """Segments of the aborted transfer fill the staging; they are dropped, and the slots are free again."""
    job = Job("long-step", 1000)
    pair.d.command("deaf", True)
    pair.start(job)
    pair.run_until(pair.is_held_back, "staging is full")
    pair.d.command("abort", job.name)
    assert pair.stats(pair.d)["used_blocks"] == 0  # at once, whatever is still in staging
    pair.d.command("deaf", False)
    pair.run_to_end(job)
    assert pair.stats(pair.d)["dropped"]["stale"] > 0  # type: ignore[index]
    pair.assert_at_rest()
    still_works(pair)


# ---- dead and stopped peers


@pytest.mark.parametrize("state", ["ticket", "streaming"])
@pytest.mark.parametrize("who", ["p", "d"])
def test_killed(pair: Pair, who: str, state: str) -> None:
    job = held_job("killed", state)
    run_to(pair, job, state)
    victim, survivor = (pair.p, pair.d) if who == "p" else (pair.d, pair.p)
    victim.end()
    pair.replace(victim, dataclasses.replace(victim.config, incarnation=2))
    if state == "ticket":
        survivor.command("peer_lost")  # what the control stream tells; the data channel told nothing yet
    pair.run_until(lambda: bool(survivor.of("failed", job.name)), "the survivor ends it")
    pair.assert_at_rest()
    incarnations = {f"{'sender' if who == 'p' else 'receiver'}_incarnation": 2}
    again = Job("killed", 300, attempt=2, **incarnations)  # type: ignore[arg-type]
    pair.start(again)
    pair.run_to_end(again)
    pair.assert_published(again)
    pair.assert_at_rest()


def test_a_receiver_that_is_replaced_knows_no_tickets_of_its_predecessor(pair: Pair) -> None:
    """Another process under the same name and control stream: what P was promised before means nothing to it."""
    job = held_job("promised", "ticket")
    run_to(pair, job, "ticket")
    pair.d.end()
    pair.replace(pair.d, dataclasses.replace(pair.d.config, incarnation=2))
    pair.p.command("go_on", job.name)
    pair.run_until(lambda: bool(pair.p.of("failed", job.name)), "P learns it from the data channel or from the new D")
    again = Job("promised", 300, attempt=2, receiver_incarnation=2)
    pair.start(again)
    pair.run_to_end(again)
    pair.assert_published(again)
    pair.assert_at_rest()


@pytest.mark.parametrize("state", ["ticket", "streaming"])
def test_a_receiver_that_is_replaced_at_the_very_same_host_and_port(
    make_pair: MakePair, lane: Lane, state: str
) -> None:
    """What was promised before, and what is on its way, means nothing to the new one."""
    if lane.backend != "tcp":
        pytest.skip("only tcp has a port of its own choice")
    pair = make_pair(receiver={"data_port": free_port()})
    job = held_job("before", state)
    run_to(pair, job, state)
    pair.d.end()
    pair.replace(pair.d, dataclasses.replace(pair.d.config, incarnation=2))
    pair.p.command("go_on", job.name)
    pair.run_until(lambda: bool(pair.p.of("failed", job.name)), "P learns it")
    late = Job("late", 100)  # P takes the new one for the old one
    pair.start(late)
    pair.run_to_end(late)
    assert "incarnation" in str(pair.p.of("failed", late.name)[0][2])
    assert not pair.d.of("published")
    again = Job("before", 300, attempt=2, receiver_incarnation=2)
    pair.start(again)
    pair.run_to_end(again)
    pair.assert_published(again)
    pair.assert_at_rest()


@pytest.mark.parametrize("state", ["ticket", "streaming"])
@pytest.mark.parametrize("who", ["p", "d"])
def test_stopped_and_woken_after_the_lease(make_pair: MakePair, who: str, state: str) -> None:
    pair = make_pair(sender={"lease_s": 1.0}, receiver={"lease_s": 1.0, "stall_timeout_s": 1.0})
    job = held_job("stopped", state)
    run_to(pair, job, state)
    victim, survivor = (pair.p, pair.d) if who == "p" else (pair.d, pair.p)
    victim.signal(signal.SIGSTOP)
    pair.run_until(lambda: bool(survivor.of("failed", job.name)), "the survivor's lease ends")
    pair.p.command("go_on", job.name)
    pair.run_for(1.0)
    victim.signal(signal.SIGCONT)
    pair.run_to_end(job)
    assert victim.of("failed", job.name)
    assert not pair.d.of("published", job.name)
    pair.assert_at_rest()
    still_works(pair)


# ---- what does not belong


@pytest.mark.parametrize("tamper", ["flip", "header", "drop", "repeat", "swap"])
def test_segments_that_are_bent_on_the_way(make_pair: MakePair, tamper: str) -> None:
    pair = make_pair(sender={"tamper": tamper})
    job = Job(f"tamper-{tamper}", 300)
    pair.start(job)
    pair.run_to_end(job)
    if tamper in ("repeat", "swap"):
        pair.assert_published(job)
        assert pair.stats(pair.d)["dropped"] == ({"duplicate": 1} if tamper == "repeat" else {})
    else:
        assert not pair.d.of("published", job.name)
        assert pair.p.of("failed", job.name)
        assert pair.d.of("failed", job.name)
    pair.assert_at_rest()
    still_works(pair)


def test_stale_epoch(pair: Pair) -> None:
    """A sender that believes in another ticket: its segments are dropped, and the transfer fails for want of them."""

    def older(frame: Frame) -> list[Frame]:
        if isinstance(frame.body, Ticket):
            return [dataclasses.replace(frame, body=dataclasses.replace(frame.body, epoch=frame.body.epoch - 1))]
        return [frame]

    pair.to_p = older
    job = Job("stale-epoch", 100)
    pair.start(job)
    pair.run_to_end(job)
    assert "missing" in str(pair.d.of("failed", job.name)[0][2])
    assert pair.stats(pair.d)["dropped"]["stale"] > 0  # type: ignore[index]
    pair.to_p = lambda frame: [frame]
    pair.assert_at_rest()
    still_works(pair)


def test_stale_attempt(pair: Pair) -> None:
    old, new = held_job("retried", "streaming"), Job("retried", 300, attempt=2)
    run_to(pair, old, "streaming")
    pair.to_p = lambda frame: []  # P hears nothing of it, and goes on with the old attempt
    pair.d.command("start", new)
    pair.run_until(lambda: bool(pair.d.of("failed", old.name)), "the old attempt is over")
    pair.p.command("go_on", old.name)
    pair.run_for(0.3)
    pair.to_p = lambda frame: [frame]
    pair.p.command("start", new)
    pair.run_to_end(new)
    pair.assert_published(new)
    assert pair.stats(pair.d)["dropped"]["stale"] > 0  # type: ignore[index]
    pair.p.command("abort", old.name)  # or the loss of the peer: the frames that said so were lost
    pair.run_to_end(old)
    pair.assert_at_rest()


def test_wrong_fingerprint_is_refused_before_any_byte_moves(make_pair: MakePair) -> None:
    pair = make_pair(sender={"fingerprint": "other-model"})
    job = Job("mismatch", 100)
    pair.start(job)
    pair.run_to_end(job)
    for side in (pair.p, pair.d):
        reason = str(side.of("failed", job.name)[0][2])
        assert "'other-model'" in reason
        assert "'model'" in reason
    assert not pair.p.of("granted", job.name)
    pair.assert_at_rest()


def test_the_data_plane_checks_the_fingerprint_itself(make_pair: MakePair) -> None:
    """Even with a forged control stream no segment gets through."""
    pair = make_pair(sender={"fingerprint": "other-model"})
    sender, receiver = pair.p.config, pair.d.config

    def forged(frame: Frame) -> list[Frame]:
        if isinstance(frame.body, Open):
            return [dataclasses.replace(frame, body=dataclasses.replace(frame.body, layout=receiver.layout()))]
        if isinstance(frame.body, Ticket):
            return [dataclasses.replace(frame, body=dataclasses.replace(frame.body, layout=sender.layout()))]
        return [frame]

    pair.to_d = pair.to_p = forged
    job = Job("forged", 100)
    pair.start(job)
    pair.run_to_end(job)
    reason = str(pair.p.of("failed", job.name)[0][2])
    assert "refused" in reason
    assert "'other-model'" in reason
    assert not pair.d.of("published", job.name)
    pair.assert_at_rest()


def test_the_data_plane_refuses_a_ticket_of_another_incarnation(pair: Pair) -> None:
    job = Job("old-incarnation", 100, receiver_incarnation=7)
    pair.start(job)
    pair.run_to_end(job)
    assert "incarnation" in str(pair.p.of("failed", job.name)[0][2])
    pair.assert_at_rest()


@pytest.mark.parametrize("who", ["p", "d"])
def test_channels_that_come_and_go_leave_nothing(make_pair: MakePair, who: str) -> None:
    """Whichever side gives the other up ends the channel for both, and the next job makes a new one."""
    pair = make_pair()
    giving_up, other = (pair.p, pair.d) if who == "p" else (pair.d, pair.p)

    def threads(side: Side) -> int:
        return int(str(pair.stats(side)["threads"]))

    def give_up() -> None:
        with_channel = threads(other)
        giving_up.command("peer_lost")
        pair.run_until(lambda: threads(other) < with_channel, "the other one hears of it")

    def some(name: str, count: int) -> None:
        for n in range(count):
            job = Job(f"{name}-{n}", 40)
            pair.start(job)
            pair.run_to_end(job)
            pair.assert_published(job)
            give_up()

    def left() -> list[int]:
        return [int(str(pair.stats(side)[what])) for side in (pair.p, pair.d) for what in ("fds", "threads")]

    some("first", 2)
    pair.run_for(0.5)
    before = left()
    some("then", 10)
    pair.run_until(
        lambda: all(now <= was for now, was in zip(left(), before, strict=True)), f"no more than {before}", 10
    )
    pair.assert_at_rest()
