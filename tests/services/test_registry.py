"""The workers' registration against a real Valkey and Redis 6: leases, fencing, Redis that is slow, empty or gone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from registry import RegistryUnavailable, StaleIncarnation, WorkerLoad, WorkerRecord, WorkerRegistry
from tests.services.processes import REDIS_SERVERS, RedisProcess, running_redis


def record(worker_id: str = "p0", incarnation: int = 1, load: WorkerLoad | None = None) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role="prefill",
        address="127.0.0.1:1",
        incarnation=incarnation,
        fingerprint="f",
        model="m",
        max_model_len=100,
        pool_tokens=1000,
        hash_block_tokens=16,
        load=load or WorkerLoad(),
    )


@pytest.fixture(params=sorted(REDIS_SERVERS))
def valkey(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    with running_redis(tmp_path, request.param) as server:
        yield server


@pytest.fixture
async def registry(valkey: RedisProcess) -> AsyncIterator[WorkerRegistry]:
    registry = WorkerRegistry(valkey.url, call_timeout_s=10)
    yield registry
    await registry.close()


async def test_register_list_remove(registry: WorkerRegistry) -> None:
    assert await registry.list_workers() == []
    await registry.register(record("p0"), 30)
    await registry.register(record("p1"), 30)
    await registry.heartbeat(record("p0", load=WorkerLoad(running=3)), 30)
    assert await registry.list_workers() == [record("p0", load=WorkerLoad(running=3)), record("p1")]
    await registry.remove("p0", 1)
    await registry.remove("p0", 1)
    assert await registry.list_workers() == [record("p1")]


async def test_the_lease_runs_out_and_the_index_is_pruned(registry: WorkerRegistry, valkey: RedisProcess) -> None:
    await registry.register(record("gone"), 0.05)
    await registry.register(record("stays"), 30)
    await asyncio.sleep(0.1)
    assert [r.worker_id for r in await registry.list_workers()] == ["stays"]
    with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
        assert client.smembers("{pdserve}:workers") == {"stays"}


async def test_an_older_incarnation_neither_overwrites_nor_deletes(registry: WorkerRegistry) -> None:
    old, new = 9_999_999, 1_795_974_649_218_297  # more digits: they must not be compared as words
    await registry.register(record(incarnation=old), 30)
    await registry.register(record(incarnation=new), 30)
    with pytest.raises(StaleIncarnation, match=str(new)):
        await registry.heartbeat(record(incarnation=old), 30)
    with pytest.raises(StaleIncarnation):
        await registry.remove("p0", old)
    assert await registry.list_workers() == [record(incarnation=new)]


async def test_the_fence_outlives_the_record(registry: WorkerRegistry) -> None:
    """A process that was stopped, replaced, and wakes after its successor has died is still the old one."""
    await registry.register(record(incarnation=2), 0.05)
    await asyncio.sleep(0.1)
    with pytest.raises(StaleIncarnation):
        await registry.heartbeat(record(incarnation=1), 30)
    assert await registry.list_workers() == []


async def test_a_flushed_redis_knows_the_worker_again_after_a_heartbeat(
    registry: WorkerRegistry, valkey: RedisProcess
) -> None:
    await registry.register(record(), 30)
    valkey.flush()
    assert await registry.list_workers() == []
    await registry.heartbeat(record(), 30)
    assert await registry.list_workers() == [record()]


async def test_records_of_other_versions(registry: WorkerRegistry, valkey: RedisProcess) -> None:
    """More fields are read over; what is no record hides nobody else."""
    await registry.register(record("p0"), 30)
    with redis.Redis.from_url(valkey.url) as client:
        newer = msgspec.to_builtins(record("p1")) | {"zone": "b"}
        client.set("{pdserve}:worker:p1", msgspec.json.encode(newer))
        client.set("{pdserve}:worker:p2", b"{not json")
        client.sadd("{pdserve}:workers", "p1", "p2")
    assert [r.worker_id for r in await registry.list_workers()] == ["p0", "p1"]


async def test_redis_killed_and_back(registry: WorkerRegistry, valkey: RedisProcess) -> None:
    await registry.register(record(), 30)
    valkey.kill()
    with pytest.raises(RegistryUnavailable):
        await registry.list_workers()
    with pytest.raises(RegistryUnavailable):
        await registry.register(record(), 30)
    valkey.start()
    await registry.register(record(), 30)
    assert await registry.list_workers() == [record()]


@pytest.mark.faults
async def test_a_stopped_redis_holds_nobody_up(registry: WorkerRegistry, valkey: RedisProcess) -> None:
    await registry.register(record(), 30)
    impatient = WorkerRegistry(valkey.url, call_timeout_s=0.5)
    valkey.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(RegistryUnavailable):
                await impatient.list_workers()
            with pytest.raises(RegistryUnavailable):
                await impatient.heartbeat(record(), 30)
    finally:
        valkey.signal(signal.SIGCONT)
        await impatient.close()
    assert await registry.list_workers() == [record()]


async def test_a_full_redis_is_an_error_of_its_own_type(registry: WorkerRegistry, valkey: RedisProcess) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.config_set("maxmemory", "1")
        client.config_set("maxmemory-policy", "noeviction")
    with pytest.raises(RegistryUnavailable):
        await registry.register(record(), 30)


async def test_a_cancellation_is_never_swallowed(registry: WorkerRegistry) -> None:
    """Whenever it comes, also together with an answer: a loop of calls ends."""
    await registry.register(record(), 30)

    async def heartbeats() -> None:
        while True:
            await registry.heartbeat(record(), 30)
            await registry.list_workers()

    for i in range(300):
        beating = asyncio.create_task(heartbeats())
        await asyncio.sleep(i * 1e-5)
        beating.cancel()
        done, _ = await asyncio.wait([beating], timeout=10)
        assert done, f"cancelled after {i * 10} us, it goes on"
