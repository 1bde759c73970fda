"""Registration goes on through whatever happens to Redis."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from registry import StaleIncarnation, WorkerRecord, WorkerRegistry
from tests.services.processes import RedisProcess, eventually
from worker.registration import Registration

RECORD = WorkerRecord(
    worker_id="w",
    role="decode",
    address="127.0.0.1:1",
    incarnation=10,
    fingerprint="f",
    model="m",
    max_model_len=10,
    pool_tokens=100,
    hash_block_tokens=16,
)


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    with tempfile.TemporaryDirectory() as folder:
        process = RedisProcess(Path(folder))
        process.start()
        yield process
        process.kill()


class Rig:
    def __init__(self, url: str) -> None:
        self.record: WorkerRecord | None = RECORD
        self.registration = Registration(WorkerRegistry(url), lambda: self.record)
        self.reader = WorkerRegistry(url)
        self.task = asyncio.create_task(self.registration.run())

    async def sees(self, incarnation: int | None) -> None:
        """Wait until Redis lists this incarnation of the worker, or none."""
        for _ in range(200):
            with contextlib.suppress(ConnectionError):
                found = [record.incarnation for record in await self.reader.list_workers()]
                if found == ([] if incarnation is None else [incarnation]):
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"Redis never listed {incarnation}")


@pytest.fixture
async def rig(redis: RedisProcess) -> AsyncIterator[Rig]:
    rig = Rig(redis.url)
    yield rig
    rig.task.cancel()
    await asyncio.gather(rig.task, return_exceptions=True)
    await rig.registration.leave()
    await rig.reader.close()


async def test_registers_renews_and_leaves(rig: Rig) -> None:
    await rig.sees(10)
    rig.record = None  # the engine is lost
    rig.registration.changed()
    await rig.sees(None)
    rig.record = msgspec.structs.replace(RECORD, incarnation=11)
    rig.registration.changed()
    await rig.sees(11)


async def test_a_flushed_and_a_restarted_redis_know_it_again(rig: Rig, redis: RedisProcess) -> None:
    await rig.sees(10)
    redis.flush()
    await rig.sees(10)
    redis.kill()
    await asyncio.sleep(0.1)
    rig.registration.changed()
    await asyncio.sleep(0.3)
    assert not rig.task.done()
    redis.start()
    await rig.sees(10)


async def test_a_newer_incarnation_makes_it_stop(rig: Rig) -> None:
    await rig.sees(10)
    await rig.reader.register(msgspec.structs.replace(RECORD, incarnation=12), 5.0)
    await eventually(rig.task.done, "the older one stops")
    assert isinstance(rig.task.exception(), StaleIncarnation)
