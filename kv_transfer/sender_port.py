"""What a sender of transfers asks of the engine that it serves and of the control stream.

Implemented by the prefill service's ``engine_main``, and by the tests' engines.
"""

from __future__ import annotations

from typing import Any, Protocol

from kv_transfer.copies import DeviceCopy
from kv_transfer.layout import KVRange
from kv_transfer.protocol import Frame


class SenderPort(Protocol):
    """What the sender asks of the engine and of the control stream. Called on the engine's thread."""

    def send(self, peer: str, frame: Frame) -> None: ...

    def ticket_granted(self, request_id: str, cached_tokens: int) -> None: ...

    def ticket_deferred(self, request_id: str, retry_after_s: float) -> None: ...

    def pack(self, request_id: str, part: KVRange, out: Any, after: Any) -> DeviceCopy | None:
        """Copy this range of the request's KV into ``out`` (memoryview or DeviceView), which it fills.

        ``after``: what came with ``kv_computed``.

        None: it is there. Else a device does it after ``start_copies``; the block mix of what it writes comes with the
        end of that.
        """
        ...

    def start_copies(self) -> None:
        """Let the device begin what ``pack`` asked of it."""
        ...

    def transfer_done(self, request_id: str) -> None:
        """The receiver has everything: free the KV."""
        ...

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        """Free the KV, end the request. ``peer_lost``: it was the receiver that failed, as far as is known."""
        ...
