"""States of one KV transfer, the same on both sides, and the one table of what may follow what.

HANDSHAKING is 1 and FAILED is 0 so that the MIN over the ranks of a worker is what they agree on.

    HANDSHAKING --> READY --> TRANSFERRING --> DONE
        |            |  '-------------------^   |      (nothing to send: all cached, or token 0 ended the request)
        '------------'--------------'--> FAILED

READY means that a ticket is given (receiver) or granted (sender). Used by sender.py and receiver.py; a protocol model
may check the same table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class TransferState(IntEnum):
    FAILED = 0
    HANDSHAKING = 1
    READY = 2
    TRANSFERRING = 3
    DONE = 4


EDGES: dict[TransferState, frozenset[TransferState]] = {
    TransferState.HANDSHAKING: frozenset({TransferState.READY, TransferState.FAILED}),
    TransferState.READY: frozenset({TransferState.TRANSFERRING, TransferState.DONE, TransferState.FAILED}),
    TransferState.TRANSFERRING: frozenset({TransferState.DONE, TransferState.FAILED}),
    TransferState.DONE: frozenset(),
    TransferState.FAILED: frozenset(),
}


class TransferKey(NamedTuple):
    """A transfer is one attempt; a retry of the same request is another one."""

    transfer_id: str
    attempt: int


class IllegalTransition(Exception):
    """A bug of ours: the caller asked for an edge that is not in the table."""


def check_edge(key: TransferKey, before: TransferState, after: TransferState) -> None:
    """Raises:
    IllegalTransition: the table has no such edge.
    """
    if after not in EDGES[before]:
        raise IllegalTransition(f"transfer {key.transfer_id}/{key.attempt}: {before.name} -> {after.name}")


@dataclass(frozen=True, slots=True)
class Moved:
    """What one transfer did that is done, for its receiver's request."""

    lane: str
    """The backend."""
    exposed_s: float
    """From the end of prefill on."""
    total_s: float
    """From the first segment on."""
    num_bytes: int
    sent_tokens: int
    cached_tokens: int
    """Those that the receiver had."""


@dataclass(slots=True)
class TransferCounters:
    """Since the start, of one side; the services report them as metrics."""

    started: int = 0
    done: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """By kind."""
    segments: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """First segment until done, summed over the transfers that were done."""
    segments_dropped: dict[str, int] = field(default_factory=dict)
    """Receiver: stale, corrupt, out of range, duplicate."""
    streamed: int = 0
    """Receiver: transfers whose first segment came before the prefill ended."""

    def count_failed(self, kind: str) -> None:
        self.failed[kind] = self.failed.get(kind, 0) + 1

    def count_dropped(self, kind: str) -> None:
        self.segments_dropped[kind] = self.segments_dropped.get(kind, 0) + 1
