"""What is sent: one request of a run, and token ids that a seed decides.

Token ids are a hash of (seed, stream, position): the same stream gives the same tokens wherever it is used, without
anything being kept. That is how equal blocks of a trace become equal blocks of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Content = list[int] | str | list[dict[str, Any]]
"""Token ids, a text, or chat messages."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    content: Content
    max_tokens: int | None
    """None: as many as the model wants to."""
    arrival_s: float | None = None
    """Since the start, where the dataset says when."""


class Dataset(Protocol):
    """A source of requests. ``request`` may be called in any order, and gives the same for the same index."""

    ignore_eos: bool
    """Whether outputs should have exactly the length asked for."""

    def __len__(self) -> int: ...

    def request(self, index: int) -> BenchRequest: ...


class TokenSource:
    """Token ids in [first_id, end_id) by stream and position."""

    def __init__(self, seed: int, first_id: int, end_id: int) -> None:
        if not 0 <= first_id < end_id:
            raise ValueError(f"token ids {first_id}:{end_id} are no range: use --token-ids 1000:30000")
        self._seed = seed
        self._first_id = first_id
        self._num_ids = end_id - first_id

    def tokens(self, kind: int, stream: int, count: int, start: int = 0) -> NDArray[np.int64]:
        """``count`` ids of a stream, from its position ``start``; streams of different kinds have nothing in common."""
        key = _mix(np.array([self._seed], np.uint64))
        key = _mix(key ^ np.uint64(kind))
        key = _mix(key ^ np.uint64(stream))
        positions = np.arange(start, start + count, dtype=np.uint64)
        hashes = _mix(key + positions * np.uint64(0x9E3779B97F4A7C15))
        return self._first_id + (hashes % np.uint64(self._num_ids)).astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_SYLLABLES = ["ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "wi", "jo", "ka", "le"]
WORDS = [f"{first}{second}" for first in _SYLLABLES for second in _SYLLABLES]


def as_text(token_ids: list[int]) -> str:
    """Words in place of ids, equal where the ids are, for endpoints that take text only. Its tokens are counted by the
    server's tokenizer: expect one to three per word."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)
