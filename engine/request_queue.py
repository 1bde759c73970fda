"""Requests in running order (priority, then arrival), with removal from anywhere.

A sorted list: queues here are bounded (``max_waiting_requests``, ``max_num_seqs``), so insertion and removal are a
binary search and a short memmove. Used by the scheduler and the ticket desk.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.request import Request

_ORDER = attrgetter("order")


class RequestQueue:
    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._find(request) is not None

    def head(self) -> Request:
        return self._requests[0]

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_ORDER)

    def remove(self, request: Request) -> bool:
        """Whether it was here."""
        index = self._find(request)
        if index is not None:
            del self._requests[index]
        return index is not None

    def _find(self, request: Request) -> int | None:
        index = bisect_left(self._requests, request.order, key=_ORDER)
        found = index < len(self._requests) and self._requests[index] is request
        return index if found else None
