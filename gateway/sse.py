"""Server-sent events: a bounded buffer between what produces events and the client that reads them.

    outputs -> [session's buffer] -> producer -> [EventSink] -> sender -> client
What the client has not read waits in the sink and leaves as one write. While the sink is full the producer waits, and
outputs wait in the session's bounded buffer: when that is full too, or the client took nothing for ``stall_timeout_s``,
the request is ended as slow_consumer and the connection is cut. Nobody else waits for this client at any time.

The response's head waits for the first event, so that a request that fails before it is answered with an HTTP status.
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
    """Events that the client has not been sent yet: ``max_bytes`` and what one output adds."""

    def __init__(self, max_bytes: int, stall_timeout_s: float) -> None:
        self.is_used = False
        """True once anything was written: the answer is a stream then, and an error is an event of it."""
        self._max_bytes = max_bytes
        self._stall_timeout_s = stall_timeout_s
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self.is_closed = False
        """No more will be written; what waits is the rest."""

    def write(self, data: bytes) -> None:
        self.is_used = True
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._news.set()

    async def room(self) -> None:
        """Wait until there is room to write. Raises GatewayError (slow_consumer) when the client takes nothing."""
        try:
            while self._num_bytes >= self._max_bytes:
                self._taken.clear()
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._taken.wait()
        except TimeoutError:
            raise slow_consumer() from None

    def fail(self, error: GatewayError) -> None:
        """Write the error as the last event."""
        self._waiting.append(event(error.body()))
        self.close()

    def close(self) -> None:
        """Nothing more will be written."""
        self.is_closed = True
        self._news.set()

    async def take(self) -> bytes:
        """All that waits; empty at the end."""
        while not self._waiting and not self.is_closed:
            self._news.clear()
            await self._news.wait()
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        self._taken.set()
        return data


class EventStream(Response):
    """The response: runs ``produce`` until it ends, fails or the client goes, and sends what it writes."""

    def __init__(
        self,
        produce: Callable[[EventSink], Awaitable[None]],
        *,
        max_buffer_bytes: int,
        stall_timeout_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._produce = produce
        self._sink = EventSink(max_buffer_bytes, stall_timeout_s)
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
            elif self._sink.is_closed:
                await asyncio.wait([sender, gone], timeout=self._send_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_producer(self) -> GatewayError | None:
        """Ends the stream, but for a slow consumer's, which is cut off; returns the error that ended it."""
        error: GatewayError | None = None
        try:
            await self._produce(self._sink)
        except GatewayError as known:
            error = known
        except Exception:
            log.exception("stream failed")
            error = internal()
        if error is None:
            self._sink.close()
        elif error.code != "slow_consumer" and self._sink.is_used:
            self._sink.fail(error)
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
