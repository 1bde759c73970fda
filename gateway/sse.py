"""Server-sent events: a bounded buffer between what produces events and the client that reads them.

    producer -> EventSink -> sender -> client
The producer never waits for the client: what the client has not read waits in the sink, and when that is full the
producer is told so (slow_consumer) and the connection is closed. What waits leaves as one write. The response's head
waits for the first event, so that a request that fails before it is answered with a proper HTTP status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import GatewayError, internal, slow_consumer
from gateway.http import error_response, until_disconnect

DONE = b"data: [DONE]\n\n"

log = structlog.get_logger()


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventSink:
    """Events that the client has not been sent yet, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.is_used = False
        """True once anything was written: the answer is a stream then, and an error is an event of it."""
        self._max_bytes = max_bytes
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._closed = False

    def write(self, data: bytes) -> None:
        """Raises GatewayError (slow_consumer) when the client is too far behind."""
        if self._num_bytes + len(data) > self._max_bytes:
            raise slow_consumer()
        self.is_used = True
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._news.set()

    def fail(self, error: GatewayError) -> None:
        """Write the error as the last event; always fits."""
        self._waiting.append(event(error.body()))
        self.close()

    def close(self) -> None:
        """Nothing more will be written."""
        self._closed = True
        self._news.set()

    async def take(self) -> bytes:
        """All that waits; empty at the end."""
        while not self._waiting and not self._closed:
            self._news.clear()
            await self._news.wait()
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return data


class EventStream(Response):
    """The response: runs ``produce`` until it ends, fails or the client goes, and sends what it writes."""

    def __init__(
        self, produce: Callable[[EventSink], Awaitable[None]], *, max_buffer_bytes: int, send_timeout_s: float
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._produce = produce
        self._sink = EventSink(max_buffer_bytes)
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.create_task(self._run_producer())
        sender = asyncio.create_task(self._send_events(send))
        gone = asyncio.create_task(until_disconnect(receive))
        tasks = [producer, sender, gone]
        try:
            await asyncio.wait([producer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not producer.done():
                return
            error = producer.result()
            if error is not None and not self._sink.is_used:
                await error_response(error)(scope, receive, send)
            elif error is None or error.code != "slow_consumer":
                await asyncio.wait([sender, gone], timeout=self._send_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_producer(self) -> GatewayError | None:
        """Ends the stream in any case; returns the error that ended it."""
        error: GatewayError | None = None
        try:
            await self._produce(self._sink)
        except GatewayError as known:
            error = known
        except Exception:
            log.exception("stream failed")
            error = internal()
        if error is not None and self._sink.is_used:
            self._sink.fail(error)
        self._sink.close()
        return error

    async def _send_events(self, send: Send) -> None:
        is_started = False
        while data := await self._sink.take():
            if not is_started:
                is_started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if is_started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
