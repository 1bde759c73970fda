"""Fake workers that come and go in every order, under load: the router loses no request and no token."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.services.fake_worker import Behaviour, FakeWorker
from tests.services.processes import RedisProcess
from tests.services.test_router import Fleet, expected, running_fleet, valkey

__all__ = ["valkey"]  # fixture

CLIENTS = 8
ROLLS = 25
MAX_TOKENS = 40


class Roller:
    """Ends and starts workers by a seed; there are always two of each role that stay for the moment."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        self._ids = itertools.count()

    async def add(self, role: str, worker_id: str = "") -> FakeWorker:
        pace_s = self._random.choice((0.0, 0.002, 0.01))
        behaviour = Behaviour(first_token_s=pace_s, token_interval_s=pace_s)
        return await self._fleet.add(worker_id or f"{role}-{next(self._ids)}", role, behaviour=behaviour)

    async def roll(self) -> None:
        """One goes, at once or after its successor is there; under its own name or a new one."""
        leaving = self._random.choice(list(self._fleet.workers.values()))
        successor_first = self._random.random() < 0.5
        if successor_first:
            await self.add(leaving.role)
        del self._fleet.workers[leaving.worker_id]
        await leaving.drain()
        if not successor_first:
            await self.add(leaving.role, self._random.choice(("", leaving.worker_id)))
        await asyncio.sleep(self._random.choice((0.0, 0.02, 0.1)))


@pytest.mark.parametrize("seed", range(4))
async def test_no_request_fails_whoever_leaves(valkey: RedisProcess, seed: int) -> None:
    async with running_fleet(valkey, policy="least_loaded") as fleet:
        roller = Roller(fleet, seed)
        for role in ("prefill", "decode"):
            for _ in range(3):
                await roller.add(role)
        stopped = False
        answered = 0

        async def ask(client: int) -> None:
            nonlocal answered
            for n in itertools.count():
                if stopped:
                    return
                prompt = [client + 1, n + 1, 7]
                answer = await fleet.ask(MAX_TOKENS, prompt=prompt)
                assert answer.tokens == expected(MAX_TOKENS, prompt), answer.outputs[-1]
                answered += 1

        clients = [asyncio.create_task(ask(client)) for client in range(CLIENTS)]
        for _ in range(ROLLS):
            await roller.roll()
        stopped = True
        await asyncio.gather(*clients)
        assert answered > CLIENTS
