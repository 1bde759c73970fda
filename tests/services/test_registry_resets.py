"""A Redis whose connections are reset, as a firewall or a dying host does: unavailable for a call, then used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import pytest
import uvloop
from redis import exceptions

from registry.connection import Connection, RegistryUnavailable


class ResettingServer:
    """Answers every command with +OK; resets what is connected when told."""

    def __init__(self) -> None:
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def reset_all(self) -> None:
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(b"+OK\r\n" * data.count(b"*"))
                await writer.drain()


async def reset_between_calls() -> list[str]:
    server = ResettingServer()
    listening = await server.start()
    connection = Connection(f"redis://127.0.0.1:{server.port}", decode_responses=True)
    ends = []
    try:
        for _ in range(4):
            try:
                async with connection.call():
                    await connection.redis.execute_command("PING")
                ends.append("answered")
            except RegistryUnavailable:
                ends.append("unavailable")
            server.reset_all()
            await asyncio.sleep(0.05)
    finally:
        server.reset_all()
        listening.close()
        await connection.close()
    return ends


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_reset_is_no_other_error_than_any_loss(run) -> None:
    ends = run(reset_between_calls())
    assert ends[0] == "answered"
    assert "answered" in ends[1:], "a lost connection is replaced by a new one"


@pytest.mark.parametrize("error", [exceptions.ConnectionError("reset"), OSError("reset"), TimeoutError()])
async def test_a_loss_does_not_swallow_a_cancellation(error: Exception) -> None:
    """redis-py raises its own error when the connection is lost in the moment in which its caller is cancelled."""
    connection = Connection("redis://127.0.0.1:1", decode_responses=True)
    waiting = asyncio.Event()

    async def for_ever() -> None:
        while True:
            with contextlib.suppress(RegistryUnavailable):
                async with connection.call():
                    try:
                        waiting.set()
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        raise error from None

    task = asyncio.create_task(for_ever())
    await waiting.wait()
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    await connection.close()


async def test_a_slow_redis_is_no_cancellation() -> None:
    connection = Connection("redis://127.0.0.1:1", call_timeout_s=0.05, decode_responses=True)
    for _ in range(2):
        with pytest.raises(RegistryUnavailable):
            async with connection.call():
                await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    await connection.close()
