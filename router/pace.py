"""How long a new request would wait at a worker: what this router has queued there, by the pace at which that goes.

Measured where the requests end their wait, so whatever holds them up counts: other routers' work, a decode worker
without room, a stall. While nothing waits there is nothing to measure; the last pace is kept.
"""

from __future__ import annotations

import math

WINDOW_S = 10.0
"""What is older counts less and less."""
MIN_MEASURED_S = 0.2


class QueuePace:
    """Of one worker. ``began`` when the first prompt is queued, ``computed`` for each that is; times on one clock."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Nothing waited before."""
        self._since_s = now_s

    def computed(self, num_tokens: int, now_s: float) -> None:
        if self._since_s is None:
            return
        elapsed_s = max(0.0, now_s - self._since_s)
        keep = math.exp(-elapsed_s / WINDOW_S)
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + elapsed_s
        self._since_s = now_s

    @property
    def s_per_token(self) -> float:
        """While something waited; 0: not known."""
        return 0.0 if self._seconds < MIN_MEASURED_S else self._seconds / max(1.0, self._tokens)

    def stalled_s(self, queued_tokens: int, now_s: float) -> float:
        """So long nothing came out of a queue that has something."""
        return max(0.0, now_s - self._since_s) if queued_tokens and self._since_s is not None else 0.0

    def wait_s(self, queued_tokens: int, now_s: float) -> float:
        """Of a request that comes after ``queued_tokens``; 0 while the pace is not known."""
        if not queued_tokens or self._since_s is None or self._seconds < MIN_MEASURED_S:
            return 0.0
        return queued_tokens * (self._seconds + self.stalled_s(queued_tokens, now_s)) / max(1.0, self._tokens)
