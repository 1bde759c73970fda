"""D's blocks for KV that is on its way: whose they are, and those that wait for a request's next attempt.

Owns which requests wait for KV, which of them hold blocks, and the blocks that an ended attempt left to the next one of
the same transfer. When to give up what is kept is the hand-off's business (it has the leases). Called by the scheduler.

    waiting_for_kv --reserve--> reserved --kv_ready--> (running)
          ^                       |   '---keep----> kept --take_over--> reserved, for another request
          '-------release---------'                   '---drop--> (pool)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.block_tables import BlockTables
from engine.messages import ReceiveKV
from engine.request import Request


@dataclass(frozen=True, slots=True)
class _Kept:
    block_table: list[int]
    num_cached_tokens: int
    num_tokens: int


class Reservations:
    def __init__(self, blocks: BlockTables, wake: Callable[[Iterable[Request]], None]) -> None:
        """``wake`` is called when blocks got free, with the requests that may go on by that."""
        self._blocks = blocks
        self._wake = wake
        self.waiting_for_kv: dict[str, Request] = {}
        self.reserved: dict[str, Request] = {}
        """Those of ``waiting_for_kv`` that hold blocks (and so, a seat)."""
        self.kept: dict[str, _Kept] = {}
        """By transfer id. They hold a seat, too: whoever takes them over needs it."""
        self.taken_over_total = 0

    @property
    def num_seats(self) -> int:
        return len(self.reserved) + len(self.kept)

    @property
    def kept_tables(self) -> list[list[int]]:
        return [kept.block_table for kept in self.kept.values()]

    def forget(self, request: Request) -> None:
        """It ended, or runs; its blocks are not looked after here any more."""
        self.waiting_for_kv.pop(request.request_id, None)
        self.reserved.pop(request.request_id, None)

    def keep(self, request: Request) -> bool:
        """Part the request from its blocks and hold these. False when it has none."""
        if self.reserved.pop(request.request_id, None) is None:
            return False
        kept = _Kept(request.block_table, request.num_computed_tokens, request.num_tokens)
        self._wake(self._blocks.detach(request))
        self.drop(_transfer_id(request))
        self.kept[_transfer_id(request)] = kept
        return True

    def take_over(self, request: Request) -> bool:
        """Give the request, which has no blocks, what is kept for it. False when its tokens are others: it is freed."""
        kept = self.kept.get(_transfer_id(request))
        if kept is None or kept.num_tokens != request.num_tokens:
            self.drop(_transfer_id(request))
            return False
        del self.kept[_transfer_id(request)]
        self._blocks.attach(request, kept.block_table, kept.num_cached_tokens)
        request.num_cached_tokens = kept.num_cached_tokens
        self.reserved[request.request_id] = request
        self.taken_over_total += 1
        return True

    def drop(self, transfer_id: str) -> None:
        """Free what is kept, if anything is."""
        kept = self.kept.pop(transfer_id, None)
        if kept is not None:
            self._blocks.pool.free(kept.block_table)
            self._wake([])


def _transfer_id(request: Request) -> str:
    assert isinstance(request.handoff, ReceiveKV)
    return request.handoff.transfer_id
