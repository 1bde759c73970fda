"""Tells Redis which blocks this worker's engine has cached. Advisory: nothing waits for it, failures are logged once.

Owns the events that Redis does not have yet: a bounded number. One batch is in flight at a time and is sent again until
Redis has answered (a publication that is in already does no harm).

    engine --KVEvents--> take -> [events] --batch--> Redis: ok     next batch; a sign of life now and then
                                                            gap    (flushed, evicted, other data): ask the engine for a
                                                                   snapshot; what comes before it is dropped
                                                            stale  a newer incarnation is at work: say no more
                         too many (Redis is down): drop all, a snapshot when it is back
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import islice

from engine.messages import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEvents
from registry import RegistryUnavailable
from registry.kv_events import Batch, Cleared, Event, Removed, Stored, join
from registry.ownership import MAX_BATCH_HASHES, Ownership, Verdict

MAX_BUFFERED_HASHES = 65_536
"""Beside one snapshot; many more than an engine changes in a few seconds."""
COALESCE_S = 0.01
"""A step's events may wait so long for the next step's."""
RENEW_S = 1.0
"""Signs of life; also how soon a flush is noticed when nothing else happens."""
RETRY_S = 0.5
SNAPSHOT_WAIT_S = 5.0
"""A snapshot that did not come is asked for again."""

log = logging.getLogger(__name__)


class KVPublisher:
    """``run`` it in a task; ``take`` events; ``new_incarnation`` before an engine's first; ``leave`` at the end."""

    def __init__(self, ownership: Ownership, worker_id: str, ask_for_snapshot: Callable[[], bool]) -> None:
        """``ask_for_snapshot``: False when there is no engine that could."""
        self._ownership = ownership
        self._worker_id = worker_id
        self._ask_for_snapshot = ask_for_snapshot
        self._incarnation = 0
        self._buffer: deque[tuple[int, KVEvent]] = deque()
        """(number, event), without gaps."""
        self._buffered_hashes = 0
        self._next_seq: int | None = None
        """Of the next event to come; None: only a Cleared can be used."""
        self._max_buffered_hashes = MAX_BUFFERED_HASHES
        self._sent_events = 0
        """At the front of the buffer, in the batch that Redis has not answered for: sent again as it was."""
        self._published_seq = 0
        """Redis has said that it has this one."""
        self._asked_s: float | None = None
        self._is_stale = False
        self._is_down = False
        self._arrived = asyncio.Event()

    def new_incarnation(self, incarnation: int) -> None:
        """What the older one had is gone; the new engine begins with Cleared."""
        self._incarnation = incarnation
        self._is_stale = False
        self._published_seq = 0
        self._asked_s = None
        self._drop()

    def engine_ready(self, num_blocks: int) -> None:
        """A snapshot of so many blocks must fit."""
        self._max_buffered_hashes = num_blocks + MAX_BUFFERED_HASHES

    def take(self, message: KVEvents) -> None:
        """From the engine, in order. Never waits."""
        if self._is_stale:
            return
        for seq, event in enumerate(message.events, message.first_seq):
            if isinstance(event, BlocksCleared):
                self._drop()
                self._asked_s = None
            elif seq != self._next_seq:
                continue  # something before it was dropped: there is a snapshot to come
            self._buffer.append((seq, event))
            self._buffered_hashes += _num_hashes(event)
            self._next_seq = seq + 1
        if self._buffered_hashes > self._max_buffered_hashes:
            self._drop()
        self._arrived.set()

    @property
    def buffered_hashes(self) -> int:
        return self._buffered_hashes

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._turn()
                self._note(None)
            except RegistryUnavailable as error:
                self._note(error)
                await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Nothing of this worker is to be found any more, if Redis answers."""
        try:
            await self._ownership.forget(self._worker_id, self._incarnation)
        except RegistryUnavailable as error:
            log.warning("ownership was not removed: %s", error)
        finally:
            await self._ownership.close()

    async def _turn(self) -> None:
        """Publish one batch, or show that we live."""
        if not self._buffer:
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._arrived.wait()
            except TimeoutError:
                await self._show_life()
                return
        self._arrived.clear()
        if not self._sent_events and self._buffered_hashes < MAX_BATCH_HASHES:
            await asyncio.sleep(COALESCE_S)
        if not self._buffer:
            self._want_snapshot()
            return
        batch = self._next_batch()
        verdict = await self._ownership.publish(self._worker_id, batch)
        if batch.incarnation != self._incarnation or not self._buffer or self._buffer[0][0] != batch.first_seq:
            return  # a new engine, a snapshot or an overflow came meanwhile
        if self._accepted(verdict):
            self._published_seq = batch.last_seq
            self._sent_events = 0
            for _ in batch.events:
                self._buffered_hashes -= _num_hashes(self._buffer.popleft()[1])

    async def _show_life(self) -> None:
        if self._next_seq is None:
            self._want_snapshot()
        elif self._published_seq:
            incarnation = self._incarnation
            verdict = await self._ownership.renew(self._worker_id, incarnation, self._published_seq)
            if incarnation == self._incarnation:
                self._accepted(verdict)

    def _accepted(self, verdict: Verdict) -> bool:
        if verdict is Verdict.GAP:
            log.info("Redis lacks this worker's earlier events: beginning anew")
            self._drop()
            self._want_snapshot()
        elif verdict is Verdict.STALE:
            log.error("a newer incarnation of this worker publishes: this one says no more")
            self._is_stale = True
            self._drop()
        return verdict is Verdict.OK

    def _want_snapshot(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._is_stale or self._next_seq is not None:
            return
        if self._asked_s is None or now_s - self._asked_s > SNAPSHOT_WAIT_S:
            self._asked_s = now_s if self._ask_for_snapshot() else None

    def _next_batch(self) -> Batch:
        """As many events as fit, one at least."""
        if not self._sent_events:
            hashes = 0
            for _, event in self._buffer:
                hashes += _num_hashes(event)
                if self._sent_events and hashes > MAX_BATCH_HASHES:
                    break
                self._sent_events += 1
        events = [_to_wire(event) for _, event in islice(self._buffer, self._sent_events)]
        return Batch(self._incarnation, self._buffer[0][0], events)

    def _drop(self) -> None:
        self._buffer.clear()
        self._buffered_hashes = self._sent_events = 0
        self._next_seq = None

    def _note(self, error: RegistryUnavailable | None) -> None:
        if error is not None and not self._is_down:
            log.warning("ownership of blocks is not published, serving goes on: %s", error)
        if error is None and self._is_down:
            log.info("ownership of blocks is published again")
        self._is_down = error is not None


def _num_hashes(event: KVEvent) -> int:
    return 1 if isinstance(event, BlocksCleared) else len(event.block_hashes)


def _to_wire(event: KVEvent) -> Event:
    match event:
        case BlocksStored(parent=parent, block_hashes=hashes):
            return Stored(join(hashes), parent)
        case BlocksRemoved(block_hashes=hashes):
            return Removed(join(hashes))
        case BlocksCleared():
            return Cleared()
