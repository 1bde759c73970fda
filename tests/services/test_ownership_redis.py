"""Ownership in a real Valkey and a real Redis 6: what the scripts do once, what they refuse, and who may call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from pdserve.redis_url import without_password
from registry import RegistryUnavailable, WorkerRegistry
from registry.kv_events import Batch, Cleared, Event, Removed, Stored, join
from registry.ownership import STREAM_LENGTH, Ownership, Verdict
from tests.services.processes import REDIS_SERVERS, RedisProcess, running_redis


def name(value: int) -> bytes:
    return value.to_bytes(16, "little")


def stored(*values: int) -> Stored:
    return Stored(join(name(value) for value in values))


def removed(*values: int) -> Removed:
    return Removed(join(name(value) for value in values))


def batch(first_seq: int, *events: Event, incarnation: int = 5) -> Batch:
    return Batch(incarnation, first_seq, list(events))


@pytest.fixture(scope="module", params=sorted(REDIS_SERVERS))
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    with running_redis(tmp_path_factory.mktemp("v"), request.param) as server:
        yield server


@pytest.fixture
def valkey(server: RedisProcess) -> RedisProcess:
    server.flush()
    return server


@pytest.fixture
async def ownership(valkey: RedisProcess) -> AsyncIterator[Ownership]:
    ownership = Ownership(valkey.url)
    yield ownership
    await ownership.close()


async def owned(ownership: Ownership, worker_id: str = "w") -> set[bytes]:
    return {name async for hashes in ownership.blocks(worker_id) for name in hashes}


async def test_publish_read_and_snapshot(ownership: Ownership) -> None:
    tail = await ownership.tail("w")
    first = batch(1, Cleared(), stored(1, 2, 3))
    second = batch(3, removed(2), stored(4))
    for each in (first, second):
        assert await ownership.publish("w", each) is Verdict.OK
    assert await owned(ownership) == {name(1), name(3), name(4)}
    assert await ownership.heads(["w", "x"]) == [(5, 4), None]
    entries = await ownership.read({"x": b"0-0", "w": tail})
    assert [(worker_id, read) for worker_id, _, read in entries] == [("w", first), ("w", second)]
    assert await ownership.tail("w") == entries[-1][1]
    assert await ownership.read({"w": entries[-1][1]}) == []


async def test_a_repeated_batch_is_applied_once(ownership: Ownership) -> None:
    await ownership.publish("w", batch(1, Cleared(), stored(1)))
    for _ in range(3):
        assert await ownership.publish("w", batch(3, stored(2))) is Verdict.OK
    await ownership.publish("w", batch(4, removed(2)))
    assert await ownership.publish("w", batch(3, stored(2))) is Verdict.OK
    assert await owned(ownership) == {name(1)}
    assert len(await ownership.read({"w": b"0-0"})) == 3


async def test_a_gap_is_refused_and_a_new_beginning_taken(ownership: Ownership) -> None:
    assert await ownership.publish("w", batch(7, stored(1))) is Verdict.GAP
    await ownership.publish("w", batch(1, Cleared(), stored(1)))
    assert await ownership.publish("w", batch(9, stored(2))) is Verdict.GAP
    assert await owned(ownership) == {name(1)}
    assert await ownership.publish("w", batch(12, Cleared(), stored(3))) is Verdict.OK
    assert await owned(ownership) == {name(3)}
    assert await ownership.publish("w", batch(14, stored(4))) is Verdict.OK


async def test_a_new_incarnation_replaces_and_an_old_one_is_stale(ownership: Ownership) -> None:
    """More digits: they must not be compared as words or as doubles."""
    old, new = 9_999_999, 1_795_974_649_218_297
    await ownership.publish("w", batch(1, Cleared(), stored(1, 2), incarnation=old))
    assert await ownership.publish("w", batch(3, stored(3), incarnation=new)) is Verdict.GAP
    assert await ownership.publish("w", batch(1, Cleared(), stored(9), incarnation=new)) is Verdict.OK
    assert await owned(ownership) == {name(9)}
    assert await ownership.publish("w", batch(3, stored(3), incarnation=old)) is Verdict.STALE
    assert await ownership.publish("w", batch(1, Cleared(), incarnation=old)) is Verdict.STALE
    assert await ownership.renew("w", old, 2) is Verdict.STALE
    assert await ownership.forget("w", old) is Verdict.STALE
    assert await owned(ownership) == {name(9)}


async def test_a_sign_of_life_notices_a_flush_and_keeps_the_keys(ownership: Ownership, valkey: RedisProcess) -> None:
    await ownership.publish("w", batch(1, Cleared(), stored(1)))
    assert await ownership.renew("w", 5, 2) is Verdict.OK
    assert await ownership.renew("w", 5, 3) is Verdict.GAP
    with redis.Redis.from_url(valkey.url) as client:
        assert client.pttl("{pdserve}:kv:w:blocks") > 0
        assert client.pttl("{pdserve}:kv:w:events") > 0
    valkey.flush()
    assert await ownership.renew("w", 5, 2) is Verdict.GAP
    assert await ownership.publish("w", batch(3, stored(2))) is Verdict.GAP


async def test_ownership_of_a_worker_that_died_expires(valkey: RedisProcess) -> None:
    ownership = Ownership(valkey.url, ttl_s=0.05)
    await ownership.publish("w", batch(1, Cleared(), stored(1)))
    await asyncio.sleep(0.1)
    assert await ownership.heads(["w"]) == [None]
    assert await owned(ownership) == set()
    await ownership.close()


async def test_a_worker_is_deleted_without_touching_the_others(ownership: Ownership, valkey: RedisProcess) -> None:
    for worker_id in ("w", "x"):
        await ownership.publish(worker_id, batch(1, Cleared(), stored(*range(1, 1000))))
    assert await ownership.forget("w", 5) is Verdict.OK
    assert await ownership.forget("w", 5) is Verdict.OK
    with redis.Redis.from_url(valkey.url) as client:
        assert sorted(client.keys("*")) == [b"{pdserve}:kv:x:blocks", b"{pdserve}:kv:x:events"]
    assert len(await owned(ownership, "x")) == 999


async def test_a_missing_block_does_not_stop_a_delete_batch(ownership: Ownership) -> None:
    await ownership.publish("w", batch(1, Cleared(), stored(1, 2, 3)))
    await ownership.publish("w", batch(3, removed(1, 77, 3)))
    assert await owned(ownership) == {name(2)}


async def test_the_stream_is_bounded(ownership: Ownership, valkey: RedisProcess) -> None:
    await ownership.publish("w", batch(1, Cleared()))
    for seq in range(2, 1000):
        await ownership.publish("w", batch(seq, stored(seq % 7)))
    with redis.Redis.from_url(valkey.url) as client:
        assert STREAM_LENGTH <= client.xlen("{pdserve}:kv:w:events") <= STREAM_LENGTH + 200


async def test_an_entry_that_cannot_be_read_is_said_to_be_there(ownership: Ownership, valkey: RedisProcess) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.xadd("{pdserve}:kv:w:events", {"i": "5", "f": "1", "e": b"\xc1not msgpack"})
        client.xadd("{pdserve}:kv:w:events", {"of": "another version"})
    assert [read for _, _, read in await ownership.read({"w": b"0-0"})] == [None, None]


async def test_a_user_with_few_rights_is_enough(valkey: RedisProcess) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        rules = ["reset", "on", ">secret", "~{pdserve}:*", "-@all", "+@read", "+@write", "+@scripting", "+@connection"]
        client.execute_command("ACL", "SETUSER", "pdserve", *rules)
    url = f"unix://pdserve:secret@{valkey.socket}"
    ownership, registry = Ownership(url), WorkerRegistry(url)
    assert await ownership.publish("w", batch(1, Cleared(), stored(1))) is Verdict.OK
    assert await ownership.renew("w", 5, 2) is Verdict.OK
    assert await owned(ownership) == {name(1)}
    assert len(await ownership.read({"w": b"0-0"})) == 1
    assert await ownership.forget("w", 5) is Verdict.OK
    assert await registry.list_workers() == []
    await ownership.close()
    await registry.close()
    wrong = Ownership(f"unix://pdserve:wrong@{valkey.socket}")
    with pytest.raises(RegistryUnavailable) as refusal:
        await wrong.heads(["w"])
    assert "wrong@" not in str(refusal.value)
    await wrong.close()


def test_passwords_are_not_logged() -> None:
    assert without_password("rediss://user:secret@host:6380/0") == "rediss://***@host:6380/0"
    assert without_password("unix:///run/redis.sock") == "unix:///run/redis.sock"


async def test_without_redis_every_call_says_so(tmp_path: Path) -> None:
    ownership = Ownership(f"unix://{tmp_path}/none.sock")
    for call in (
        ownership.tail("w"),
        ownership.heads(["w"]),
        ownership.read({"w": b"0-0"}),
        ownership.renew("w", 1, 1),
    ):
        with pytest.raises(RegistryUnavailable):
            await call
    await ownership.close()


async def test_tls_is_asked_for_by_the_url() -> None:
    ownership = Ownership("rediss://user:secret@127.0.0.1:1/0")
    connection = ownership._connection.redis.connection_pool.make_connection()
    assert type(connection).__name__ == "SSLConnection"
    await ownership.close()
