"""What ``pdserve up --redis`` and ``pdserve doctor --redis`` find out about the user's Redis before anything starts."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from pdserve.up.errors import UpError
from pdserve.up.plan import free_ports
from pdserve.up.user_redis import check_is_ours, check_redis
from registry import WorkerRecord, WorkerRegistry
from tests.services.processes import REDIS_SERVERS, RedisProcess, running_redis
from tests.services.test_registry import record


@pytest.fixture(params=sorted(REDIS_SERVERS))
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    with running_redis(tmp_path, request.param) as server:
        yield server


async def register(url: str, worker: WorkerRecord, ttl_s: float) -> None:
    registry = WorkerRegistry(url)
    try:
        await registry.register(worker, ttl_s)
    finally:
        await registry.close()


def test_nobody_there_is_one_line_without_the_password(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    for url in (f"redis://:hunter2@127.0.0.1:{port}/0", f"unix://{tmp_path}/none.sock"):
        with pytest.raises(UpError, match=r"no Redis to use at .*: start it") as caught:
            check_redis(url)
        assert "\n" not in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_something_else_on_the_port_is_no_redis() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UpError, match="no Redis to use at"):
        check_redis(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")


def test_a_missing_and_a_wrong_password_are_told_at_once(server: RedisProcess) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "secret")
    with pytest.raises(UpError, match="redis://USER:PASSWORD@HOST"):
        check_redis(server.url)
    with pytest.raises(UpError, match="give its password") as caught:
        check_redis(f"unix://:guess@{server.socket}")
    assert "guess" not in str(caught.value)
    assert check_redis(f"unix://:secret@{server.socket}") == []


def test_too_few_rights_are_told(server: RedisProcess) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "poor", "on", ">secret", "-@all", "+@connection")
    with pytest.raises(UpError, match="rights"):
        check_redis(f"unix://poor:secret@{server.socket}")


def test_the_workers_of_another_cluster_are_waited_for_then_named(server: RedisProcess) -> None:
    check_is_ours(server.url)
    asyncio.run(register(server.url, record("prefill-0"), 30))
    assert check_redis(server.url) == ["prefill-0"]
    with pytest.raises(UpError, match=r"another cluster \(prefill-0\).*/1"):
        check_is_ours(server.url, wait_s=0.1)
    check_is_ours(f"{server.url}?db=1")


def test_a_lease_that_ends_is_no_obstacle(server: RedisProcess) -> None:
    asyncio.run(register(server.url, record("killed"), 0.5))
    begin_s = time.monotonic()
    check_is_ours(server.url, wait_s=20)
    assert time.monotonic() - begin_s < 20
