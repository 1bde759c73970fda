"""Asks a child whether it is ready. Plain sockets, so that waiting costs nothing while the children load."""

from __future__ import annotations

import asyncio
from pathlib import Path

_TIMEOUT_S = 1.0


async def http_is_healthy(host: str, port: int, path: str = "/health") -> bool:
    """True when ``GET path`` answers 200 within a second."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            return (await _ask(reader, writer, request.encode())).split(b" ")[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False


async def redis_is_healthy(socket: Path) -> bool:
    """True when the server on ``socket`` answers PING within a second."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            return await _ask(reader, writer, b"*1\r\n$4\r\nPING\r\n") == b"+PONG\r\n"
    except (OSError, TimeoutError):
        return False


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    """Send ``request``; the first line of the answer."""
    try:
        writer.write(request)
        return await reader.readline()
    finally:
        writer.close()
