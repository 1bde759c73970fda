"""HTTP beneath the endpoints: request ids, admission, body limits, deadline headers, error bodies, disconnects."""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission import Admission
from gateway.errors import GatewayError, internal, invalid

T = TypeVar("T")
REQUEST_ID = "x-request-id"
TIMEOUT = "x-request-timeout-s"
BODY_TIMEOUT_S = 60.0
CLIENT_GONE = 499
"""Status noted for a client that left before its answer; nobody receives it."""
_VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = structlog.get_logger()


class JsonResponse(Response):
    """A body of JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_response(error: GatewayError) -> Response:
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers())


class RequestGuard:
    """Around the whole app: every answer has an x-request-id, every failure an error body, and the requests on
    ``limited_paths`` (those that generate or tokenize) are counted from first to last byte and limited."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limited_paths: frozenset[str],
        admission: Admission,
        on_answer: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._limited_paths = limited_paths
        self._admission = admission
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_or_new(_given_request_id(scope))
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID.encode(), request_id.encode())]
                if self._admission.draining:  # the client's next request goes to another gateway
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        is_limited = scope["path"] in self._limited_paths
        refusal = self._admission.enter() if is_limited else None
        try:
            if refusal is not None:
                await error_response(refusal)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.info("client left while sending its request", request_id=request_id)
        except Exception:
            log.exception("request failed", request_id=request_id, path=scope["path"])
            if status == CLIENT_GONE:
                await error_response(internal())(scope, receive, send_with_id)
        finally:
            if is_limited and refusal is None:
                self._admission.leave()
            route = scope.get("route")
            self._on_answer(getattr(route, "path", "other"), status)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, bounded in size and time. Raises GatewayError."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise GatewayError(
            415, f"content-encoding {encoding!r} is not supported: send the body as it is", code="unsupported_encoding"
        )
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise GatewayError(
                        413, f"the body is larger than {max_bytes} bytes: send less", code="request_too_large"
                    )
                chunks.append(chunk)
    except TimeoutError:
        raise GatewayError(
            408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="request_timeout"
        ) from None
    return b"".join(chunks)


def request_timeout_s(request: Request, default_s: float, max_s: float) -> float:
    """The request's deadline from its header. Raises GatewayError."""
    value = request.headers.get(TIMEOUT)
    if value is None:
        return default_s
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= max_s:
        raise invalid(f"{TIMEOUT} is {value!r}: it must be above 0 and at most {max_s:g} seconds", TIMEOUT)
    return timeout_s


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """``work``'s result, or None when the client left before: then the work is cancelled."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def request_id_or_new(given: str | None) -> str:
    """The client's when it is printable and short, else a new one."""
    return given if given is not None and _VALID_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _given_request_id(scope: Scope) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == REQUEST_ID.encode()), None)
