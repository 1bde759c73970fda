"""When a call is tried again, and where: the client's policy, without I/O. One ``Retries`` is one request.

    nobody answers    the next endpoint, again and again with growing pauses, until ``reconnect_s`` without contact
    429, unavailable  ``max_retries`` times, at the next endpoint, after the pause that the server asks for
    anything else     raised
and never beyond the request's deadline.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.address import is_address
from pdserve.errors import ConnectionFailedError, PdserveError

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Settings of a client."""

    max_retries: int = 2
    """After answers that say that the same may work later."""
    reconnect_s: float = 5.0
    """How long a request looks for a gateway that answers."""

    def __post_init__(self) -> None:
        if self.max_retries < 0 or not 0 <= self.reconnect_s < math.inf:
            raise ValueError("max_retries and reconnect_s must not be negative, nor infinite; 0 tries only once")


class Endpoints:
    """Which gateway to use: one of them, by chance, for as long as it answers; then the next."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        given = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        self.addresses = tuple(address.strip() for address in given if address.strip())
        if not self.addresses:
            raise ValueError("no endpoint given: use HOST:PORT of a gateway's gRPC server")
        for address in self.addresses:
            if address.startswith(("http://", "https://")) or not is_address(address):
                raise ValueError(f"endpoint {address!r} is not HOST:PORT: give the gateway's --grpc-port, no URL")
        self._current = random.randrange(len(self.addresses))

    @property
    def current(self) -> str:
        return self.addresses[self._current]

    def avoid(self, address: str) -> None:
        """It did not answer, or is overloaded: move on, unless somebody did already."""
        if self.current == address:
            self._current = (self._current + 1) % len(self.addresses)


class Retries:
    """The tries of one request."""

    def __init__(self, policy: RetryPolicy, deadline_s: float) -> None:
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"deadline_s={deadline_s} must be above 0, and not infinite")
        self.deadline_s = deadline_s
        self._policy = policy
        self._end_s = time.monotonic() + deadline_s
        self._contact_s = time.monotonic()
        self._retries = 0
        self._pause_s = FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """Until the deadline; never 0, which gRPC would take for a call that ended before it began."""
        return max(self._end_s - time.monotonic(), 0.001)

    def made_contact(self) -> None:
        """A gateway sent something."""
        self._contact_s = time.monotonic()
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, error: PdserveError) -> float:
        """How long to wait before the next try. Raises ``error`` when there is none."""
        if not error.retryable:
            raise error
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if isinstance(error, ConnectionFailedError):
            out_of_tries = time.monotonic() + pause_s - self._contact_s > self._policy.reconnect_s
        else:
            pause_s = max(pause_s, error.retry_after_s)
            out_of_tries = self._retries >= self._policy.max_retries
            self._retries += 1
            self._contact_s = time.monotonic()
        if out_of_tries or pause_s >= self.left_s:
            raise error
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return pause_s
