"""A worker without an engine: the real block pool and its events, and a queue that takes time instead of working."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.messages import BlocksRemoved, BlocksStored, KVEvents
from registry.kv_events import Batch, Cleared, Event, Removed, Stored, join
from router.policies.load import WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """About those of an 8B model on one H200."""

    prefill_tokens_per_s: float = 16_000
    decode_s_per_token: float = 0.02
    pool_tokens: int = 800_000
    shared_tokens_per_s: float = 0.0
    """Of a decode worker, within its ITL budget, while prefill workers are busy; 0: it computes no prompts."""


@dataclass(slots=True)
class Report:
    """As a worker's heartbeat says it."""

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    shares_prefill: bool
    prefill_tokens_per_s: float


class SimWorker:
    """A routing Candidate."""

    def __init__(self, worker_id: str, speed: WorkerSpeed, block_tokens: int, *, decodes: bool) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad(pool_tokens=speed.pool_tokens)
        self.computed_tokens = 0
        self.requests_total = 0
        self.requests = 0
        self.queued_tokens = 0
        self.prefill_free_s = 0.0
        self.prefill_busy_s = 0.0
        self._shared_tokens_per_s = speed.shared_tokens_per_s if decodes else 0.0
        self._tokens_per_s = self._shared_tokens_per_s if decodes else speed.prefill_tokens_per_s
        self._block_tokens = block_tokens
        self._pool = BlockPool(max(1, speed.pool_tokens // block_tokens))

    def take_blocks(self, hashes: Sequence[bytes], num_tokens: int) -> tuple[int, list[int]]:
        """Blocks for a prompt: how many tokens of it are cached, and its block table (empty: no room)."""
        pool = self._pool
        cached = pool.match_prefix(hashes[: (num_tokens - 1) // self._block_tokens])
        wanted = -(-num_tokens // self._block_tokens) - len(cached)
        if wanted + pool.num_unreferenced(cached) > pool.num_available:
            return len(cached) * self._block_tokens, []
        pool.share(cached)
        return len(cached) * self._block_tokens, cached + pool.allocate(wanted)

    def publish(self, table: Sequence[int], hashes: Sequence[bytes]) -> None:
        for block_id, name in zip(table, hashes, strict=False):
            self._pool.register(block_id, name)

    def free(self, table: Sequence[int]) -> None:
        self._pool.free(table)

    def prefill(self, now_s: float, uncached_tokens: int) -> float:
        """Queue it; when it will be done."""
        self.computed_tokens += uncached_tokens
        self.queued_tokens += uncached_tokens
        took_s = uncached_tokens / self._tokens_per_s
        self.prefill_busy_s += took_s
        self.prefill_free_s = max(now_s, self.prefill_free_s) + took_s
        return self.prefill_free_s

    def report(self) -> Report:
        pool = self._pool
        rate = self._shared_tokens_per_s
        return Report(self.requests, 0, self.queued_tokens, pool.num_available, pool.num_blocks, rate > 0, rate)

    def take_events(self) -> Batch | None:
        events = self._pool.events.take()
        return to_batch(events) if events is not None else None


def to_batch(events: KVEvents) -> Batch:
    wire: list[Event] = []
    for event in events.events:
        match event:
            case BlocksStored(parent=parent, block_hashes=hashes):
                wire.append(Stored(join(hashes), parent))
            case BlocksRemoved(block_hashes=hashes):
                wire.append(Removed(join(hashes)))
            case _:
                wire.append(Cleared())
    return Batch(1, events.first_seq, wire)
