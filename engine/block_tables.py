"""The blocks that each request holds: taken, grown, published by content, given back when nothing can touch them.

Sits between the requests and the pool: turns tokens into block hashes, fills ``Request.block_table``, and names the
requests that a change lets go on (``InflightPrefixes``). Decides nothing about order or room: called by the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.block_hash import hash_tokens, root_hash
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.inflight_prefixes import InflightPrefixes
from engine.request import Request


class BlockTables:
    def __init__(
        self, config: EngineConfig, pool: BlockPool, inflight: InflightPrefixes, model_fingerprint: str
    ) -> None:
        self.pool = pool
        self.inflight = inflight
        self._block_size = config.block_size
        self._hash_block_tokens = config.hash_block_tokens
        self._enable_prefix_caching = config.enable_prefix_caching
        self._model_fingerprint = model_fingerprint
        self._settled_step = 0
        self._freed_later: deque[tuple[int, list[int]]] = deque()
        """(step that still writes into them, blocks)."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def is_full(self, request: Request) -> bool:
        """Whether the next token needs another block."""
        return request.num_computed_tokens >= len(request.block_table) * self._block_size

    def match(self, request: Request, num_tokens: int) -> tuple[list[int], Sequence[bytes]]:
        """Published blocks of its first ``num_tokens``, and the hashes of the full blocks that it lacks among these."""
        hashes = self._hash_blocks(request, request.num_tokens)[: num_tokens // self._block_size]
        cached = self.pool.match_prefix(hashes)
        return cached, hashes[len(cached) :]

    def cost(self, cached: Sequence[int], num_blocks: int) -> int:
        """How many of the pool's available blocks a table of ``num_blocks`` takes, ``cached`` among them."""
        return num_blocks - len(cached) + self.pool.num_unreferenced(cached)

    def take(self, request: Request, cached: list[int], num_blocks: int) -> None:
        """A table that begins with the cached blocks; the request will fill and publish the others."""
        self.pool.share(cached)
        request.block_table = cached + self.pool.allocate(num_blocks - len(cached))
        request.num_computed_tokens = len(cached) * self._block_size
        self.inflight.claim(request, request.block_hashes[len(cached) : request.num_tokens // self._block_size])

    def grow(self, request: Request) -> None:
        request.block_table += self.pool.allocate(1)

    def publish(self, request: Request, start: int, end: int) -> list[Request]:
        """Tokens ``start`` to ``end`` are computed: blocks that are full now may be shared. Who may go on by that."""
        first, last = start // self._block_size, end // self._block_size
        if first == last:
            return []
        hashes = self._hash_blocks(request, end)
        released = []
        for index in range(first, min(last, len(hashes))):
            parent = hashes[index - 1] if index else self._root(request)
            self.pool.register(request.block_table[index], hashes[index], parent)
            released += self.inflight.published(hashes[index])
        return released

    def free(self, request: Request) -> list[Request]:
        """Give all blocks back, those that a step in flight writes into when it is over. Who may go on by that."""
        if not request.block_table:
            return []
        if request.last_step > self._settled_step:
            self._freed_later.append((request.last_step, request.block_table))
        else:
            self.pool.free(request.block_table)
        return self.detach(request)

    def detach(self, request: Request) -> list[Request]:
        """The request holds its blocks no more, and is not the one who fills them. Who may go on by that."""
        request.block_table = []
        request.num_computed_tokens = 0
        return self.inflight.give_up(request)

    def attach(self, request: Request, block_table: list[int], num_cached_tokens: int) -> None:
        """The request, which has the same tokens, holds what was detached, and will fill what is not cached of it."""
        request.block_table = block_table
        request.num_computed_tokens = num_cached_tokens
        hashes = self._hash_blocks(request, request.num_tokens)
        first, last = num_cached_tokens // self._block_size, request.num_tokens // self._block_size
        self.inflight.claim(request, hashes[first:last])

    def settle(self, step: int) -> bool:
        """The step is over. Whether blocks became available by that."""
        self._settled_step = step
        freed = False
        while self._freed_later and self._freed_later[0][0] <= step:
            self.pool.free(self._freed_later.popleft()[1])
            freed = True
        return freed

    def _hash_blocks(self, request: Request, num_tokens: int) -> list[bytes]:
        """Hashes of the full blocks of at least the first ``num_tokens``; only those not known yet are computed."""
        hashes = request.block_hashes
        if self._enable_prefix_caching:
            units_per_block = self._block_size // self._hash_block_tokens
            start, stop = len(hashes) * self._block_size, num_tokens // self._block_size * self._block_size
            if start < stop:
                parent = hashes[-1] if hashes else self._root(request)
                units = hash_tokens(request.all_token_ids, self._hash_block_tokens, parent, start, stop)
                hashes += units[units_per_block - 1 :: units_per_block]
        return hashes

    def _root(self, request: Request) -> bytes:
        return root_hash(self._model_fingerprint, request.cache_salt)
