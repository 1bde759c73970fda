"""What is kept of each request, and of all gaps between chunks, with a bound on both."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_SAMPLES = 2_000_000


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    """The server had too much to do, and said so before the first byte (429)."""
    FAILED = "failed"


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the start of the run, on the client's clock."""

    index: int
    scheduled_s: float
    """When it should have been sent; later than that is the client's lag, or its concurrency limit."""
    sent_s: float = 0.0
    first_text_s: float | None = None
    last_s: float = 0.0
    """The last chunk of the choice (the end, when it failed)."""
    outcome: Outcome = Outcome.FAILED
    error: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    num_chunks: int = 0
    """With text."""
    itl_p99_s: float = 0.0
    is_counted: bool = True
    """False where the server gave no usage: output tokens are then its chunks."""

    @property
    def ttft_s(self) -> float:
        """To the first text; where all of an output is invisible, to its end."""
        return (self.last_s if self.first_text_s is None else self.first_text_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token without the first; None when there is no other."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Samples:
    """All values up to ``limit``; beyond it a uniform sample of them (Vitter's algorithm R, 1985)."""

    def __init__(self, limit: int = MAX_SAMPLES, seed: int = 0) -> None:
        self.values = array("d")
        self.num_seen = 0
        self._limit = limit
        self._random = random.Random(seed)

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.num_seen += 1
            if len(self.values) < self._limit:
                self.values.append(value)
            elif (place := self._random.randrange(self.num_seen)) < self._limit:
                self.values[place] = value
