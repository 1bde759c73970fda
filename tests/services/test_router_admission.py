"""What a router refuses at the door: requests that would wait too long. What it has let in, it serves."""

from __future__ import annotations

import asyncio

from pdserve.v1 import inference_pb2 as pb
from router.pace import QueuePace
from tests.services.fake_worker import Behaviour
from tests.services.processes import RedisProcess, eventually
from tests.services.test_router import Answer, Fleet, expected, running_fleet, valkey

__all__ = ["valkey"]  # a fixture

PROMPT = list(range(300))
FIRST_TOKEN_S = 0.4


async def with_a_queue(fleet: Fleet) -> list[asyncio.Task[Answer]]:
    """A worker of a known pace, with a prompt in its queue: 0.4 s of work at least, more on a slow host."""
    worker = await fleet.add("a0", "aggregated", behaviour=Behaviour(first_token_s=FIRST_TOKEN_S))
    for _ in range(2):
        assert (await fleet.ask(2, prompt=PROMPT)).tokens == expected(2, PROMPT)
    worker.behaviour = Behaviour(first_token_s=3 * FIRST_TOKEN_S)
    held = [asyncio.create_task(fleet.ask(2, prompt=PROMPT))]
    await eventually(lambda: len(worker.opened) == 3, "it waits at the worker")
    return held


async def test_a_longer_wait_than_is_allowed_is_refused_with_a_hint(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, max_queue_s=0.3) as fleet:
        held = await with_a_queue(fleet)
        refused = await fleet.ask(2, prompt=PROMPT)
        assert refused.code == "ERROR_CODE_OVERLOADED"
        assert refused.finish.failure.retryable
        assert refused.finish.failure.retry_after_s > 0
        for answer in await asyncio.gather(*held):
            assert answer.tokens == expected(2, PROMPT)
        assert (await fleet.ask(2, prompt=PROMPT)).tokens == expected(2, PROMPT)
        await eventually(fleet.at_rest, "nothing is left")


async def test_a_wait_beyond_the_deadline_is_refused_at_once(valkey: RedisProcess) -> None:
    """Without any limit: it would only use up its time."""
    async with running_fleet(valkey) as fleet:
        held = await with_a_queue(fleet)
        assert (await fleet.ask(2, prompt=PROMPT, timeout_s=0.3)).code == "ERROR_CODE_OVERLOADED"
        patient = await fleet.ask(2, prompt=PROMPT, timeout_s=30)
        assert patient.tokens == expected(2, PROMPT)
        await asyncio.gather(*held)


async def test_what_was_let_in_is_not_refused_later(valkey: RedisProcess) -> None:
    """A request that resumes with tokens, from a lost worker or router, passes a queue that a new one may not."""
    async with running_fleet(valkey, max_queue_s=0.8, max_queued_tokens=300) as fleet:
        held = await with_a_queue_of_tokens(fleet)
        so_far = expected(1, PROMPT)
        resumed = await fleet.ask(3, prompt=PROMPT, output_so_far=so_far)
        assert resumed.finish.reason == pb.FINISH_REASON_LENGTH
        assert resumed.tokens == expected(3, PROMPT, 1)
        await asyncio.gather(*held)


async def with_a_queue_of_tokens(fleet: Fleet) -> list[asyncio.Task[Answer]]:
    worker = await fleet.add("a0", "aggregated", behaviour=Behaviour(first_token_s=4 * FIRST_TOKEN_S))
    held = [asyncio.create_task(fleet.ask(2, prompt=PROMPT))]
    await eventually(lambda: len(worker.opened) == 1, "the queue is full")
    assert (await fleet.ask(2, prompt=PROMPT)).code == "ERROR_CODE_OVERLOADED"
    return held


def test_pace_follows_what_is_computed() -> None:
    pace = QueuePace()
    assert pace.wait_s(1000, 0.0) == 0.0  # not known
    pace.began(0.0)
    for second in range(1, 6):
        pace.computed(100, float(second))
    assert abs(pace.wait_s(1000, 5.0) - 10.0) < 1e-6
    for second in range(6, 60):
        pace.computed(200, float(second))
    assert abs(pace.wait_s(1000, 59.0) - 5.0) < 0.1  # the old pace is forgotten
    assert pace.wait_s(1000, 79.0) > 10.0  # nothing has come out for 20 s
    assert (pace.stalled_s(1000, 79.0), pace.stalled_s(0, 79.0)) == (20.0, 0.0)
    assert abs(pace.s_per_token - 1 / 200) < 1e-4
    pace.began(1000.0)
    assert abs(pace.wait_s(1000, 1000.0) - 5.0) < 0.1  # a pause without a queue says nothing
