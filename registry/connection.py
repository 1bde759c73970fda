"""A client of Redis (6 or newer, or Valkey) whose calls are all bounded in time and fail with one type of error.

``redis://``, ``rediss://`` (TLS) and ``unix://``, with a user and password in the URL where there are ACLs. A user
needs the keys ``{pdserve}:*`` and the commands of ``registry/workers.py`` and ``registry/ownership.py``; for example

    ACL SETUSER pdserve on >SECRET ~{pdserve}:* -@all +@read +@write +@scripting +@connection
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdserve.redis_url import without_password

CALL_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 8


class RegistryUnavailable(ConnectionError):
    """Redis did not answer, or refused; go on with what is known."""


class Connection:
    """``async with call():`` around what is asked of ``redis``. One per process and purpose; close it."""

    def __init__(self, url: str, *, call_timeout_s: float = CALL_TIMEOUT_S, decode_responses: bool) -> None:
        self.redis: Redis = Redis.from_url(
            url,
            socket_timeout=call_timeout_s,
            socket_connect_timeout=call_timeout_s,
            max_connections=MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
            decode_responses=decode_responses,
        )
        self._url = url
        self._call_timeout_s = call_timeout_s

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Raises RegistryUnavailable."""
        try:
            async with asyncio.timeout(2 * self._call_timeout_s):
                yield
                _raise_if_cancelled()
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            _raise_if_cancelled()
            raise self._unavailable(error) from error
        except RuntimeError as error:
            # uvloop's word for writing to a connection that was reset meanwhile; redis-py does not know it
            if "handler is closed" not in str(error):
                raise
            _raise_if_cancelled()
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> RegistryUnavailable:
        return RegistryUnavailable(f"Redis at {without_password(self._url)}: {error or type(error).__name__}")

    async def close(self) -> None:
        await self.redis.aclose()


def _raise_if_cancelled() -> None:
    """redis-py sends in asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes with the result,
    or with an error: as when a whole host is told to stop, and its Redis with it. Whoever calls in a loop would then go
    on for ever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
