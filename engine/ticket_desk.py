"""P's side of admission: which requests may ask their receiver for a ticket, and which wait to ask (again).

A request that sends its KV passes here before the scheduler's waiting queue. It holds nothing meanwhile, neither here
nor there; what it will take from the pool is counted as pledged from asking on, so that no more are asked for than fit.

    add -> queue --asks--> asked --granted--> (scheduler's waiting queue)
             ^               |
             |               +--busy--> deferred --retry time--+
             +--(its peer holds less again)-- parked           |
             +-------------------------------------------------+

The cap: requests of one receiver may take ``max_peer_blocks`` of the pool together (or one request, if larger), so that
a receiver that takes its KV slowly, or never, cannot take the pool from the others. A receiver that does not answer
(stopped, cut off) does not make the others wait either: after ``ANSWER_PATIENCE_S`` its requests do not count as work
ahead any more. Called by the scheduler.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from engine.messages import SendKV
from engine.request import Request
from engine.request_queue import RequestQueue

ANSWER_PATIENCE_S = 0.5
"""A receiver answers between two of its steps."""


class Room(Protocol):
    """What is asked of ``engine.room.Room``."""

    def has_seat(self, promised: int) -> bool: ...
    def match(self, request: Request) -> tuple[list[int], int, bool]: ...
    def of_waiting(self) -> int: ...


@dataclass(slots=True)
class _Claim:
    """What a request takes from the pool, or will take (``is_pledged``)."""

    peer_id: str
    blocks: int
    tokens: int
    is_pledged: bool = True
    is_ahead: bool = True
    """Expected to run soon, so that no more need to ask."""


def _peer_id(request: Request) -> str:
    assert isinstance(request.handoff, SendKV)
    return request.handoff.peer_id


class TicketDesk:
    def __init__(self, max_peer_blocks: int, block_size: int) -> None:
        self.max_peer_blocks = max_peer_blocks
        self._block_size = block_size
        self.queue = RequestQueue()
        self._asked: dict[str, Request] = {}
        self._deferred: dict[str, Request] = {}
        self._retries: list[tuple[float, str]] = []
        """A heap; an entry is stale when its request is no longer in ``_deferred``."""
        self._overdue: deque[tuple[float, str]] = deque()
        """When to stop counting on an answer, oldest first; stale when its request is no longer in ``_asked``."""
        self._parked: dict[str, RequestQueue] = {}
        self._claims: dict[str, _Claim] = {}
        self._blocks_of_peer: dict[str, int] = {}
        self.pledged_blocks = 0
        self.num_ahead = 0
        self.tokens_ahead = 0

    def is_empty(self) -> bool:
        return not (
            self.queue or self._asked or self._deferred or self._parked or self._claims or self._blocks_of_peer
        ) and (self.pledged_blocks, self.num_ahead, self.tokens_ahead) == (0, 0, 0)

    def ask_all(self, room: Room, waiting: RequestQueue, max_tokens_ahead: int, now_s: float) -> list[Request]:
        """Those that ask now, in order: as long as there is room for them, and work is wanted. ``waiting``: those that
        need no ticket; nobody overtakes them."""
        asking: list[Request] = []
        while self.queue and self.tokens_ahead < max_tokens_ahead:
            request = self.queue.head()
            if not room.has_seat(promised=self.num_ahead) or (waiting and waiting.head().order < request.order):
                break
            cached, blocks, is_held = room.match(request)
            if is_held:
                self.queue.remove(request)
                continue
            if self.park_if_over_cap(request, blocks):
                continue
            if blocks > room.of_waiting():
                break
            self.ask(request, blocks, request.num_tokens - len(cached) * self._block_size, now_s)
            asking.append(request)
        return asking

    def park_if_over_cap(self, request: Request, blocks: int) -> bool:
        """Set the queued ``request`` aside if its receiver's share is used up. Whether it was."""
        peer_id = _peer_id(request)
        taken = self._blocks_of_peer.get(peer_id, 0)
        if taken == 0 or taken + blocks <= self.max_peer_blocks:
            return False
        self.queue.remove(request)
        self._parked.setdefault(peer_id, RequestQueue()).push(request)
        return True

    def ask(self, request: Request, blocks: int, tokens: int, now_s: float) -> None:
        """The queued ``request`` asks; ``blocks`` of the pool are pledged to it, and its ``tokens`` are work ahead."""
        self.queue.remove(request)
        self._asked[request.request_id] = request
        if request.ticket_asked_s is None:
            request.ticket_asked_s = now_s
        self._overdue.append((now_s + ANSWER_PATIENCE_S, request.request_id))
        self._claims[request.request_id] = _Claim(_peer_id(request), blocks, tokens)
        self._count(_peer_id(request), blocks)
        self.pledged_blocks += blocks
        self.num_ahead += 1
        self.tokens_ahead += tokens
        self._queue_parked(_peer_id(request))

    def granted(self, request: Request) -> bool:
        """The pledge stays until ``scheduled``. False when no ticket was being waited for."""
        return self._asked.pop(request.request_id, None) is not None

    def defer(self, request: Request, retry_at_s: float) -> bool:
        """The receiver is busy: drop the pledge, ask again later. False when no ticket was being waited for."""
        if self._asked.pop(request.request_id, None) is None:
            return False
        self._drop_claim(request)
        self._queue_parked(_peer_id(request))
        self._deferred[request.request_id] = request
        heapq.heappush(self._retries, (retry_at_s, request.request_id))
        return True

    def next_due_s(self) -> float | None:
        """When ``take_due`` will have something to do."""
        times = [self._retries[0][0]] if self._retries else []
        return min(times + ([self._overdue[0][0]] if self._overdue else []), default=None)

    def take_due(self, now_s: float) -> bool:
        """Queue deferred requests whose time has come, count on late answers no more. Whether others may ask now."""
        due = False
        while self._overdue and self._overdue[0][0] <= now_s:
            request_id = self._overdue.popleft()[1]
            if request_id in self._asked:
                self._not_ahead(self._claims[request_id])
                due = True
        while self._retries and self._retries[0][0] <= now_s:
            request = self._deferred.pop(heapq.heappop(self._retries)[1], None)
            if request is not None:
                self.queue.push(request)
                due = True
        return due

    def scheduled(self, request: Request, blocks: int) -> None:
        """The granted request took ``blocks`` from the pool."""
        claim = self._claims[request.request_id]
        self._drop_pledge(claim)
        self._count(claim.peer_id, blocks - claim.blocks)
        claim.blocks = blocks

    def forget(self, request: Request) -> None:
        """The request ended: take it from wherever it is and give its claim back."""
        self._asked.pop(request.request_id, None)
        self._deferred.pop(request.request_id, None)
        self.queue.remove(request)
        self._remove_parked(_peer_id(request), request)
        self._drop_claim(request)
        # Also when it had no claim: it may have been the one that was to bring the next.
        self._queue_parked(_peer_id(request))

    def _drop_claim(self, request: Request) -> None:
        claim = self._claims.pop(request.request_id, None)
        if claim is None:
            return
        self._drop_pledge(claim)
        self._count(claim.peer_id, -claim.blocks)

    def _drop_pledge(self, claim: _Claim) -> None:
        self._not_ahead(claim)
        if claim.is_pledged:
            claim.is_pledged = False
            self.pledged_blocks -= claim.blocks

    def _not_ahead(self, claim: _Claim) -> None:
        if claim.is_ahead:
            claim.is_ahead = False
            self.num_ahead -= 1
            self.tokens_ahead -= claim.tokens

    def _count(self, peer_id: str, blocks: int) -> None:
        total = self._blocks_of_peer.get(peer_id, 0) + blocks
        if total:
            self._blocks_of_peer[peer_id] = total
        else:
            self._blocks_of_peer.pop(peer_id, None)

    def _queue_parked(self, peer_id: str) -> None:
        """One is enough: if it gets to ask, it brings the next one; if not, it is parked again."""
        parked = self._parked.get(peer_id)
        if parked is not None:
            request = parked.head()
            self._remove_parked(peer_id, request)
            self.queue.push(request)

    def _remove_parked(self, peer_id: str, request: Request) -> None:
        parked = self._parked.get(peer_id)
        if parked is not None and parked.remove(request) and not parked:
            del self._parked[peer_id]
