"""Prompts that a decode worker computes because the prefill workers are busy: a router, and workers without engines.

The fake decode worker says that a prompt's prefill took 0.25 s, whatever is so: a router learns from that that the
prefill worker computes 1,188 tokens a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.v1 import inference_pb2 as pb
from tests.services.fake_worker import Behaviour
from tests.services.processes import RedisProcess, eventually
from tests.services.test_router import Fleet, expected, running_fleet, valkey

__all__ = ["valkey"]  # a fixture

PROMPT = list(range(300))


BUSY_S = 0.6


@asynccontextmanager
async def pair(
    valkey: RedisProcess, *, rate: float | None = 1000.0, free_blocks: int = 100, **settings: object
) -> AsyncIterator[Fleet]:
    """A prefill worker whose pace the router knows and which is stuck now for BUSY_S, and a decode worker."""
    settings = {"policy": "prefix_aware", "local_prefill_tokens": 4, **settings}
    async with running_fleet(valkey, **settings) as fleet:
        p = await fleet.add("p0", "prefill")
        d = await fleet.add("d0", "decode", prefill_tokens_per_s=rate, free_blocks=free_blocks)
        assert (await fleet.ask(2, prompt=PROMPT)).tokens == expected(2, PROMPT)
        seen = fleet.router.workers.known["d0"]
        await eventually(lambda: seen.load.shares_prefill == (rate is not None), "it is heard what it offers")
        p.behaviour, d.behaviour = Behaviour(first_token_s=BUSY_S), Behaviour(handoff_s=BUSY_S)
        yield fleet


async def burst(fleet: Fleet, count: int) -> int:
    """Different prompts at once, all answered as they should be; how many the decode worker computed."""
    before = local(fleet)
    prompts = [[1000 + i, *PROMPT] for i in range(count)]
    answers = await asyncio.gather(*(fleet.ask(2, prompt=prompt) for prompt in prompts))
    assert [answer.tokens for answer in answers] == [expected(2, prompt) for prompt in prompts]
    return local(fleet) - before


def local(fleet: Fleet) -> int:
    return sum(not request.HasField("handoff") for request in fleet.workers["d0"].opened)


def counted(fleet: Fleet, cause: str = "decode_sooner") -> float:
    registry = fleet.router._metrics_registry
    return registry.get_sample_value("pdserve_local_prefills_total", {"cause": cause}) or 0.0


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded", "power_of_two"])
async def test_what_would_queue_too_long_is_left_to_the_decode_worker(valkey: RedisProcess, policy: str) -> None:
    async with pair(valkey, policy=policy) as fleet:
        helped = await burst(fleet, 12)
        # About as fast as each other: it gets its share, and the prefill worker keeps its own.
        assert 3 <= helped <= 7
        assert counted(fleet) == helped
        # With an empty queue it is the prefill worker's again.
        assert await burst(fleet, 1) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "round_robin"},
        {"policy": "session"},
        {"local_prefill_tokens": 0},
        {"rate": None},
        {"rate": 20.0},
        {"free_blocks": 5},
    ],
    ids=["round_robin", "session", "always remote", "no offer", "too slow", "no room"],
)
async def test_otherwise_everything_goes_to_the_prefill_worker(
    valkey: RedisProcess, settings: dict[str, object]
) -> None:
    async with pair(valkey, **settings) as fleet:  # type: ignore[arg-type]
        assert await burst(fleet, 8) == 0
        assert counted(fleet) == 0


@pytest.mark.parametrize("policy", ["prefix_aware", "round_robin"])
async def test_a_full_queue_sends_to_the_decode_worker_before_it_refuses(valkey: RedisProcess, policy: str) -> None:
    async with pair(valkey, policy=policy, max_queued_tokens=400) as fleet:
        d = fleet.workers["d0"]
        d.behaviour = Behaviour(first_token_s=BUSY_S)  # of its own queue, too
        answers = await asyncio.gather(*(fleet.ask(2, prompt=[1000 + i, *PROMPT]) for i in range(10)))
        codes = [answer.finish.failure.code for answer in answers]
        assert codes.count(pb.ERROR_CODE_OVERLOADED) == 10 - 4  # each has one prompt, and room for one more
        assert local(fleet) == counted(fleet) + counted(fleet, "prefill_full") == 2
        assert counted(fleet, "prefill_full") >= 1
        assert all(answer.tokens for answer in answers if not answer.finish.HasField("failure"))


async def test_always_remote_refuses_when_the_prefill_queue_is_full(valkey: RedisProcess) -> None:
    async with pair(valkey, local_prefill_tokens=0, max_queued_tokens=400) as fleet:
        answers = await asyncio.gather(*(fleet.ask(2, prompt=[1000 + i, *PROMPT]) for i in range(6)))
        codes = [answer.finish.failure.code for answer in answers]
        assert codes.count(pb.ERROR_CODE_OVERLOADED) == 4
        assert local(fleet) == 0


async def test_a_choice_of_a_group_follows_its_first(valkey: RedisProcess) -> None:
    """The n outputs of a prompt share its prefix where that is, even when the prefill worker is free again."""
    async with pair(valkey) as fleet:
        p, d = fleet.workers["p0"], fleet.workers["d0"]
        held = [asyncio.create_task(fleet.ask(2, prompt=[500 + i, *PROMPT])) for i in range(3)]
        await eventually(lambda: len(p.opened) + local(fleet) == 4, "a queue")
        await asyncio.gather(*(fleet.ask(2, group="n", prompt=PROMPT) for _ in range(3)), *held)
        await fleet.ask(2, group="n", prompt=PROMPT)
        assert [request.HasField("handoff") for request in d.opened if request.group == "n"] == [False] * 4


async def test_a_decode_worker_that_fails_gives_it_to_the_pair_without_it(valkey: RedisProcess) -> None:
    async with pair(valkey) as fleet:
        other = await fleet.add("d1", "decode")
        fleet.workers["d0"].behaviour = Behaviour(fail_code="ERROR_CODE_INTERNAL", handoff_s=BUSY_S)
        other.behaviour = Behaviour(handoff_s=BUSY_S)
        answers = await asyncio.gather(*(fleet.ask(2, prompt=[1000 + i, *PROMPT]) for i in range(10)))
        assert [answer.tokens for answer in answers] == [expected(2, [1000 + i, *PROMPT]) for i in range(10)]
        assert counted(fleet) > 0
        assert all(request.HasField("handoff") for request in other.opened)
