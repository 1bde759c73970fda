"""A worker whose session is fine and whose requests all fail: it is left out, looked at again, and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.v1 import inference_pb2 as pb
from router.breaker import FAILURES
from tests.services.fake_worker import Behaviour
from tests.services.processes import RedisProcess, running_redis
from tests.services.test_router import Fleet, expected, running_fleet


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisProcess]:
    with running_redis(tmp_path) as server:
        yield server


def metric(fleet: Fleet, name: str, **labels: str) -> float:
    return fleet.router._metrics_registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(("bad_role", "code"), [("prefill", "INTERNAL"), ("decode", "HANDOFF_FAILED")])
async def test_a_bad_worker_eats_few_attempts_and_no_request(valkey: RedisProcess, bad_role: str, code: str) -> None:
    """It is the least loaded one all the time, as it fails at once; with one attempt more than that, all are served."""
    bad_behaviour = Behaviour(fail_code=f"ERROR_CODE_{code}")
    async with running_fleet(valkey, policy="least_loaded", max_attempts=2) as fleet:
        for role in ("prefill", "decode"):
            for i in range(3):
                behaviour = bad_behaviour if role == bad_role and i == 0 else Behaviour(first_token_s=0.01)
                await fleet.add(f"{role}{i}", role, behaviour=behaviour)
        bad = fleet.workers[f"{bad_role}0"]
        for _ in range(40):
            answers = await asyncio.gather(*(fleet.ask() for _ in range(4)))
            assert all(answer.tokens == expected(8) for answer in answers)
        ejections = metric(fleet, "pdserve_ejections_total", worker=bad.worker_id)
        assert ejections >= 1
        assert len(bad.opened) <= 4 * FAILURES + ejections  # four at once, then one for each look
        assert metric(fleet, "pdserve_ejected_workers") >= 1
        assert metric(fleet, "pdserve_failures_total", code=f"ERROR_CODE_{code}") == 0
        bad.behaviour = Behaviour(first_token_s=0.01)
        asked = len(bad.opened)

        async def until_taken_back() -> None:
            while metric(fleet, "pdserve_ejected_workers"):
                assert (await fleet.ask()).tokens == expected(8)

        await asyncio.wait_for(until_taken_back(), 60)
        await asyncio.gather(*(fleet.ask() for _ in range(12)))
        assert len(bad.opened) > asked + 1


async def test_a_bad_worker_is_used_when_there_is_no_other(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, max_attempts=1) as fleet:
        bad = await fleet.add("d0", "decode", behaviour=Behaviour(fail_code="ERROR_CODE_INTERNAL"))
        for n in range(1, 2 * FAILURES):
            assert (await fleet.ask()).code == "ERROR_CODE_INTERNAL"
            assert len(bad.opened) == n
        bad.behaviour = Behaviour()
        assert (await fleet.ask()).tokens == expected(8)
        assert metric(fleet, "pdserve_ejected_workers") == 0


async def test_a_restarted_worker_is_not_blamed_for_its_past(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, max_attempts=2) as fleet:
        bad = await fleet.add("d0", "decode", behaviour=Behaviour(fail_code="ERROR_CODE_INTERNAL"))
        await fleet.add("d1", "decode")
        for _ in range(3 * FAILURES):
            assert (await fleet.ask()).finish.reason == pb.FINISH_REASON_LENGTH
        assert metric(fleet, "pdserve_ejected_workers") == 1
        await bad.stop()
        again = await fleet.add("d0", "decode")
        for _ in range(4):
            assert (await fleet.ask()).tokens == expected(8)
        assert again.opened
        assert metric(fleet, "pdserve_ejected_workers") == 0
