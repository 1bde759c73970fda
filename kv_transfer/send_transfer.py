"""A transfer as its sender sees it, and the data channel that it shares with others. State only; sender.py decides."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.backends.base import Channel
from kv_transfer.layout import KVRange
from kv_transfer.lease import Lease
from kv_transfer.protocol import Ticket
from kv_transfer.staging import SlotPool
from kv_transfer.transfer import TransferKey, TransferState, check_edge


@dataclass(slots=True, eq=False)
class Link:
    """The data channel to one receiver, and what waits for it."""

    name: str
    peer: str
    channel: Channel
    arena: SlotPool
    pending: deque[tuple[SendTransfer, KVRange, Any]] = field(default_factory=deque)
    slots_in_use: int = 0


@dataclass(slots=True, eq=False)
class SendTransfer:
    request_id: str
    key: TransferKey
    peer: str
    receiver_incarnation: int
    prompt_tokens: int
    lease: Lease
    state: TransferState = TransferState.HANDSHAKING
    asked_s: float | None = None
    """When the open question went out; None: nothing is asked (deferred)."""
    ticket: Ticket | None = None
    link: Link | None = None
    segments_planned: int = 0
    segments_sent: int = 0
    segments_read: int = 0
    """Whose slots came back: the channel has no more to do with them."""
    first_segment_s: float | None = None
    ended: bool = False
    """End of prefill was told."""

    def move(self, state: TransferState) -> None:
        check_edge(self.key, self.state, state)
        self.state = state
