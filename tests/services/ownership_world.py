"""Engines' block pools, their publishers, a broker that may do anything to their words, and routers' indexes.

The pools, publishers, feeds and indexes are the real ones. The broker is a fake in memory, on a clock that jumps
(``VirtualTimeLoop``), or a real Valkey in real time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import redis
from prometheus_client import CollectorRegistry

from engine.block_pool import BlockPool
from registry import RegistryUnavailable
from registry.kv_events import Batch, Cleared, Removed, Stored, decode_events, encode_events, split
from registry.ownership import STREAM_LENGTH, Ownership, Verdict
from router.ownership_feed import OwnershipFeed
from router.prefix_index import PrefixIndex
from telemetry.metrics import RouterMetrics
from worker.kv_publisher import KVPublisher


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Nothing takes time here; when all wait, it is as late as the first of them wants."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Broker(Protocol):
    """Where the words go, and what may happen to them there."""

    is_down: bool

    def client(self) -> Any:
        """As ``registry.ownership.Ownership``."""

    def flush(self) -> None: ...
    def change_stream(self, worker_id: str, how: str) -> None:
        """lose (the last entry), repeat (it), swap (the last two), trim (all but the last)."""

    def close(self) -> None: ...


def changed(entries: list[Any], how: str) -> list[Any]:
    """What the end of a stream looks like afterwards."""
    match how:
        case "lose":
            return entries[:-1]
        case "repeat":
            return entries + entries[-1:]
        case "swap":
            return entries[:-2] + entries[-2:][::-1]
        case "trim":
            return entries[-1:]
    raise ValueError(how)


class FakeBroker:
    """Redis and the scripts of registry/ownership.py, as plain Python."""

    def __init__(self) -> None:
        self.is_down = False
        self.fail_after = 0
        """So many publications are done and answered with an error."""
        self._last_id = 0
        self.flush()

    def client(self) -> FakeBroker:
        return self

    def flush(self) -> None:
        self._state: dict[str, tuple[int, int]] = {}
        self._blocks: dict[str, dict[bytes, str]] = {}
        self._streams: dict[str, list[tuple[int, bytes, int, int]]] = {}

    def change_stream(self, worker_id: str, how: str) -> None:
        entries = self._streams.get(worker_id, [])
        kept = changed(entries, how)
        if how in ("repeat", "swap"):  # what is new or moved has a new id
            same = len(entries) if how == "repeat" else max(0, len(entries) - 2)
            kept = kept[:same] + [(self._new_id(), *entry[1:]) for entry in kept[same:]]
        self._streams[worker_id] = kept

    def close(self) -> None:
        pass

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _answer(self) -> None:
        await asyncio.sleep(0.001)
        if self.is_down:
            raise RegistryUnavailable("the fake is down")

    async def publish(self, worker_id: str, batch: Batch) -> Verdict:
        await self._answer()
        incarnation, seq = self._state.get(worker_id, (0, 0))
        if incarnation > batch.incarnation:
            return Verdict.STALE
        if incarnation == batch.incarnation and batch.last_seq <= seq:
            return Verdict.OK
        follows = incarnation == batch.incarnation and batch.first_seq == seq + 1
        if not batch.begins_anew and not follows:
            return Verdict.GAP
        blocks = self._blocks.setdefault(worker_id, {})
        for event in batch.events:
            match event:
                case Cleared():
                    blocks.clear()
                case Stored(hashes=hashes, tier=tier):
                    blocks.update(dict.fromkeys(split(hashes), tier))
                case Removed(hashes=hashes):
                    for name in split(hashes):
                        blocks.pop(name, None)
        self._state[worker_id] = batch.incarnation, batch.last_seq
        entry = (self._new_id(), encode_events(batch.events), batch.incarnation, batch.first_seq)
        self._streams.setdefault(worker_id, []).append(entry)
        del self._streams[worker_id][:-STREAM_LENGTH]
        if self.fail_after:
            self.fail_after -= 1
            raise RegistryUnavailable("the answer was lost")
        return Verdict.OK

    async def renew(self, worker_id: str, incarnation: int, seq: int) -> Verdict:
        await self._answer()
        known = self._state.get(worker_id, (0, 0))
        if known[0] > incarnation:
            return Verdict.STALE
        return Verdict.OK if known == (incarnation, seq) else Verdict.GAP

    async def tail(self, worker_id: str) -> bytes:
        await self._answer()
        entries = self._streams.get(worker_id)
        return str(entries[-1][0] if entries else 0).encode()

    async def heads(self, worker_ids: Sequence[str]) -> list[tuple[int, int] | None]:
        await self._answer()
        return [self._state.get(worker_id) for worker_id in worker_ids]

    async def blocks(self, worker_id: str) -> AsyncIterator[list[bytes]]:
        for part in range(2):
            await self._answer()
            names = sorted(self._blocks.get(worker_id, {}))
            yield [name for name in names if name[0] % 2 == part]

    async def read(self, after: Mapping[str, bytes]) -> list[tuple[str, bytes, Batch | None]]:
        await self._answer()
        found: list[tuple[str, bytes, Batch | None]] = [
            (worker_id, str(entry_id).encode(), Batch(incarnation, first_seq, decode_events(events)))
            for worker_id, last in after.items()
            for entry_id, events, incarnation, first_seq in self._streams.get(worker_id, [])
            if entry_id > int(last)
        ]
        if not found:
            await asyncio.sleep(0.2)
        return found


class ValkeyBroker:
    """A real one; ``fail`` stands before it."""

    def __init__(self, url: str) -> None:
        self.is_down = False
        self._url = url
        self._redis = redis.Redis.from_url(url)

    def client(self) -> Ownership:
        return SwitchedOwnership(self._url, self)

    def flush(self) -> None:
        self._redis.flushall()

    def change_stream(self, worker_id: str, how: str) -> None:
        key = f"{{pdserve}}:kv:{worker_id}:events"
        entries: Any = self._redis.xrange(key)
        kept = changed(entries, how)
        same = sum(a[0] == b[0] for a, b in zip(entries, kept, strict=False))
        for entry_id, _ in entries[same:]:
            self._redis.xdel(key, entry_id)
        for _, fields in kept[same:]:
            self._redis.xadd(key, fields)

    def close(self) -> None:
        self._redis.close()


class SwitchedOwnership(Ownership):
    def __init__(self, url: str, broker: ValkeyBroker) -> None:
        super().__init__(url)
        self._broker = broker
        call = self._connection.call

        def switched_call() -> Any:
            if broker.is_down:
                raise RegistryUnavailable("switched off")
            return call()

        self._connection.call = switched_call  # type: ignore[method-assign]


@dataclass
class EngineWorker:
    """A worker as far as its blocks go."""

    worker_id: str
    block_tokens: int
    incarnation: int
    pool: BlockPool
    publisher: KVPublisher
    running: asyncio.Task[None]

    @property
    def stride(self) -> int:
        return self.block_tokens

    @property
    def cached(self) -> set[bytes]:
        return set(self.pool._block_of_hash)

    def compute(self, hashes: Sequence[bytes]) -> None:
        """A request with these blocks runs and ends."""
        cached = self.pool.match_prefix(hashes)
        if len(hashes) - len(cached) + self.pool.num_unreferenced(cached) > self.pool.num_available:
            return
        self.pool.share(cached)
        table = cached + self.pool.allocate(len(hashes) - len(cached))
        for i in range(len(cached), len(hashes)):
            self.pool.register(table[i], hashes[i], hashes[i - 1] if i else b"root")
        self.pool.free(table)
        self.speak()

    def speak(self) -> None:
        events = self.pool.events.take()
        if events is not None:
            self.publisher.take(events)


@dataclass
class IndexRouter:
    index: PrefixIndex
    feed: OwnershipFeed
    running: asyncio.Task[None]


class World:
    """``run`` lets time pass."""

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop, num_blocks: int = 7) -> None:
        self.broker = broker
        self.loop = loop
        self.num_blocks = num_blocks
        self.workers: dict[str, EngineWorker] = {}
        self.known: dict[str, Any] = {}
        self.routers: list[IndexRouter] = []
        self._clients: list[Any] = []
        self._incarnations = 0

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def start_worker(self, worker_id: str, block_tokens: int = 1) -> EngineWorker:
        client = self._client()
        publisher = KVPublisher(client, worker_id, lambda: self._ask_for_snapshot(worker_id))
        pool = BlockPool(self.num_blocks)
        self._incarnations += 1
        publisher.new_incarnation(self._incarnations)
        publisher.engine_ready(self.num_blocks)
        running = self.loop.create_task(publisher.run())
        worker = EngineWorker(worker_id, block_tokens, self._incarnations, pool, publisher, running)
        self.workers[worker_id] = worker
        self.known[worker_id] = SimpleNamespace(stride=block_tokens)
        worker.speak()
        return worker

    def restart_engine(self, worker_id: str) -> None:
        """The same service, a new incarnation: numbers begin at 1 again."""
        worker = self.workers[worker_id]
        self._incarnations += 1
        worker.pool = BlockPool(self.num_blocks)
        worker.incarnation = self._incarnations
        worker.publisher.new_incarnation(self._incarnations)
        worker.speak()

    def kill_worker(self, worker_id: str) -> None:
        """Without a word; routers notice by its session."""
        self.workers.pop(worker_id).running.cancel()
        del self.known[worker_id]

    def start_router(self) -> IndexRouter:
        index = PrefixIndex(self.loop.time)
        feed = OwnershipFeed(self._client(), index, self.known, RouterMetrics(CollectorRegistry()))
        router = IndexRouter(index, feed, self.loop.create_task(feed.run()))
        self.routers.append(router)
        return router

    def restart_router(self, number: int) -> None:
        self.routers.pop(number).running.cancel()
        self.start_router()

    def check(self) -> None:
        """What always holds."""
        for router in self.routers:
            assert not router.running.done()
            router.index.check_invariants()
        for worker in self.workers.values():
            assert not worker.running.done()
            worker.pool.check_invariants()

    def check_settled(self) -> None:
        """What holds after a quiet time: every index is the union of the caches, and nothing else."""
        for router in self.routers:
            assert router.feed.why_behind() is None
            assert set(router.index.worker_ids()) == self.workers.keys()
            for worker_id, worker in self.workers.items():
                assert router.index.blocks_of(worker_id) == worker.cached, worker_id
                assert router.index.incarnation(worker_id) == worker.incarnation

    def close(self) -> None:
        tasks = [part.running for part in [*self.workers.values(), *self.routers]]
        for task in tasks:
            task.cancel()

        async def end() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            for client in self._clients:
                await client.close()

        self.loop.run_until_complete(end())
        self.broker.close()
        self.loop.close()

    def _client(self) -> Any:
        client = self.broker.client()
        if isinstance(client, Ownership):
            self._clients.append(client)
        return client

    def _ask_for_snapshot(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        if worker is None:
            return False

        def answer() -> None:
            worker.pool.announce_all()
            worker.speak()

        self.loop.call_later(0.002, answer)
        return True
