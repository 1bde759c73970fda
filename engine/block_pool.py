"""The KV blocks of one engine: who refers to which, and which free ones still hold a reusable prefix.

Owns reference counts, the prefix index (block hash -> block) and the order of eviction. Knows ids and hashes only: not
the memory (``kv_cache``), not requests. Called by the scheduler; every operation is O(1) a block. Each change of the
prefix index is an event in ``events``.

                 allocate                    free (no hash)
    free ---------------------> used ------------------------> free
      ^                         ^  |  free (published hash)
      |            share        |  v
      +------ evicted ------- cached     least recently used first, the tail of a chain before its head
        (by allocate)

    num_free + num_cached + num_used == num_blocks, always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.kv_events import KVEventLog


class BlockPool:
    """Block ids 0 .. num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: the KV pool needs at least one block; give it more memory")
        self.num_blocks = num_blocks
        self.events = KVEventLog()
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # A stack, lowest id on top: tests and traces read better, and touched memory is touched again.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Empty blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that hold a reusable prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """What ``allocate`` can hand out now."""
        return len(self._free) + len(self._cached)

    def match_prefix(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest published prefix. They stay as they are: ``share`` them before anything else."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of these ``share`` would take from ``num_available``."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these matched blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each and undefined content; evicts cached ones when it must.

        Raises ValueError, and takes nothing, when fewer are available.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        block_ids = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._evict()
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def register(self, block_id: int, block_hash: bytes, parent: bytes = b"") -> None:
        """Publish a full, computed block. When its content is published already, this copy just stays private."""
        if self._ref_counts[block_id] == 0:
            raise ValueError(f"block {block_id} is not in use and cannot be published")
        if self._hashes[block_id] is None and block_hash not in self._block_of_hash:
            self._hashes[block_id] = block_hash
            self._block_of_hash[block_hash] = block_id
            self.events.stored(block_hash, parent)

    def free(self, block_table: Sequence[int]) -> None:
        """Drop one reference to each block of a table, or of its tail. Published ones stay cached until evicted."""
        # From the end: the tail of a chain is useless without its head, so it must be evicted first.
        for block_id in reversed(block_table):
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def announce_all(self) -> None:
        """Put a snapshot of the prefix index into ``events``."""
        self.events.snapshot(self._block_of_hash)

    def check_invariants(self) -> None:
        """Raises AssertionError when the books do not balance. O(num_blocks): for tests and idle moments."""
        free, cached = set(self._free), set(self._cached)
        used = {block_id for block_id in range(self.num_blocks) if self._ref_counts[block_id] > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not (free & cached | free & used | cached & used), "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost"
        assert all(count >= 0 for count in self._ref_counts)
        assert all(self._hashes[block_id] is None for block_id in free), "an empty block is published"
        assert all(self._hashes[block_id] is not None for block_id in cached), "a cached block has no name"
        published = {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
        assert published == self._block_of_hash, "the prefix index disagrees with the blocks"

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._block_of_hash[block_hash]
        self.events.removed(block_hash)
        self._hashes[block_id] = None
        return block_id
