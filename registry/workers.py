"""The workers' registration in Redis (6 or newer, or Valkey; ``redis://``, ``rediss://`` or ``unix://``).

Owns the keys below. Redis is advisory: it tells a router of workers that it has not met. Whether a known worker is
there is known by its session, and with Redis gone every caller goes on with what it has.

    {pdserve}:workers              set      ids of workers, pruned by whoever lists
    {pdserve}:worker:<id>          string   WorkerRecord as JSON; expires when its heartbeats stop (the lease)
    {pdserve}:incarnation:<id>     string   newest incarnation seen, 20 digits; kept a day, so that an older process
                                            that wakes up later cannot take the place of the newer

The braces put all keys into one slot of a Redis Cluster. Every call is bounded in time and raises RegistryUnavailable
when Redis does not answer.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from registry.connection import CALL_TIMEOUT_S, Connection
from registry.record import WorkerRecord

FENCE_TTL_S = 24 * 3600

_INDEX = "{pdserve}:workers"

# KEYS: fence, record, index. ARGV: incarnation, record JSON, TTL of the record in ms, TTL of the fence in s, worker id.
# Answers the newer incarnation, or an empty string.
_REGISTER = """
local newest = redis.call('GET', KEYS[1])
if newest and newest > ARGV[1] then return newest end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[4])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[5])
return ''
"""

# KEYS: fence, record, index. ARGV: incarnation, worker id. The fence stays.
_REMOVE = """
local newest = redis.call('GET', KEYS[1])
if newest and newest > ARGV[1] then return newest end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[3], ARGV[2])
return ''
"""

# KEYS: record, index. ARGV: worker id. It may have registered again since its record was found missing.
_PRUNE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return redis.call('SREM', KEYS[2], ARGV[1]) end
return 0
"""


class StaleIncarnation(Exception):
    """A newer incarnation of this worker has registered: this process is the old one and must stop serving."""


class WorkerRegistry:
    """Register a worker, or list all. One per process; close it."""

    def __init__(self, redis_url: str, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._connection = Connection(redis_url, call_timeout_s=call_timeout_s, decode_responses=True)
        self._redis = self._connection.redis
        self._register = self._redis.register_script(_REGISTER)
        self._remove = self._redis.register_script(_REMOVE)
        self._prune = self._redis.register_script(_PRUNE)

    async def register(self, record: WorkerRecord, ttl_s: float) -> None:
        """Write the record, or renew it: a heartbeat is the same call, so a flushed Redis knows the worker again.

        Raises StaleIncarnation when a newer one has registered, RegistryUnavailable.
        """
        ttl_ms = max(1, round(ttl_s * 1000))
        payload = msgspec.json.encode(record)
        async with self._connection.call():
            newer = await self._register(
                keys=_keys(record.worker_id),
                args=[_digits(record.incarnation), payload, ttl_ms, FENCE_TTL_S, record.worker_id],
            )
        _raise_if_stale(record.worker_id, record.incarnation, newer)

    heartbeat = register

    async def remove(self, worker_id: str, incarnation: int) -> None:
        """Delete the record of a worker that leaves, unless it is a newer incarnation's.

        Raises StaleIncarnation, RegistryUnavailable.
        """
        async with self._connection.call():
            newer = await self._remove(keys=_keys(worker_id), args=[_digits(incarnation), worker_id])
        _raise_if_stale(worker_id, incarnation, newer)

    async def list_workers(self) -> list[WorkerRecord]:
        """All records whose lease runs, by worker id. Records that cannot be read are left out.

        Raises RegistryUnavailable.
        """
        async with self._connection.call():
            # redis-py types commands as "awaitable or value", for both of its clients
            worker_ids = sorted(cast("set[str]", await cast("Any", self._redis.smembers(_INDEX))))
            if not worker_ids:
                return []
            keys = [_record_key(worker_id) for worker_id in worker_ids]
            texts = cast("list[str | None]", await self._redis.mget(keys))
            for worker_id, text in zip(worker_ids, texts, strict=True):
                if text is None:
                    await self._prune(keys=[_record_key(worker_id), _INDEX], args=[worker_id])
        return [record for text in texts if text is not None and (record := _decode(text)) is not None]

    async def close(self) -> None:
        await self._connection.close()


def _record_key(worker_id: str) -> str:
    return f"{{pdserve}}:worker:{worker_id}"


def _keys(worker_id: str) -> list[str]:
    return [f"{{pdserve}}:incarnation:{worker_id}", _record_key(worker_id), _INDEX]


def _digits(incarnation: int) -> str:
    """Lua's numbers are doubles; strings of one length compare exactly."""
    return f"{incarnation:020d}"


def _raise_if_stale(worker_id: str, incarnation: int, newer: object) -> None:
    if newer:
        raise StaleIncarnation(f"worker {worker_id}: incarnation {incarnation} is older than {int(str(newer))}")


def _decode(text: str) -> WorkerRecord | None:
    """None for what another version wrote and this one cannot read; it is the writer's log that must say so."""
    try:
        return msgspec.json.decode(text, type=WorkerRecord)
    except msgspec.DecodeError:
        return None
