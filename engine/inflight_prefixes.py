"""Prefixes that are being computed (or received) right now, and the requests held back until they are published.

Without this, 16 requests with one prefix that arrive together would compute it 16 times. A request is held while its
next unpublished block is claimed by another one; it is let go when the last block that the two share is published, or
when the other gives up its claim (ended, preempted). So a hold never outlasts the claimant. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request


class InflightPrefixes:
    def __init__(self) -> None:
        self._claimant: dict[bytes, Request] = {}
        """Unpublished block -> who fills it."""
        self._held: dict[bytes, dict[Request, None]] = {}
        """Unpublished block -> who waits for it, in order."""
        self._held_on: dict[Request, bytes] = {}

    def __len__(self) -> int:
        return len(self._held_on)

    def is_empty(self) -> bool:
        return not (self._claimant or self._held or self._held_on)

    def claim(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        """``request`` is going to fill and publish these blocks."""
        for block_hash in block_hashes:
            self._claimant.setdefault(block_hash, request)

    def is_claimed(self, block_hash: bytes) -> bool:
        return block_hash in self._claimant

    def hold(self, request: Request, block_hashes: Sequence[bytes]) -> bool:
        """Hold ``request``, which lacks these blocks, if the first of them is claimed. Whether it is held."""
        last = None
        for block_hash in block_hashes:
            if block_hash not in self._claimant:
                break
            last = block_hash
        if last is None:
            return False
        self._held.setdefault(last, {})[request] = None
        self._held_on[request] = last
        return True

    def published(self, block_hash: bytes) -> list[Request]:
        """The block is in the prefix cache. The requests that are let go by it; the caller queues them again."""
        self._claimant.pop(block_hash, None)
        return self._let_go(block_hash)

    def give_up(self, request: Request) -> list[Request]:
        """``request`` fills no more blocks. The requests that are let go by it; the caller queues them again."""
        released = []
        for block_hash in request.block_hashes:
            if self._claimant.get(block_hash) is request:
                del self._claimant[block_hash]
                released += self._let_go(block_hash)
        return released

    def forget(self, request: Request) -> bool:
        """``request`` waits no longer. Whether it was held."""
        block_hash = self._held_on.pop(request, None)
        if block_hash is None:
            return False
        held = self._held[block_hash]
        del held[request]
        if not held:
            del self._held[block_hash]
        return True

    def _let_go(self, block_hash: bytes) -> list[Request]:
        released = list(self._held.pop(block_hash, ()))
        for request in released:
            del self._held_on[request]
        return released
