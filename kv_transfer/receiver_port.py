"""What a receiver of transfers asks of the engine that it serves and of the control stream, and its times.

Implemented by the decode service's ``engine_main``, and by the tests' engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kv_transfer.copies import DeviceCopy
from kv_transfer.layout import KVRange
from kv_transfer.protocol import Frame
from kv_transfer.transfer import Moved


class ReceiverPort(Protocol):
    """What the receiver asks of the engine and of the control stream. Called on the engine's thread."""

    def send(self, peer: str, frame: Frame) -> None: ...

    def reserve(self, request_id: str) -> int | None:
        """Take blocks for the whole prompt; returns the cached tokens, None when there is no room now."""
        ...

    def write_kv(self, request_id: str, part: KVRange, payload: Any, dtype: str) -> DeviceCopy | None:
        """Copy a segment (memoryview or DeviceView) into the reservation.

        None: it is there. Else a device does it after ``start_copies``; the payload must stay until that is over.
        """
        ...

    def start_copies(self) -> None:
        """Let the device begin what ``write_kv`` asked of it."""
        ...

    def publish(self, request_id: str, first_output: bytes, moved: Moved) -> None:
        """Everything is there: emit the first token and go on."""
        ...

    def finish(self, request_id: str, first_output: bytes) -> None:
        """The first token ended the request: emit it, publish nothing."""
        ...

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        """Free the reservation, end the request. ``peer_lost``: it was the sender that failed, as far as is known."""
        ...

    def keep(self, request_id: str) -> bool:
        """Part the request, which is about to end, from its reservation, and hold that. False when it has none."""
        ...

    def take_over(self, request_id: str) -> bool:
        """Give a new request what is held from an earlier attempt. False when it does not fit; then it is freed."""
        ...

    def drop_kept(self, transfer_id: str) -> None:
        """Nobody came: free what is held."""
        ...

    def release(self, request_id: str) -> None:
        """Free the reservation; the request goes on waiting."""
        ...


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    lease_s: float = 10.0
    """Also how long a tombstone stays."""
    park_s: float = 2.0
    stall_timeout_s: float = 5.0
    """After the end of prefill, no segment for so long: one is missing."""
    busy_retry_s: float = 0.05
    patience_s: float = 1.0
    """A transfer that is told busy for so long goes first: later ones wait until it fits."""
    asks_again_within_s: float = 2.0
    """One that has not asked for so long waits no more."""
    keep_s: float = 1.0
    """How long a reservation without a request is held for the next attempt."""
