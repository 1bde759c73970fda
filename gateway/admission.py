"""How many requests run in this gateway at a time, over HTTP and gRPC together, and whether it takes more of them.

serving --drain begins--> draining (still taken, for a moment) --> closed (refused) --nothing open--> the end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.errors import GatewayError, draining, overloaded


class Admission:
    """Counts the requests that generate or tokenize, from the first byte to the last. ``enter``, then ``leave``."""

    def __init__(self, max_requests: int, on_change: Callable[[int], None]) -> None:
        self._max_requests = max_requests
        self._on_change = on_change
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """The gateway leaves: answers close their connections."""
        self.closed = False
        """Nothing new is taken."""
        self.cut_off = asyncio.Event()
        """What still runs ends now."""

    def enter(self) -> GatewayError | None:
        """Count one; or why not, and then it must not be left."""
        if self.closed:
            return draining()
        if self.num_open >= self._max_requests:
            return overloaded(f"this gateway serves {self._max_requests} requests at a time")
        self._change(1)
        return None

    def leave(self) -> None:
        self._change(-1)

    async def until_idle(self) -> None:
        """Until no request runs. Waits for ever: the caller bounds it."""
        await self._idle.wait()

    def _change(self, by: int) -> None:
        self.num_open += by
        if self.num_open:
            self._idle.clear()
        else:
            self._idle.set()
        self._on_change(self.num_open)
