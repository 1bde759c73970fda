"""The small HTTP server beside a gRPC service: GET /metrics, /health (ready?) and /live (the event loop turns).

Answers one request per connection. Not for the gateway, whose own HTTP server has these paths.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

REQUEST_TIMEOUT_S = 5.0
MAX_HEADER_BYTES = 16 * 1024

_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class StatusServer:
    """``not_ready`` gives the reason why the service cannot take work, or None when it is ready."""

    def __init__(self, metrics: CollectorRegistry, not_ready: Callable[[], str | None]) -> None:
        self._metrics = metrics
        self._not_ready = not_ready
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Returns the bound port. Raises OSError when it cannot be had."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_HEADER_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                answer = self._answer(head.split(b"\r\n", 1)[0].decode("latin-1"))
                if head.startswith(b"HEAD "):
                    answer = answer[: answer.index(b"\r\n\r\n") + 4]
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            return  # not a request, or nobody waits for the answer
        finally:
            writer.close()
            self._tasks.discard(task)

    def _answer(self, request_line: str) -> bytes:
        method, path = [*request_line.split(" "), "", ""][:2]
        if method not in ("GET", "HEAD"):
            return _response(405, {"error": f"{method} is not allowed; GET /metrics, /health or /live"})
        match path.split("?", 1)[0]:
            case "/metrics":
                return _respond(200, CONTENT_TYPE_LATEST, generate_latest(self._metrics))
            case "/live":
                return _response(200, {"status": "live"})
            case "/health":
                reason = self._not_ready()
                if reason is None:
                    return _response(200, {"status": "ready"})
                return _response(503, {"status": "not_ready", "reason": reason})
        return _response(404, {"error": f"no {path}; there are /metrics, /health and /live"})


def _response(status: int, body: dict[str, str]) -> bytes:
    return _respond(status, "application/json", json.dumps(body).encode())


def _respond(status: int, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
