"""The user's own Redis (``--redis``), looked at before anything starts. ``redis`` itself is imported when it is needed.

What is in it is ``registry``'s; known here are only the two keys that say which workers are registered.
"""

from __future__ import annotations

import time
from typing import Any

from pdserve.redis_url import without_password
from pdserve.up.errors import UpError

LEASE_S = 5.0
"""The registration of a worker that was killed is gone after that."""
_TIMEOUT_S = 2.0
_POLL_S = 0.2
_INDEX = "{pdserve}:workers"
_RECORD = "{pdserve}:worker:"


def check_redis(url: str) -> list[str]:
    """It answers us; the ids of the workers that are registered there. Raises UpError, without the password."""
    import redis

    try:
        client: Any = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        with client:
            ids = sorted(member.decode(errors="replace") for member in client.smembers(_INDEX))
            return [worker_id for worker_id in ids if client.exists(_RECORD + worker_id)]
    except (redis.ConnectionError, redis.TimeoutError) as error:
        if not isinstance(error, redis.AuthenticationError):
            raise _unusable(url, error, "start it, or leave out --redis to get one") from error
        raise _unusable(url, error, "give its password: redis://USER:PASSWORD@HOST:PORT") from error
    except redis.RedisError as error:
        raise _unusable(url, error, "give a user with the rights that docs/operations.md names") from error
    except ValueError as error:
        raise _unusable(url, error, "use redis://HOST:PORT/DATABASE or unix:///PATH") from error


def check_is_ours(url: str, wait_s: float = LEASE_S + 1.0) -> None:
    """No other cluster uses it: workers of ours would take the names of its workers, and its router would send requests
    to ours. Those of a cluster that has just been killed go within their lease. Raises UpError."""
    deadline_s = time.monotonic() + wait_s
    while workers := check_redis(url):
        if time.monotonic() > deadline_s:
            raise UpError(
                f"Redis at {without_password(url)} has the workers of another cluster ({', '.join(workers)}): "
                "give this one a database of its own (redis://HOST:PORT/1), or leave out --redis"
            )
        time.sleep(_POLL_S)


def _unusable(url: str, error: Exception, remedy: str) -> UpError:
    reason = " ".join(str(error).split()).rstrip(".")
    if "HELLO must be called" in reason:  # a server that wants a password, to a client that gives none
        reason, remedy = "it wants a password", "give it: redis://USER:PASSWORD@HOST:PORT"
    return UpError(f"no Redis to use at {without_password(url)} ({reason}): {remedy}")
