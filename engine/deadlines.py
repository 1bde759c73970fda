"""When requests must have ended. A heap of all that were ever added; who has ended meanwhile is left out when due."""

from __future__ import annotations

import heapq

from engine.request import Request

_SPARE = 64


class Deadlines:
    def __init__(self, requests: dict[str, Request]) -> None:
        """``requests``: the open ones, kept by the caller."""
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.deadline_s, request.request_id))

    def expired(self, now_s: float) -> list[Request]:
        """Open requests whose deadline passed; each is returned once."""
        expired: dict[str, Request] = {}
        while self._heap and self._heap[0][0] <= now_s:
            request = self._requests.get(heapq.heappop(self._heap)[1])
            # An id may be used again: then what is due may be its former request's.
            if request is not None and request.deadline_s <= now_s:
                expired[request.request_id] = request
        return list(expired.values())

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def forget_ended(self) -> None:
        """Now and then: the heap is never much longer than the requests are many."""
        if len(self._heap) > _SPARE + 2 * len(self._requests):
            self._heap = [(request.deadline_s, request.request_id) for request in self._requests.values()]
            heapq.heapify(self._heap)
