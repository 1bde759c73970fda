"""What happened to the prefix cache, numbered, so that others can keep a copy of "which blocks are here".

Owns the numbering and what has not been taken yet. Written by ``BlockPool`` as it publishes and evicts; taken once a
step by ``EngineCore``, which sends it with the step's news. Knows hashes only.

An event's number is one more than the one before; the first of an engine's life is 1, and it says that nothing is here.
A snapshot is no other kind of message: "cleared", then everything as "stored", with the next numbers. Whoever has lost
the thread takes up the next "cleared".

Blocks are named by the hash of their last ``hash_block_tokens`` unit (``block_hash``), one event entry a block: workers
with other block sizes name theirs in the same space, so that one index serves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from engine.messages import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEvents

MAX_HASHES = 1024
"""In one event, so that no reader has to swallow a whole pool at once."""


class KVEventLog:
    """Events in order. Runs of one kind (a chain that is stored, a tail that is evicted) become one event."""

    def __init__(self) -> None:
        self._next_seq = 1
        self._events: list[KVEvent] = [BlocksCleared()]

    def __len__(self) -> int:
        """Events that wait to be taken."""
        return len(self._events)

    def stored(self, block_hash: bytes, parent: bytes) -> None:
        last = self._events[-1] if self._events else None
        continues = isinstance(last, BlocksStored) and last.block_hashes[-1] == parent
        if isinstance(last, BlocksStored) and continues and len(last.block_hashes) < MAX_HASHES:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlocksStored(parent, [block_hash]))

    def removed(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and len(last.block_hashes) < MAX_HASHES:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlocksRemoved([block_hash]))

    def snapshot(self, block_hashes: Iterable[bytes]) -> None:
        """Everything that is here now; what was not taken yet is part of it. Its chains are not kept apart."""
        self._events = [BlocksCleared(), *(BlocksStored(b"", hashes) for hashes in _chunks(block_hashes))]

    def take(self) -> KVEvents | None:
        """What happened since the last call. The caller owns it."""
        if not self._events:
            return None
        taken = KVEvents(self._next_seq, self._events)
        self._next_seq += len(self._events)
        self._events = []
        return taken


def _chunks(block_hashes: Iterable[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(block_hashes)
    while chunk := list(islice(iterator, MAX_HASHES)):
        yield chunk
