"""Redis behind TLS, with a user of few rights: registry, ownership and a whole router work over ``rediss://``.

The servers at hand speak no TLS themselves, so a proxy ends it in front of them, as stunnel or a service mesh would.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import trustme

from registry import RegistryUnavailable, WorkerRegistry
from registry.kv_events import Batch, Cleared, Stored, join
from registry.ownership import Ownership, Verdict
from tests.services.processes import REDIS_SERVERS, RedisProcess, running_redis
from tests.services.test_registry import record
from tests.services.test_router import expected, running_fleet
from tests.services.test_router_ownership import PROMPT, hashes, until_indexed

RIGHTS = ["~{pdserve}:*", "-@all", "+@read", "+@write", "+@scripting", "+@connection"]
"""As registry/connection.py names them."""


@pytest.fixture(params=sorted(REDIS_SERVERS))
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    with running_redis(tmp_path, request.param) as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "pdserve", "on", ">secret", *RIGHTS)
            client.execute_command("ACL", "SETUSER", "default", "off")
        yield server


@asynccontextmanager
async def tls_proxy(server: RedisProcess, authority: trustme.CA) -> AsyncIterator[int]:
    """Its port on localhost."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(str(server.socket))
        for pair in ((reader, to_redis), (from_redis, writer)):
            task = asyncio.create_task(copy(*pair))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    proxy = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def world(server: RedisProcess, tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    authority = trustme.CA()
    for name, ca in (("ours", authority), ("other", trustme.CA())):
        ca.cert_pem.write_to_path(tmp_path / f"{name}.pem")
    async with tls_proxy(server, authority) as port:

        def url(user: str = "pdserve:secret", ca: str = "ours", scheme: str = "rediss") -> str:
            suffix = f"?ssl_ca_certs={tmp_path / f'{ca}.pem'}" if scheme == "rediss" else ""
            return f"{scheme}://{user}@localhost:{port}{suffix}"

        yield SimpleNamespace(url=url)


async def test_registry_and_ownership_over_tls_with_few_rights(world: SimpleNamespace) -> None:
    registry, ownership = WorkerRegistry(world.url()), Ownership(world.url())
    try:
        await registry.register(record("p0"), 30)
        await registry.heartbeat(record("p0"), 30)
        assert await registry.list_workers() == [record("p0")]
        batch = Batch(5, 1, [Cleared(), Stored(join(hashes(PROMPT)))])
        assert await ownership.publish("p0", batch) is Verdict.OK
        assert [name async for part in ownership.blocks("p0") for name in part] != []
        assert (await ownership.read({"p0": b"0"}))[0][2] == batch
        assert await ownership.heads(["p0"]) == [(5, 2)]
        await registry.remove("p0", 1)
        assert await registry.list_workers() == []
    finally:
        await registry.close()
        await ownership.close()


@pytest.mark.parametrize(
    "wrong",
    [{"user": "pdserve:guess"}, {"user": "default:"}, {"ca": "other"}, {"scheme": "redis"}],
    ids=["password", "user", "authority", "plain"],
)
async def test_who_must_not_come_in_is_told_so_without_the_password(
    world: SimpleNamespace, wrong: dict[str, str]
) -> None:
    registry = WorkerRegistry(world.url(**wrong), call_timeout_s=2)
    with pytest.raises(RegistryUnavailable) as refused:
        await registry.list_workers()
    assert "guess" not in str(refused.value)
    assert "secret" not in str(refused.value)
    await registry.close()


async def test_a_router_lives_on_redis_over_tls(world: SimpleNamespace) -> None:
    ownership = Ownership(world.url())
    async with running_fleet(SimpleNamespace(url=world.url()), policy="prefix_aware") as fleet:  # type: ignore[arg-type]
        await fleet.add("p0", "prefill", pool_tokens=10_000)
        p1 = await fleet.add("p1", "prefill", pool_tokens=10_000)
        await fleet.add("d0", "decode", pool_tokens=10_000)
        await ownership.publish("p1", Batch(p1.identity.incarnation, 1, [Cleared(), Stored(join(hashes(PROMPT)))]))
        await until_indexed(fleet.router, p1, 20)
        for n in range(1, 4):
            assert (await fleet.ask(2, prompt=PROMPT)).tokens == expected(2, PROMPT)
            assert len(p1.opened) == n
    await ownership.close()
