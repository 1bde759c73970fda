"""While a hand-off is under way a retry replaces the worker that failed, and keeps the one that has something of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.services.fake_worker import Behaviour, FakeWorker
from tests.services.test_router import Fleet, expected, fleet, valkey

__all__ = ["fleet", "valkey"]  # fixtures

WAITING = Behaviour(waits_for_kv=True)
"""A decode worker whose KV has not come."""
SLOW = Behaviour(first_token_s=1.5)
"""A prefill worker that is still at it."""


async def three_each(fleet: Fleet, prefill: Behaviour, decode: Behaviour) -> tuple[list[FakeWorker], list[FakeWorker]]:
    prefills = [await fleet.add(f"p{n}", "prefill", behaviour=prefill) for n in range(3)]
    return prefills, [await fleet.add(f"d{n}", "decode", behaviour=decode) for n in range(3)]


def path(workers: Iterable[FakeWorker]) -> list[str]:
    """Whom each attempt went to, in order; one without a hand-off comes after those with one."""
    opened = [
        (not request.HasField("handoff"), request.handoff.attempt, worker.worker_id)
        for worker in workers
        for request in worker.opened
    ]
    return [worker_id for *_, worker_id in sorted(opened)]


def replaced_after_one(workers: list[FakeWorker], behaviour: Behaviour, good: Behaviour) -> None:
    """The first of these workers to be asked behaves so, the others well."""

    def watch(worker: FakeWorker) -> None:
        for other in workers:
            if other is not worker:
                other.behaviour = good

    for worker in workers:
        worker.behaviour = behaviour
        worker.on_event = lambda event, worker=worker: watch(worker) if event["event"] == "open" else None  # type: ignore[misc]


@pytest.mark.parametrize("code", ["ERROR_CODE_WORKER_LOST", "ERROR_CODE_INTERNAL"])
async def test_another_prefill_worker_and_the_same_decode_worker(fleet: Fleet, code: str) -> None:
    prefills, decodes = await three_each(fleet, Behaviour(), WAITING)
    replaced_after_one(prefills, Behaviour(fail_code=code), Behaviour())
    assert (await fleet.ask()).tokens == expected(8)
    first, second = path(decodes)
    assert first == second
    assert len(set(path(prefills))) == 2
    decode = next(worker for worker in decodes if worker.opened)
    assert [request.handoff.attempt for request in decode.opened] == [1, 2]
    assert len({request.handoff.transfer_id for request in decode.opened}) == 1
    assert decode.aborted == [(decode.opened[0].request_id, "retry")]


async def test_another_decode_worker_and_the_same_prefill_worker(fleet: Fleet) -> None:
    prefills, decodes = await three_each(fleet, SLOW, Behaviour())
    replaced_after_one(decodes, Behaviour(fail_code="ERROR_CODE_WORKER_LOST", first_token_s=0.1), Behaviour())
    assert (await fleet.ask()).tokens == expected(8)
    first, second = path(prefills)
    assert first == second
    assert len(set(path(decodes))) == 2


async def test_the_one_that_says_that_the_other_is_lost_is_believed(fleet: Fleet) -> None:
    prefills, decodes = await three_each(fleet, SLOW, Behaviour())
    failed = Behaviour(fail_code="ERROR_CODE_HANDOFF_FAILED", fail_peer_lost=True, first_token_s=0.1)
    for decode in decodes:
        decode.behaviour = failed

    def mend(event: dict[str, object]) -> None:
        if event["event"] == "open" and sum(len(decode.opened) for decode in decodes) == 2:
            for decode in decodes:
                decode.behaviour = Behaviour()

    for decode in decodes:
        decode.on_event = mend
    assert (await fleet.ask()).tokens == expected(8)
    first, second = path(decodes)
    assert first == second
    assert len(set(path(prefills))) == 2


async def test_but_not_twice(fleet: Fleet) -> None:
    """A worker that blames whoever it works with may be the reason itself."""
    prefills, decodes = await three_each(fleet, SLOW, Behaviour())
    failed = Behaviour(fail_code="ERROR_CODE_HANDOFF_FAILED", fail_peer_lost=True, first_token_s=0.1)
    for decode in decodes:
        decode.behaviour = failed
    assert (await fleet.ask()).code == "ERROR_CODE_HANDOFF_FAILED"
    first, second, third = path(decodes)
    assert first == second != third
    assert len(set(path(prefills))) == 2  # the last attempt is left to a decode worker alone


async def test_when_either_may_be_the_reason_both_are_replaced(fleet: Fleet) -> None:
    prefills, decodes = await three_each(fleet, SLOW, Behaviour())
    replaced_after_one(decodes, Behaviour(fail_code="ERROR_CODE_HANDOFF_FAILED", first_token_s=0.1), Behaviour())
    assert (await fleet.ask()).tokens == expected(8)
    assert len(set(path(prefills))) == len(set(path(decodes))) == 2
