"""Who owns which prefix, in Redis: for each worker the blocks in its cache, and the latest changes as a stream.

Owns the keys below. A worker writes its own (``publish``, ``renew``, ``forget``), routers read (``tail``, ``heads``,
``blocks``, ``read``). Redis is advisory: without it routers go on with what they know, and workers say everything again
when it is back.

    {pdserve}:kv:<id>:blocks   hash     block hash (16 bytes) -> tier, and the fields ``incarnation`` (20 digits) and
                                        ``seq``: whose blocks these are, and after which event. One key, so that what
                                        says how current it is cannot be lost without it
    {pdserve}:kv:<id>:events   stream   entries of ``i`` incarnation, ``f`` number of the first event, ``e`` events
                                        (msgpack, kv_events.py); trimmed to about STREAM_LENGTH entries

Both expire OWNERSHIP_TTL_S after their worker's last sign. To delete a worker is to unlink two keys: O(its blocks). A
publication is one script, applied once however often it is sent: events that are in already are skipped, events that
would leave a gap are refused, and after a flush everything is a gap, so the worker begins anew (Cleared, then all).

A router: ``tail`` (the id of the last entry), ``heads`` and ``blocks``, then ``read`` from that tail on. What was
written in between is read twice, which does no harm: events say what is, not what is different.

Commands: HMGET HSET HDEL HSCAN XADD XREAD XREVRANGE UNLINK PEXPIRE EVALSHA SCRIPT LOAD.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import msgspec

from registry.connection import CALL_TIMEOUT_S, Connection
from registry.kv_events import Batch, Cleared, Removed, Stored, decode_events, encode_events

OWNERSHIP_TTL_S = 30.0
STREAM_LENGTH = 512
"""Entries; a reader that is further behind takes the snapshot. At most 16 KiB each (MAX_BATCH_HASHES)."""
MAX_BATCH_HASHES = 1024
BLOCK_MS = 200
READ_ENTRIES = 64
SCAN_COUNT = 2000

# KEYS: blocks, events. ARGV: incarnation, first, last, TTL in ms, stream length, payload, then op and value, again and
# again: c "" | r hashes | s hashes after t tier.
_PUBLISH = """
local state = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
local known, seq = state[1], tonumber(state[2] or 0)
local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
if known and known > ARGV[1] then return 'stale' end
if known == ARGV[1] and last <= seq then return 'ok' end
if ARGV[7] ~= 'c' and (known ~= ARGV[1] or first ~= seq + 1) then return 'gap' end
local tier = ''
for i = 7, #ARGV, 2 do
  local op, value = ARGV[i], ARGV[i + 1]
  if op == 'c' then
    redis.call('UNLINK', KEYS[1])
  elseif op == 't' then
    tier = value
  else
    local args = {}
    for start = 1, #value, 16 do
      args[#args + 1] = string.sub(value, start, start + 15)
      if op == 's' then args[#args + 1] = tier end
    end
    redis.call(op == 's' and 'HSET' or 'HDEL', KEYS[1], unpack(args))
  end
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'seq', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'i', ARGV[1], 'f', ARGV[2], 'e', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 'ok'
"""

# KEYS: blocks, events. ARGV: incarnation, seq, TTL in ms.
_RENEW = """
local state = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
if state[1] and state[1] > ARGV[1] then return 'stale' end
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then return 'gap' end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 'ok'
"""

# KEYS: blocks, events. ARGV: incarnation.
_FORGET = """
local known = redis.call('HMGET', KEYS[1], 'incarnation')[1]
if known and known > ARGV[1] then return 'stale' end
redis.call('UNLINK', KEYS[1], KEYS[2])
return 'ok'
"""


class Verdict(Enum):
    """What Redis made of a worker's words."""

    OK = b"ok"
    GAP = b"gap"
    """Redis does not have what came before: begin anew."""
    STALE = b"stale"
    """A newer incarnation of this worker writes here."""


class Ownership:
    """For a worker (its own keys) or a router (everybody's). Every call is bounded in time and raises
    RegistryUnavailable when Redis does not answer. One per process; close it."""

    def __init__(
        self, redis_url: str, *, call_timeout_s: float = CALL_TIMEOUT_S, ttl_s: float = OWNERSHIP_TTL_S
    ) -> None:
        self._connection = Connection(redis_url, call_timeout_s=call_timeout_s, decode_responses=False)
        # redis-py types commands as "awaitable or value", for both of its clients
        self._redis: Any = self._connection.redis
        self._ttl_ms = round(ttl_s * 1000)
        self._publish = self._redis.register_script(_PUBLISH)
        self._renew = self._redis.register_script(_RENEW)
        self._forget = self._redis.register_script(_FORGET)

    # --- a worker writes ---

    async def publish(self, worker_id: str, batch: Batch) -> Verdict:
        """Add to the stream and to the blocks, once. MAX_BATCH_HASHES at most."""
        args: list[bytes | str | int] = [
            _digits(batch.incarnation),
            batch.first_seq,
            batch.last_seq,
            self._ttl_ms,
            STREAM_LENGTH,
            encode_events(batch.events),
        ]
        for event in batch.events:
            match event:
                case Cleared():
                    args += ["c", ""]
                case Stored(hashes=hashes, tier=tier):
                    args += ["t", tier, "s", hashes]
                case Removed(hashes=hashes):
                    args += ["r", hashes]
        async with self._connection.call():
            return Verdict(await self._publish(keys=_keys(worker_id), args=args))

    async def renew(self, worker_id: str, incarnation: int, seq: int) -> Verdict:
        """A sign of life of a worker whose last event was ``seq``; GAP when Redis has something else, or nothing."""
        async with self._connection.call():
            return Verdict(await self._renew(keys=_keys(worker_id), args=[_digits(incarnation), seq, self._ttl_ms]))

    async def forget(self, worker_id: str, incarnation: int) -> Verdict:
        """The worker's cache is gone."""
        async with self._connection.call():
            return Verdict(await self._forget(keys=_keys(worker_id), args=[_digits(incarnation)]))

    # --- a router reads ---

    async def tail(self, worker_id: str) -> bytes:
        """Id of the last entry in the worker's stream."""
        async with self._connection.call():
            entries = await self._redis.xrevrange(_events_key(worker_id), count=1)
        return cast("bytes", entries[0][0]) if entries else b"0-0"

    async def heads(self, worker_ids: Sequence[str]) -> list[tuple[int, int] | None]:
        """For each worker the incarnation and number of the last event that its blocks contain, if Redis has any."""
        async with self._connection.call():
            pipeline = self._redis.pipeline(transaction=False)
            for worker_id in worker_ids:
                pipeline.hmget(_blocks_key(worker_id), "incarnation", "seq")
            answers = await pipeline.execute()
        return [(int(incarnation), int(seq)) if incarnation and seq else None for incarnation, seq in answers]

    async def blocks(self, worker_id: str) -> AsyncIterator[list[bytes]]:
        """The worker's block hashes, in parts. What changes meanwhile may be in or not."""
        cursor = 0
        while True:
            async with self._connection.call():
                cursor, found = await self._redis.hscan(_blocks_key(worker_id), cursor, count=SCAN_COUNT)
            hashes = [field for field in found if len(field) == 16]
            if hashes:
                yield hashes
            if not cursor:
                return

    async def read(self, after: Mapping[str, bytes]) -> list[tuple[str, bytes, Batch | None]]:
        """What came after these entries of the workers' streams: (worker id, entry id, batch), None for a batch that
        cannot be read. Waits BLOCK_MS at most."""
        streams = {_events_key(worker_id): entry_id for worker_id, entry_id in after.items()}
        async with self._connection.call():
            answer = await self._redis.xread(streams, count=READ_ENTRIES, block=BLOCK_MS)
        worker_of = {key.encode(): worker_id for key, worker_id in zip(streams, after, strict=True)}
        return [(worker_of[key], entry_id, _decode(fields)) for key, entries in answer for entry_id, fields in entries]

    async def close(self) -> None:
        await self._connection.close()


def _decode(fields: Mapping[bytes, bytes]) -> Batch | None:
    try:
        events = decode_events(fields[b"e"])
        return Batch(int(fields[b"i"]), int(fields[b"f"]), events) if events else None
    except (KeyError, ValueError, msgspec.DecodeError):
        return None  # of another version; the reader takes the snapshot instead


def _blocks_key(worker_id: str) -> str:
    return f"{{pdserve}}:kv:{worker_id}:blocks"


def _events_key(worker_id: str) -> str:
    return f"{{pdserve}}:kv:{worker_id}:events"


def _keys(worker_id: str) -> list[str]:
    return [_blocks_key(worker_id), _events_key(worker_id)]


def _digits(incarnation: int) -> str:
    """Lua's numbers are doubles; strings of one length compare exactly."""
    return f"{incarnation:020d}"
