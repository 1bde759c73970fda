"""What arrives is what was sent: sizes, block sizes, dtypes, many at once, for a long time."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import MakePair
from tests.conformance.jobs import Job
from tests.conformance.pair import Pair


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 300])
def test_sizes(pair: Pair, tokens: int) -> None:
    job = Job(f"size-{tokens}", tokens)
    pair.start(job)
    pair.run_to_end(job)
    pair.assert_published(job)
    pair.assert_at_rest()


@pytest.mark.parametrize(("tokens", "cached"), [(64, 16), (65, 64), (64, 64)])
def test_what_the_receiver_has_is_not_sent(pair: Pair, tokens: int, cached: int) -> None:
    job = Job(f"cached-{tokens}-{cached}", tokens, cached=cached)
    pair.start(job)
    pair.run_to_end(job)
    pair.assert_published(job)
    assert pair.p.of("granted", job.name)[0][2] == cached


def test_a_segment_that_fills_its_slot_and_one_of_a_single_layer(pair: Pair) -> None:
    jobs = [Job("large-chunk", 2000, chunk=2000, layers_at_once=4), Job("single-layers", 48, layers_at_once=1)]
    pair.start(*jobs)
    pair.run_to_end(*jobs)
    for job in jobs:
        pair.assert_published(job)


def test_a_finished_first_token_needs_no_kv(pair: Pair) -> None:
    job = Job("finished", 100, finished=True)
    pair.start(job)
    pair.run_to_end(job)
    assert pair.d.of("finished", job.name)
    assert not pair.d.of("published", job.name)
    pair.assert_at_rest()


def test_many_at_once(pair: Pair) -> None:
    """More than staging and than the pool can hold: BUSY and back-pressure, and everybody gets through."""
    jobs = [Job(f"many-{n}", 150 + n) for n in range(64)]
    pair.start(*jobs)
    pair.run_to_end(*jobs)
    assert pair.p.of("busy")
    for job in jobs:
        pair.assert_published(job)
    pair.assert_at_rest()


def test_a_busy_engine_holds_the_sender_back_and_loses_nothing(pair: Pair) -> None:
    job = Job("deaf", 1000)
    pair.d.command("deaf", True)
    pair.start(job)
    pair.run_until(pair.is_held_back, "staging is full")
    assert not pair.d.of("published", job.name)
    pair.d.command("deaf", False)
    pair.run_to_end(job)
    pair.assert_published(job)
    pair.assert_at_rest()


def test_nobody_spins_when_idle(pair: Pair) -> None:
    job = Job("before-idle", 100)
    pair.start(job)
    pair.run_to_end(job)
    before = [pair.stats(side)["cpu_s"] for side in (pair.p, pair.d)]
    pair.run_for(1.0)
    for side, was in zip((pair.p, pair.d), before, strict=True):
        assert pair.stats(side)["cpu_s"] - was < 0.3  # type: ignore[operator]


@pytest.mark.slow
def test_memory_is_flat(make_pair: MakePair) -> None:
    """10,000 transfers: neither memory, nor file descriptors, nor threads grow. What is kept for a lease, of those that
    have ended, is kept for seconds only."""
    pair = make_pair(sender={"lease_s": 5.0}, receiver={"lease_s": 5.0})

    def some(name: str, count: int) -> None:
        for batch in range(count // 50):
            jobs = [Job(f"{name}-{batch}-{n}", 3, layers_at_once=4) for n in range(50)]
            pair.start(*jobs)
            pair.run_to_end(*jobs)
            assert len(pair.d.of("published")) == len(jobs)
            for side in (pair.p, pair.d):
                side.events.clear()
                side.command("forget")

    some("warm", 1000)
    before = [pair.stats(side) for side in (pair.p, pair.d)]
    some("flat", 9000)
    for side, was in zip((pair.p, pair.d), before, strict=True):
        now = pair.stats(side)
        assert now["resident_bytes"] <= was["resident_bytes"] + (4 << 20)
        assert now["fds"] <= was["fds"]
        assert now["threads"] <= was["threads"]
    pair.assert_at_rest()


@pytest.mark.parametrize("receiver_block", [16, 32, 64, 128])
@pytest.mark.parametrize("sender_block", [16, 32, 64, 128])
def test_block_sizes(make_pair: MakePair, sender_block: int, receiver_block: int) -> None:
    pair = make_pair(sender={"block_size": sender_block}, receiver={"block_size": receiver_block})
    jobs = [Job("whole", 128), Job("partial", 77), Job("cached", 150, cached=receiver_block)]
    pair.start(*jobs)
    pair.run_to_end(*jobs)
    for job in jobs:
        pair.assert_published(job)
    pair.assert_at_rest()


@pytest.mark.parametrize("receiver_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sender_dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(make_pair: MakePair, sender_dtype: str, receiver_dtype: str) -> None:
    pair = make_pair(sender={"dtype": sender_dtype, "block_size": 32}, receiver={"dtype": receiver_dtype})
    job = Job("dtypes", 77)
    pair.start(job)
    pair.run_to_end(job)
    pair.assert_published(job)


def test_the_receiver_may_have_smaller_slots(make_pair: MakePair) -> None:
    pair = make_pair(receiver={"slot_bytes": 4096})
    job = Job("small-slots", 500, chunk=500)
    pair.start(job)
    pair.run_to_end(job)
    pair.assert_published(job)
