"""Keeps the prefix index equal to what the workers say in Redis, and says how far it is.

One task, the only writer of the index beside ``placement``'s guesses. For each known worker:

    met, gap, unreadable, behind --> resync: stream's tail id, then the snapshot, then replay from there --> following
    new incarnation              --> what the old one had is forgotten with its first batch
    forgotten by ``Workers``     --> forgotten here

The stream alone is not trusted: now and then what Redis says of a worker (``heads``) is compared with the index, and
who has been behind twice without moving is resynced. With Redis down the index stays as it is; a router that starts
then routes by load until Redis is back, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import islice

import structlog

from registry import RegistryUnavailable
from registry.kv_events import Batch
from registry.ownership import Ownership
from router.prefix_index import Outcome, PrefixIndex
from router.workers import Worker
from telemetry.metrics import RouterMetrics

RETRY_S = 0.5
PAUSE_S = 0.01
"""Between two reads, so that many small batches become one answer."""
CHECK_INTERVAL_S = 1.0
CHECKED_WORKERS = 64
"""At once; large fleets are checked in turns."""

log = structlog.get_logger()


class OwnershipFeed:
    """``run`` it in a task."""

    def __init__(
        self, ownership: Ownership, index: PrefixIndex, workers: Mapping[str, Worker], metrics: RouterMetrics
    ) -> None:
        """``workers``: those that are known now, by id; read again and again."""
        self._ownership = ownership
        self._index = index
        self._workers = workers
        self._metrics = metrics
        self._after: dict[str, bytes] = {}
        """Worker -> id of the last entry of its stream that was read. Only of those that are followed."""
        self._met: set[str] = set()
        """Workers whose blocks are in the index, perhaps not the latest."""
        self._suspects: dict[str, tuple[int, int]] = {}
        """Workers that were behind at the last check, and where they were."""
        self._to_check: list[str] = []
        self._checked_s = 0.0
        self.is_available = True
        """Whether Redis answered last time."""

    def why_behind(self) -> str | None:
        """None when the index has caught up with Redis, or cannot because Redis does not answer."""
        if not self.is_available:
            return None
        behind = self._workers.keys() - self._met
        if not behind:
            return None
        return f"the prefix index has not caught up with {len(behind)} of {len(self._workers)} workers"

    @property
    def is_blind(self) -> bool:
        """Whether decisions are made without knowing what some workers have cached. O(1)."""
        return len(self._met) < len(self._workers)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.turn()
                self._note(None)
                await asyncio.sleep(PAUSE_S)
            except RegistryUnavailable as error:
                self._note(error)
                self._match_fleet()
                await asyncio.sleep(RETRY_S)

    async def turn(self) -> None:
        """Meet, forget, resync, check, read what is new: waits a moment for news. Raises RegistryUnavailable."""
        self._match_fleet()
        for worker_id in [worker_id for worker_id in self._workers if worker_id not in self._after]:
            await self._resync(worker_id)
        await self._check()
        if not self._after:
            await asyncio.sleep(PAUSE_S)
            return
        for worker_id, entry_id, batch in await self._ownership.read(self._after):
            if worker_id in self._after:
                self._take(worker_id, entry_id, batch)
        self._index.sweep()

    def _match_fleet(self) -> None:
        """The index has the workers that are known, and no others."""
        for worker_id in self._index.worker_ids():
            if worker_id not in self._workers:
                self._index.forget(worker_id)
                self._met.discard(worker_id)
                self._after.pop(worker_id, None)
                self._suspects.pop(worker_id, None)
        for worker_id, worker in self._workers.items():
            if self._index.meet(worker_id, worker.stride):
                self._met.discard(worker_id)
                self._after.pop(worker_id, None)

    async def _resync(self, worker_id: str) -> None:
        """The tail first: what is written while the snapshot is read is read again."""
        tail = await self._ownership.tail(worker_id)
        (head,) = await self._ownership.heads([worker_id])
        if worker_id not in self._workers:
            return
        known_incarnation, _ = self._index.position(worker_id)
        if head is not None and head[0] >= known_incarnation:
            # Read it all before the index changes: a snapshot that breaks off must not take away what is known.
            parts = [hashes async for hashes in self._ownership.blocks(worker_id)]
            if worker_id not in self._workers:
                return
            self._index.begin(worker_id, *head)
            for hashes in parts:
                self._index.add(worker_id, hashes)
                await asyncio.sleep(0)
        self._after[worker_id] = tail
        self._met.add(worker_id)
        self._suspects.pop(worker_id, None)

    def _take(self, worker_id: str, entry_id: bytes, batch: Batch | None) -> None:
        outcome = self._index.apply(worker_id, batch) if batch is not None else Outcome.GAP
        self._after[worker_id] = entry_id
        if outcome is Outcome.GAP:
            self._resync_soon(worker_id, "unreadable" if batch is None else "gap")

    async def _check(self) -> None:
        """Compare some workers' place in the index with Redis."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._checked_s < CHECK_INTERVAL_S or not self._after:
            return
        self._checked_s = now_s
        if not self._to_check:
            self._to_check = list(self._after)
        checked = [worker_id for worker_id in islice(self._to_check, CHECKED_WORKERS) if worker_id in self._after]
        del self._to_check[:CHECKED_WORKERS]
        heads = await self._ownership.heads(checked) if checked else []
        for worker_id, head in zip(checked, heads, strict=True):
            position = self._index.position(worker_id)
            # Redis knows less than we do: it was flushed, and the worker is going to say it all again.
            if head is None or head <= position:
                self._suspects.pop(worker_id, None)
            elif self._suspects.get(worker_id) == position:
                self._resync_soon(worker_id, "behind")
            else:
                self._suspects[worker_id] = position

    def _resync_soon(self, worker_id: str, reason: str) -> None:
        """At the next turn. What is known of it stays in use until then."""
        log.info("prefix index takes a snapshot", worker=worker_id, reason=reason)
        self._metrics.prefix_index_resyncs.labels(reason).inc()
        self._after.pop(worker_id, None)

    def _note(self, error: RegistryUnavailable | None) -> None:
        was_available, self.is_available = self.is_available, error is None
        if error is not None:
            self._metrics.registry_failures.inc()
            if was_available:
                log.warning(
                    "prefix ownership unavailable: routing by load and by what is known already", error=str(error)
                )
        elif not was_available:
            log.info("prefix ownership is back")
