"""How many requests run in this gateway at a time, over HTTP and gRPC together, and the limit of it."""

from __future__ import annotations

from collections.abc import Callable

from gateway.errors import GatewayError, overloaded


class Admission:
    """Counts the requests that generate or tokenize, from the first byte to the last. ``enter``, then ``leave``."""

    def __init__(self, max_requests: int, on_change: Callable[[int], None]) -> None:
        self._max_requests = max_requests
        self._on_change = on_change
        self._num_open = 0

    def enter(self) -> GatewayError | None:
        """Count one; or why not, and then it must not be left."""
        if self._num_open >= self._max_requests:
            return overloaded(f"this gateway serves {self._max_requests} requests at a time")
        self._change(1)
        return None

    def leave(self) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        self._num_open += by
        self._on_change(self._num_open)
