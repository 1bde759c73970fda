"""Closes HTTP connections on which no request comes: neither the first one, nor the rest of one that has begun.

uvicorn closes those that are silent between two requests, and ``http.read_body`` waits for a body for a while only;
what is left is a client that connects and says nothing, or half a head, and would keep its descriptor for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

SWEEP_S = 1.0


class Connection(Protocol):
    """Of uvicorn's protocols what is needed here."""

    transport: Any
    cycle: Any
    """The last request whose head came; None before the first."""


class SilentConnections:
    """Sweep it now and then."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: dict[Connection, tuple[Any, float]] = {}
        """The request that each had last, and since when it waits for the next."""

    def sweep(self, connections: Iterable[Connection], now_s: float) -> None:
        """Close those that have waited too long."""
        before, self._waiting = self._waiting, {}
        for connection in connections:
            if connection.cycle is not None and not connection.cycle.response_complete:
                continue
            last, since_s = before.get(connection, (None, now_s))
            if last is not connection.cycle:
                since_s = now_s
            if now_s - since_s > self._patience_s:
                connection.transport.close()
            else:
                self._waiting[connection] = (connection.cycle, since_s)
