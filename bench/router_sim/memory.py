"""What the index costs per block, measured by what the allocator gave."""

from __future__ import annotations

import os
import tracemalloc

from registry.kv_events import Batch, Cleared, Stored, join
from router.prefix_index import PrefixIndex

CHAIN_BLOCKS = 256


def bytes_per_entry(num_workers: int, blocks_each: int, owners: int) -> float:
    """Of one block of one owner, with each block owned by ``owners`` neighbours."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = PrefixIndex()
    chains = [[os.urandom(16) for _ in range(CHAIN_BLOCKS)] for _ in range(num_workers)]
    chain_bytes = tracemalloc.get_traced_memory()[0] - before
    del chains
    before, _ = tracemalloc.get_traced_memory()
    for number in range(num_workers):
        index.meet(f"w{number}", 1)
        index.apply(f"w{number}", Batch(1, 1, [Cleared()]))
    seq = [2] * num_workers
    for start in range(num_workers):
        for _ in range(blocks_each // CHAIN_BLOCKS // owners):
            joined = join(os.urandom(16) for _ in range(CHAIN_BLOCKS))
            for owner in range(owners):
                number = (start + owner) % num_workers
                index.apply(f"w{number}", Batch(1, seq[number], [Stored(joined)]))
                seq[number] += 1
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert chain_bytes > 0
    return (after - before) / index.num_entries
