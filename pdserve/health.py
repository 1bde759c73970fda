"""grpc.health.v1 of our servers: asks the service each time, so that there is no second state to keep up to date."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WATCH_INTERVAL_S = 0.5
"""How soon a watcher hears of a change."""

SERVICE_NAME = str(health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """The whole server (the empty name) and each of its ``services`` have one health: whether it can take work."""

    def __init__(self, services: Sequence[str], is_ready: Callable[[], bool]) -> None:
        self._names = frozenset(["", *services])
        self._is_ready = is_ready

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return _Status(status=self._status())

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """The status now and at each change; an unknown service may appear later, says the protocol."""
        if request.service not in self._names:
            yield _Status(status=_Status.SERVICE_UNKNOWN)
            return
        told = None
        while True:
            if (status := self._status()) != told:
                told = status
                yield _Status(status=status)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        statuses = {name: _Status(status=self._status()) for name in self._names}
        return health_pb2.HealthListResponse(statuses=statuses)

    def _status(self) -> int:
        return int(_Status.SERVING if self._is_ready() else _Status.NOT_SERVING)
